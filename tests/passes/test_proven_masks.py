"""A mask that the graph builds from positions alone, as an argument of scaled_dot_product_attention:
causal, with a window, or a mask that stays.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rewriting import after_passes
from test_counts import stock
from torch import Tensor

from atomc import passes
from atomc.ops import attention
from atomc.options import Options
from atomc.platform import Platform
from atomc.rewriting.graph_pass import Context

PASSES = [p for p in passes.PIPELINE if p.name in ("tidy", "proven_masks")]
T = 7
Q, K, V = torch.randn(3, 1, 2, T, 8, generator=torch.Generator().manual_seed(0))


def sequences(positions: Tensor) -> Tensor:
    """The number of the packed sequence of each position [1, T], as transformers counts it."""
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def packed(positions: Tensor) -> Tensor:
    """Earlier tokens of the same sequence: True for visible keys, [1, 1, T, T]."""
    rows, columns = torch.arange(T)[:, None], torch.arange(T)
    number, batch = sequences(positions), torch.zeros(1, dtype=torch.int64)
    same = number[batch, rows] == number[batch, columns]
    return (same & (positions[batch, columns] <= positions[batch, rows]))[None, None]


def counted(start: int = 0, step: int = 1) -> Tensor:
    return torch.arange(start, start + step * T, step)[None]


def window(size: int) -> Tensor:
    rows, columns = torch.arange(T)[:, None], torch.arange(T)
    return (columns <= rows) & (columns > rows - size)


def rows_from(first: int) -> Tensor:
    """Rows from the first one on see all keys: [1, 1, T, T], the columns of a row one element."""
    return (torch.arange(T)[None, None, :, None] >= first).expand(1, 1, T, T)


PROVEN: dict[str, tuple[Callable[[], Tensor], tuple[bool, int]]] = {
    "packed, one sequence": (lambda: packed(counted()), (True, 0)),
    "packed, from another position on": (lambda: packed(counted(5)), (True, 0)),
    "a triangle": (lambda: torch.ones(T, T, dtype=torch.bool).tril(), (True, 0)),
    "numbers": (lambda: torch.full((T, T), -1e38).triu(1), (True, 0)),
    "a window": (lambda: window(3), (True, 3)),
    "a window that hides one key": (lambda: window(T - 1), (True, T - 1)),
    "a window that hides none": (lambda: window(T), (True, 0)),
    "all keys": (lambda: torch.ones(T, T, dtype=torch.bool), (False, 0)),
    "all keys of every row": (lambda: torch.ones(1, T, dtype=torch.bool), (False, 0)),
    "a comparison that all rows pass": (lambda: rows_from(0), (False, 0)),
    "a comparison that all keys pass": (lambda: torch.arange(T)[None] < T, (False, 0)),
    "comparisons that no position fails": (
        lambda: window(3) & rows_from(0) & (torch.arange(2, T + 2) > 1.5),
        (True, 3),
    ),
}
STAYS: dict[str, Callable[[], Tensor]] = {
    "packed, each token alone": lambda: packed(counted(step=2)),
    "packed, two sequences": lambda: packed(torch.cat((counted()[:, :3], counted()[:, :4]), -1)),
    "one key more": lambda: torch.ones(T, T, dtype=torch.bool).tril(1),
    "later keys": lambda: torch.ones(T, T, dtype=torch.bool).triu(),
    "weak numbers": lambda: torch.full((T, T), -10.0).triu(1),
    "the first key hidden": lambda: (torch.arange(T) >= 1)[None],
    "the last key hidden": lambda: (torch.arange(T) < T - 1)[None],
    "the last key hidden, inclusive": lambda: (torch.arange(T) <= T - 2)[None],
    "the first row hidden": lambda: rows_from(1),
    "no row visible": lambda: rows_from(T),
    "one row": lambda: torch.ones(1, T, dtype=torch.bool).tril(),
    "an index from the end": lambda: (
        torch.arange(T) <= torch.arange(T)[torch.arange(-1, T - 1)][:, None]
    ),
}


def sites(
    mask: Callable[[], Tensor], dynamic: bool = False, context: Context | None = None
) -> list[dict[str, object]]:
    """The attributes of attention behind the pass; its result is eager's."""
    seen: list[dict[str, object]] = []

    def look(gm: torch.fx.GraphModule, context: object) -> list[object]:
        for node in gm.graph.find_nodes(op="call_function", target=attention.overload):
            bound = attention.signature.bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            seen.append(bound.arguments)
        return []

    chosen = [*PASSES, passes.Pass("look", look)]
    traced = after_passes(
        chosen,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask()),
        *(Q, K, V),
        dynamic=dynamic,
        context=context,
    )
    assert traced.error < 1e-5
    return seen


def test_the_runtime_keeps_a_window_of_all_new_tokens() -> None:
    context = Context(Options(), Platform.detect("cpu"), paged=True)
    [attributes] = sites(PROVEN["a window that hides none"][0], context=context)
    assert (attributes["mask"], attributes["window"]) == (None, T)


@pytest.mark.parametrize("name", PROVEN)
def test_a_mask_of_positions_that_causal_and_window_express_is_dropped(name: str) -> None:
    mask, (causal, size) = PROVEN[name]
    [found] = sites(mask)
    assert (found["mask"], found["causal"], found["window"]) == (None, causal, size)


@pytest.mark.parametrize("name", STAYS)
def test_another_mask_stays(name: str) -> None:
    [found] = sites(STAYS[name])
    assert found["mask"] is not None and found["causal"] is False


@pytest.mark.rotating
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stock_model_without_a_cache_needs_no_mask_of_one_sequence(dynamic: bool) -> None:
    model = stock("llama", 1, device="cpu", dtype=torch.float32)
    ids = torch.arange(1, 10)[None]
    whole = [p for p in passes.PIPELINE if not p.paged and not p.off_by_default]
    traced = after_passes(
        whole, lambda ids: model(input_ids=ids, use_cache=False).logits, ids, dynamic=dynamic
    )
    assert traced.error < 1e-5
    assert " le(" not in traced.text and "None, scale=" in traced.text
