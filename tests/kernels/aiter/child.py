"""A process in which AITER's real code stands without its GPU, and our kernels call it over the
case table.

    python child.py MODE ARCH SOURCE FOLDER

MODE is one of
interpret  Triton's interpreter runs the kernels; the results are compared with the meaning of the
           op
compile    each launch compiles the kernel to an object for ARCH, and launches nothing
cuda       as interpret, but on a GPU of NVIDIA's, for which Triton compiles the kernels
fake       on fake tensors: shapes, dtypes and strides are compared with those of the op; Triton
           launches nothing

For each line of standard input, {"kernel": name, "dtype": name, "most": number of cases}, one line
with {case: outcome}; an outcome begins with "passed", "refused" or "failed". {"lacking": ""} asks
for the functions that this AITER has not, {"model": scheme} for a small model as a whole.
"""

import json
import os
import sys
from pathlib import Path

import stage
from memory import check_bounds


def main(mode: str, arch: str, source: str, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if mode == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    stage.set_up(Path(folder), source, arch, on_cuda=mode == "cuda")
    compiled: list[str] = []
    if mode == "interpret":
        stage.interpret()
        check_bounds(poison=True)  # AITER reads tables by the tile, and drops what no row has
    if mode == "compile":
        stage.compile_only(compiled)
    if mode == "cuda":
        os.environ["TRITON_CACHE_DIR"] = str(
            Path(folder, "compiled")
        )  # another compiler than its users' by two rules
        stage.leave_out_what_is_amds()
    if mode == "fake":
        stage.launch_nothing()
    import trials  # which imports Triton and, when asked, AITER

    for line in sys.stdin:
        print(
            trials.ANSWER + json.dumps(trials.answer(mode, arch, compiled, json.loads(line))),
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
