"""The GPU of a worker of pytest-xdist."""

import os


def gpu_of_worker() -> dict[str, str]:
    """The environment variable that leaves this worker one of the GPUs of CUDA_VISIBLE_DEVICES=0,1,
    in turn; empty without several.
    """
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker or len(gpus) == 1:
        return {}
    return {"CUDA_VISIBLE_DEVICES": gpus[int(worker.removeprefix("gw")) % len(gpus)]}
