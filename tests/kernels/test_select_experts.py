"""Which kernel experts get, and that the compiled call computes what eager does."""

import pytest
import torch
from kernel_cases import CASES
from kernel_cases.draw import Draw
from torch import Tensor
from torch.testing import assert_close

import atomc
from atomc import ops

EXPERTS = [name for name in CASES if name.startswith("moe_experts")]


def chosen(op: str, platform: str) -> set[str]:
    given = CASES[op]["seventeen tokens"](Draw(torch.bfloat16))
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in given.items() if name not in tensors}

    def call(*values: Tensor) -> Tensor:
        return getattr(ops, op)(**dict(zip(tensors, values, strict=True)), **rest)

    report = atomc.explain(call, *tensors.values(), platform=platform)
    return {choice.chosen for choice in report.kernels if choice.op == op}


@pytest.mark.parametrize("op", EXPERTS)
@pytest.mark.parametrize(("platform", "provider"), [("h200", "triton"), ("cpu", "torch")])
def test_experts_have_a_kernel_and_are_never_left_to_the_compiler_of_glue(
    op: str, platform: str, provider: str
) -> None:
    if provider == "triton":
        pytest.importorskip("triton")
    assert chosen(op, platform) == {provider}


class Layer(torch.nn.Module):
    """A router, and experts of its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.randn(8, 32))
        self.w13 = torch.nn.Parameter(torch.randn(8, 48, 32) / 6)
        self.w2 = torch.nn.Parameter(torch.randn(8, 32, 24) / 5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = ops.topk_route(x @ self.gate.T, k=2, renormalize=True)
        return ops.moe_experts(x, ids, weights, self.w13, self.w2)


@pytest.mark.parametrize("glue", ["eager", pytest.param("inductor", marks=pytest.mark.rotating)])
def test_a_layer_compiled_on_a_cpu_computes_what_it_does_in_eager(glue: str) -> None:
    layer, x = Layer().requires_grad_(False), torch.randn(9, 32)
    compiled = torch.compile(layer, backend="atom", options={"glue": glue})
    assert_close(compiled(x), layer(x))
