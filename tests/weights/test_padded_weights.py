"""A merged linear of 16 bits whose number of outputs is no multiple of 8 has rows of zeros, whose
results the graph leaves out.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from merged_models import EAGER, UNMERGED, compiled, last, merges, ready, weights
from torch import Tensor, nn

import atomc
from atomc.dumps.replay import Input, Packed, make
from atomc.program import compile_model
from atomc.weights.packed import pack, packed_together

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


class Router(nn.Module):
    """The router of experts, and the gate of a shared one."""

    def __init__(self, outputs: tuple[int, int] = (12, 1), bias: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.gate = (nn.Linear(32, n, bias=bias) for n in outputs)
        ready(self.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(-1) * self.gate(x).sigmoid()  # type: ignore[no-any-return]


def zero_rows() -> list[int]:
    """Of each merged linear of the last graph."""
    merged = [site for site in last().sites if site.rewrite.startswith("merge")]
    return [site.attrs.get("zero_rows", 0) for site in merged]


def packed(model: Router, zeros: int) -> Tensor:
    """The packed weight, which there must be already."""
    parts = weights(model.router, model.gate)
    assert packed_together(parts[0])
    found = pack(parts, zeros)
    assert isinstance(found, Tensor)
    return found


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7)


@pytest.mark.parametrize("bias", [False, True])
def test_an_odd_number_of_outputs_becomes_a_multiple_of_eight(bias: bool) -> None:
    model = Router(bias=bias)
    expected = compiled(model, **UNMERGED)(X)
    torch._dynamo.reset()
    close(compiled(model)(X), expected)
    assert merges() == {"merge_linears": 1} and zero_rows() == [3]
    whole = packed(model, 3)
    assert whole.shape == (16, 32) and not whole[13:].any()
    assert torch.equal(whole[:12], model.router.weight)
    assert torch.equal(whole[12:13], model.gate.weight)
    close(model(X), expected)


@pytest.mark.parametrize(
    "model, x",
    [(Router((15, 1)), X), (Router().float(), X.float())],
    ids=["a multiple of eight", "32 bits"],
)
def test_other_linears_have_no_rows_of_zeros(model: Router, x: Tensor) -> None:
    close(compiled(model)(x), model(x))
    assert merges() == {"merge_linears": 1} and zero_rows() == [0]


def test_a_lone_linear_stays_as_it_is() -> None:
    gate = ready(nn.Linear(32, 1).bfloat16())
    close(compiled(gate)(X), gate(X))
    assert not packed_together(gate.weight) and gate.weight.untyped_storage().nbytes() == 64


def test_a_checkpoint_is_saved_and_loaded_without_the_rows_of_zeros(tmp_path: Path) -> None:
    model, other = Router(), Router()
    run = compiled(model)
    run(X)
    saved = model.state_dict()
    assert {name: t.shape for name, t in saved.items()} == {
        "router.weight": (12, 32),
        "gate.weight": (1, 32),
    }
    torch.save(saved, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 4096
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert torch.equal(other.router.weight, model.router.weight)
    del saved
    with torch.no_grad():
        other.router.weight.mul_(2)
    model.load_state_dict(other.state_dict())
    close(run(X), other(X))
    assert not packed(model, 3)[13:].any()


def moved(model: Router) -> None:
    model.float().bfloat16()


def assigned(model: Router) -> None:
    model.gate.weight.data = torch.randn(1, 32).bfloat16()


@pytest.mark.parametrize("change", [moved, assigned])
def test_weights_that_move_get_rows_of_zeros_again(change: Callable[[Router], None]) -> None:
    model = Router()
    run = compiled(model)
    run(X)
    change(model)
    close(run(X), model(X))
    assert packed(model, 3).shape == (16, 32) and not packed(model, 3)[13:].any()


class Decoder(nn.Module):
    """As the runtime calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(40, 32).bfloat16(), Router()
        ready(self)

    def forward(self, ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None) -> Tensor:
        return self.router(self.embed(ids))  # type: ignore[no-any-return]


def test_programs_for_the_runtime_and_the_backend_share_one_packed_weight() -> None:
    model, ids = Decoder(), torch.arange(9)
    expected = model(ids, ids)
    programs = [compile_model(model, options=EAGER) for _ in range(2)]
    close(compiled(model)(ids, ids), expected)
    assert zero_rows() == [3]
    assert all(merges(program.report) == {"merge_linears": 1} for program in programs)
    parts = weights(model.router.router, model.router.gate)
    assert {id(part) for part in packed_together(parts[0])} == {id(part) for part in parts}
    whole = packed(model.router, 3)
    assert [part.data_ptr() for part in parts] == [whole.data_ptr(), whole[12].data_ptr()]


def test_a_packed_weight_is_not_read_with_another_number_of_zeros() -> None:
    parts = weights(Router().router, Router().gate)
    assert isinstance(pack(parts, 3), Tensor)
    assert "another number of zeros" in str(pack(parts))


def test_a_cached_graph_makes_the_rows_of_zeros(tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        model = Router()
        found.append(compiled(model, cache=True, cache_dir=str(tmp_path))(X))
        assert packed(model, 3).shape == (16, 32)
    assert last().cache == "hit"
    assert torch.equal(*found)


def test_a_dump_makes_the_rows_of_zeros() -> None:
    recipes = {
        "a": Input(torch.bfloat16, (3, 4)),
        "b": Input(torch.bfloat16, (2, 4)),
        "packed_0": Packed(("a", "b"), zero_rows=3),
    }
    made = make(recipes)
    whole = made["packed_0"]
    assert isinstance(whole, Tensor) and whole.shape == (8, 4)
    assert torch.equal(whole[:3], made["a"]) and not whole[5:].any()


def test_a_model_on_the_meta_device_is_explained() -> None:
    report = atomc.explain(Router().to("meta"), torch.empty(2, 5, 32, device="meta", dtype=X.dtype))
    assert report.matches["merge_linears"] == 1
