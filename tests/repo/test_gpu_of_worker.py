"""Workers of pytest-xdist take turns with the GPUs that the run was given."""

import pytest
from gpus import gpu_of_worker


@pytest.mark.parametrize(
    "given, worker, expected",
    [
        ("0,1", "gw0", "0"),
        ("0,1", "gw1", "1"),
        ("3,5,6", "gw10", "5"),
        ("GPU-a,GPU-b", "gw27", "GPU-b"),
        ("0,1", "", None),  # without xdist, and its main process: all GPUs
        ("1", "gw1", None),
        ("", "gw1", None),
    ],
)
def test_a_worker_has_one_of_several_gpus(given, worker, expected, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    assert gpu_of_worker() == ({} if expected is None else {"CUDA_VISIBLE_DEVICES": expected})
