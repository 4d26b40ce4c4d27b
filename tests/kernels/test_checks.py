"""The checks that refusals are made of: what each refuses, by which code, and that none adds a
guard to a graph.
"""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from atomc.kernels import checks
from atomc.ops.formats import FLOATS, HALVES
from atomc.ops.op import Refusal
from atomc.platform import Platform

X, HALF = torch.ones(2, 3, 8), torch.ones(2, 3, 8, dtype=torch.bfloat16)
CACHE = torch.ones(4, 16, 2, 8)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (checks.unlike(HALVES, q=HALF, bias=None), None),
        (
            checks.unlike(HALVES, q=X),
            Refusal("dtype", "q is torch.float32: written for torch.bfloat16 or torch.float16"),
        ),
        (
            checks.unlike((torch.float32,), q=X, k=HALF),
            Refusal(
                "dtype",
                "q is torch.float32, k is torch.bfloat16: written for torch.float32, all of one dtype",
            ),
        ),
        (
            checks.unlike(FLOATS, q=X, k=HALF),
            Refusal(
                "dtype",
                "q is torch.float32, k is torch.bfloat16: written for "
                "torch.bfloat16 or torch.float16 or torch.float32, all of one dtype",
            ),
        ),
        (checks.wrong_rank((2, 3), q=X), None),
        (checks.wrong_rank((4,), q=X), Refusal("shape", "q has 3 dimensions: written for 4")),
        (
            checks.unlike_shapes(X, residual=None, up=X[:1]),
            Refusal("shape", "up is [1, 3, 8], expected [2, 3, 8]"),
        ),
        (
            checks.unaligned_heads(X, X[..., :4], 128),
            Refusal("shape", "heads of 8 and 4: written for multiples of 8 up to 128"),
        ),
        (
            checks.strided(q=X, k=X.transpose(1, 2)),
            Refusal("layout", "the last dimension of k is not contiguous"),
        ),
        (checks.scattered_slots(torch.arange(8)), None),
        (
            checks.scattered_slots(torch.arange(8)[::2]),
            Refusal("layout", "slots are not a contiguous vector"),
        ),
        (checks.scattered_blocks(CACHE), None),
        (checks.scattered_blocks(CACHE[:1, :8]), None),
        (
            checks.scattered_blocks(CACHE, CACHE[:, :8]),
            Refusal("layout", "the blocks of the cache are not contiguous"),
        ),
        (checks.unsupported("it", mask=None, window=0, softcap=0.0), None),
        (
            checks.unsupported("it", sinks=torch.zeros(1)),
            Refusal("argument", "it does not support sinks"),
        ),
        (
            checks.unknown(("a", "b"), style="c"),
            Refusal("argument", "style 'c' is not one of ('a', 'b')"),
        ),
        (checks.odd_group(64, 16), None),
        (
            checks.odd_group(8, 16),
            Refusal("shape", "groups of 8 columns: written for powers of two from 16 on"),
        ),
        (checks.older_than((8, 9), Platform.named("h200"), "it runs"), None),
        (
            checks.older_than((8, 9), Platform.named("sm80"), "it runs"),
            Refusal("hardware", "it runs on NVIDIA GPUs from sm89 on"),
        ),
        (
            checks.older_than((8, 9), Platform.named("gfx950"), "it runs"),
            Refusal("hardware", "it runs on NVIDIA GPUs from sm89 on"),
        ),
    ],
)
def test_a_check_returns_its_refusal_or_nothing(
    found: Refusal | None, expected: Refusal | None
) -> None:
    assert found == expected


def test_the_first_refusal_is_that_of_the_first_check_that_refuses() -> None:
    def refuse_width(platform: Platform, x: Tensor, most: int = 8, **_: object) -> Refusal | None:
        return checks.too_wide(x.shape[-1], most)

    def refuse_rank(platform: Platform, x: Tensor, **_: object) -> Refusal | None:
        return checks.wrong_rank((2,), x=x)

    h200 = Platform.named("h200")
    both = checks.first_refusal(refuse_width, refuse_rank)
    assert both(h200, x=torch.ones(2, 8), y=None) is None
    assert both(h200, x=X, y=None) == checks.wrong_rank((2,), x=X)
    assert both(h200, x=torch.ones(2, 3, 9)) == checks.too_wide(9, 8)
    narrow = checks.first_refusal(refuse_width, most=4)
    assert narrow(h200, x=X) == narrow(h200, x=X, most=8) == checks.too_wide(8, 4)


def test_checks_of_sizes_and_strides_add_no_guard() -> None:
    shapes = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, *[DimDynamic.STATIC] * 3])
    with FakeTensorMode(shape_env=shapes) as mode:
        cache: Tensor = mode.from_tensor(CACHE, symbolic_context=context)
        slots = cache.new_empty(cache.shape[0])
        assert (
            checks.scattered_blocks(cache)
            or checks.strided(cache=cache)
            or checks.scattered_slots(slots) is None
        )
        assert checks.unlike_shapes(cache, other=cache) is None
    assert shapes.guards == []
