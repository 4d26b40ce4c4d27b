"""The sum over GPUs in one launch: where it is chosen, and on two GPUs what it computes."""

from pathlib import Path

import pytest
import torch
from kernel_cases.rows import one_process_group

import atomc
from atomc import kernels, ops

pytest.importorskip("triton")
assert kernels.load("triton") is None

ROOT = Path(__file__).parents[1]
one_process_group()
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def chosen(group, platform, width=4096, dtype=torch.bfloat16):
    """(tokens, note, refused) of the norm behind a sum over this group."""
    x, residual = torch.zeros(2, 5, width, dtype=dtype)

    def function(x, residual, weight):
        return ops.allreduce_add_rms_norm(x, residual, weight, 1e-6, group)

    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(residual, 0)
    report = atomc.explain(function, x, residual, x[0].clone(), platform=platform)
    return [(c.tokens, c.note, c.refused) for c in report.kernels if c.op.startswith("allreduce")]
