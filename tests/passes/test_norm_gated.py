"""The norm of a gated delta net and its gate become one op."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import rewritten
from torch.testing import assert_close

import atomc
from atomc import ops
from atomc.passes.fuse.norm_gated import RMS_NORM_GATED

qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")


def gated(x, gate, weight):
    y = ops.rms_norm(x, weight, 1e-6)
    return (F.silu(gate.float()) * y).to(x.dtype)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
def test_a_norm_times_its_gate_becomes_one_op(weight):
    x, gate = torch.randn(2, 3, 8).bfloat16()
    assert (
        rewritten(RMS_NORM_GATED, gated, x, gate, torch.randn(8, dtype=weight))
        == """\
%0 = rms_norm_gated(x, gate, weight, 1e-06, 'after')
return %0"""
    )


def test_a_gate_that_is_rounded_before_it_multiplies_is_left_alone():
    def rounded(x, gate, weight):
        return ops.rms_norm(x, weight, 1e-6) * F.silu(gate)

    rewritten(
        RMS_NORM_GATED,
        rounded,
        *torch.randn(2, 3, 8).bfloat16(),
        torch.ones(8).bfloat16(),
        matches=0,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_transformers_is_one_op(dtype):
    torch.manual_seed(0)
    norm = qwen.Qwen3_5RMSNormGated(16).to(dtype).requires_grad_(False)
    norm.weight.data.normal_()
    x, gate = torch.randn(2, 6, 16).to(dtype)
    options = {"strict": True, "glue": "eager", "expect": {"rms_norm_gated": 1, "silu_and_mul": 0}}
    compiled = torch.compile(norm, backend="atom", options=options)
    assert_close(compiled(x, gate), norm(x, gate))
    assert atomc.reports()[-1].matches["rms_norm_gated"] == 1
