"""Processes with a part of the vocabulary each, for tests/test_vocab_parallel.py: each compiles a
small decoder, and leaves its logits and the text of its graph in a file.
"""

import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from vocab_model import IDS, Decoder, divided

from atomc.parallel.group import TensorParallel
from atomc.report.report import reports

RANKS = 2
CASES = [(64, False), (67, False), (67, True)]  # size of the vocabulary, whether weights are tied
COMPILED = [(67, False)]


def decoder(size: int, tied: bool) -> nn.Module:
    """The part of this process."""
    model, group = Decoder(size, tied), distributed.group.WORLD
    assert group is not None
    return divided(model, TensorParallel.of(group))


def result(size: int, tied: bool) -> dict[str, Any]:
    """Logits in eager and, for some cases, compiled, with the calls of ops of the graph."""
    model, ids = decoder(size, tied), IDS % size
    with torch.inference_mode():
        logits = [model(ids)]
        if (size, tied) not in COMPILED:
            return {"logits": logits, "ops": {}}
        options = {"strict": True, "glue": "eager", "cache": False}
        logits.append(torch.compile(model, backend="atom", options=options)(ids))
    return {"logits": logits, "ops": dict(reports()[-1].num_ops)}


def run(rank: int, folder: Path) -> None:
    """Writes a file <number>-<rank>.pt with the result or the traceback of each case."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    for number, case in enumerate(CASES):
        try:
            out: dict[str, Any] | str = result(*case)
        except Exception:  # of any kind: the test of the case shows it
            out = traceback.format_exc()
        torch.save(out, folder / f"{number}-{rank}.pt")
    distributed.destroy_process_group()
