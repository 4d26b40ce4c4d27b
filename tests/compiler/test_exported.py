"""Graphs of `torch.export` are recognized as the modules that they come from."""

import pytest
import torch
import torch.nn.functional as F
from rewriting import functional_graph
from tiny_models import SIZES
from torch import Tensor, nn

import atomc
from atomc.passes.cleanup import drop_proven_asserts

ASSERT = torch.ops.aten._assert_tensor_metadata.default


class Block(nn.Module):
    """A norm and a gate, which both cast."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = self.weight * y.to(x.dtype)
        return F.silu(y) * y


def exported(module: nn.Module, *inputs: Tensor, **options: object) -> nn.Module:
    with torch.no_grad():
        return torch.export.export(module, inputs, **options).module()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exported_norm_is_recognized_with_eagers_values(dtype: torch.dtype) -> None:
    module, x = Block(37, dtype), torch.randn(7, 37, dtype=dtype)
    plain = exported(module, x)
    assert atomc.explain(plain, x).matches["rms_norm"] == 1
    compiled = torch.compile(plain, backend="atom", options={"glue": "eager", "cache": False})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


def test_an_exported_norm_of_any_number_of_rows_is_recognized() -> None:
    module, x = Block(37, torch.bfloat16), torch.randn(7, 37, dtype=torch.bfloat16)
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=1024)}}
    plain = exported(module, x, dynamic_shapes=rows)
    assert atomc.explain(plain, x, dynamic=True).matches["rms_norm"] == 1


@pytest.mark.rotating
def test_an_exported_model_has_the_rewrites_of_the_model() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES)).eval().to(torch.bfloat16)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
            return logits

    ids = torch.arange(13)[None]
    matches = atomc.explain(exported(Logits(), ids), ids).matches
    expected = {"rms_norm": 5, "add_rms_norm": 4, "rope": 4, "silu_and_mul": 2}
    assert {name: matches[name] for name in expected} == expected


def test_an_assertion_that_is_not_proven_stays() -> None:
    def function(x: Tensor) -> Tensor:
        ASSERT(x, dtype=torch.float32)
        return x.exp()

    graph = functional_graph(function, torch.randn(3, 5))
    [asserted] = graph.find_nodes(op="call_function", target=ASSERT)
    asserted.args, asserted.kwargs = asserted.args[:1], {"dtype": torch.bfloat16}
    assert not drop_proven_asserts(graph)
    asserted.kwargs = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert len(drop_proven_asserts(graph)) == 1
    assert not graph.find_nodes(op="call_function", target=ASSERT)


@pytest.mark.parametrize(
    ("metadata", "stays"),
    [({"size": [3, 5]}, False), ({"size": [3, 6]}, True), ({"stride": [1, 3]}, True)],
)
def test_an_assertion_of_sizes_or_strides_is_compared_with_them(
    metadata: dict[str, list[int]], stays: bool
) -> None:
    graph = functional_graph(lambda x: (ASSERT(x), x.exp())[1], torch.randn(3, 5))
    [asserted] = graph.find_nodes(op="call_function", target=ASSERT)
    asserted.kwargs = metadata
    drop_proven_asserts(graph)
    assert bool(graph.find_nodes(op="call_function", target=ASSERT)) == stays
