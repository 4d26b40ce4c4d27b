"""From starting a process to its first token: a Qwen3 on random weights, with empty caches and then
with full ones.

    python bench/startup.py --model 0.6b --json bench/results/startup-h200.json
    python bench/startup.py --model 0.6b --server        # until `atomc serve` says that it is ready

Parts, in seconds: python (the interpreter, until our first line runs), import (torch and the
context of CUDA apart), those of the engine (load, compile, allocate, warm up with the capture of
CUDA graphs), first token. "Cold" has empty caches of atomc, Inductor, Triton and the CUDA driver;
--repeat "warm" starts follow. Weights are random, so that reading them from disk is not in it. With
each start is what compiling consists of, and the Triton kernels that its process compiled or found
on disk, where a helper process leaves those that it compiles.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from model_shapes import MODELS

from atomc.runtime.bench.startup import Start, format_starts, starts
from atomc.runtime.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=2, help="warm starts")
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that one start may take"
    )
    parser.add_argument(
        "--server", action="store_true", help="start the server, not the engine alone"
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    given = parser.parse_args()
    gpu = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available() and given.device != "cpu"
        else None
    )
    machine = (
        f"{gpu or 'CPU'}, {os.cpu_count()} cores, torch {torch.__version__}, Python "
        f"{sys.version.split()[0]}"
    )
    print(f"{' '.join(['python', *sys.argv])}\n{machine}\n")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODELS[given.model]))
        settings = {
            "dtype": "bfloat16" if gpu else "float32",
            "device": "cuda" if gpu else "cpu",
            "load_format": "dummy",
            "max_model_len": given.max_model_len,
            "max_num_seqs": given.max_num_seqs,
        }
        config = EngineConfig(
            model=folder, **settings, options={"glue": "auto" if gpu else "eager"}
        )
        flags = [
            folder,
            *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items()),
        ]
        found = []
        for start in starts(
            config, warm=given.repeat, limit=given.limit, flags=flags if given.server else None
        ):
            found.append(start)
            print(f"{start['way']}: {start['seconds']:.2f} s\n{details(start)}\n", flush=True)
            if given.json:
                result = {
                    "machine": machine,
                    "command": " ".join(["python", *sys.argv]),
                    "settings": settings,
                    "starts": found,
                }
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    print(format_starts(found))


def details(start: Start) -> str:
    """The compile phases, the number of compiled kernels, and the imported libraries that are slow
    to import.
    """
    parts = sorted(start.get("compile", {}).items(), key=lambda part: -part[1])
    kernels = start.get("triton", {})
    lines = [
        "compile: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts),
        "Triton: {compiled} kernels compiled, {found} found, {seconds:.2f} s".format(**kernels)
        if kernels
        else "",
        f"CUDA graphs: {start.get('graphs', 0)}; imported "
        f"{', '.join(start.get('imported', [])) or 'nothing large'}",
        *start.get("notes", []),
    ]
    return "\n".join(f"  {line}" for line in lines if line)


if __name__ == "__main__":
    main()
