"""Processes with a part of the vocabulary each, for tests/parallel/test_vocab_parallel.py: each compiles a
small decoder, and leaves its logits and the text of its graph in a file.
"""

import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from vocab_model import IDS, WIDTH, Decoder, divided

from atomc.parallel.process_group import TensorParallel
from atomc.parallel.vocab import VocabParallelHead, leave_apart
from atomc.report.report import reports

RANKS = 2
# Rows of logits of 67 ids, of which the second process has those from 34 on.
EQUAL = {1: (5, 33, 34, 66), 2: (40, 66), 3: (66,), 4: (33, 34)}
CASES = [(64, False), (67, False), (67, True)]  # size of the vocabulary, whether weights are tied
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
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
        options: dict[str, Any] = {"strict": True, "glue": "eager", "cache": False}
        logits.append(torch.compile(model, backend="atom", options=options)(ids))
    return {"logits": logits, "ops": dict(reports()[-1].num_ops)}


def some_logits(dtype: torch.dtype) -> Tensor:
    """Logits [8, 67], all negative: the largest ones have equals in a row of EQUAL; one row has a
    NaN, and one no finite number.
    """
    found = -1 - torch.rand(8, 67, generator=torch.Generator().manual_seed(0)).to(dtype)
    for row, ids in EQUAL.items():
        found[row, list(ids)] = -0.5
    found[5, 3], found[6] = float("nan"), -torch.inf
    # Differ in fp64 only.
    found[7, 3], found[7, 50] = -0.25 - 1e-12, -0.25
    return found


def apart(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, largest logits, and all logits, from this process's columns."""
    model = decoder(67, False)
    head, logits = model.get_submodule("head"), some_logits(dtype)
    assert isinstance(head, VocabParallelHead)
    parts = leave_apart(head, distributed.get_rank())
    assert type(head) is nn.Linear and head(torch.zeros(2, WIDTH)).shape == (2, 34)
    own = nn.functional.pad(logits, (0, 1))[:, parts.first : parts.first + 34]
    return *parts.largest(own), parts.gathered(own)


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
    torch.save({dtype: apart(dtype) for dtype in DTYPES}, folder / f"apart-{rank}.pt")
    distributed.destroy_process_group()
