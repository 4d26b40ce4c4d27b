"""What lies differently in memory after a change lies right for all that is behind it, and outside
as in eager.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rewriting import STRIDES_HOLD, explained
from torch import Tensor

import atomc
from atomc.compiler.pipeline import register_pass

B, T, N, D = 2, 5, 4, 16
X = torch.randn(B, T, N * D)
EAGER = {"glue": "eager"}
COS, SIN = torch.randn(2, 1, 1, T, D // 2)


def rotated(x: Tensor) -> Tensor:
    """Half-width tables: the result of cat is contiguous, whatever x is."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * COS - b * SIN, b * COS + a * SIN), -1)


def heads(x: Tensor) -> Tensor:
    return x.view(B, T, N, D).transpose(1, 2)


def scores(x: Tensor) -> Tensor:
    q = rotated(heads(x))
    return q @ q.transpose(-1, -2)  # a batched product looks at q as [B * N, T, D]


def flattened(x: Tensor) -> Tensor:
    return rotated(heads(x)).view(B * N, T * D).sin()


def joined_with_nothing(x: Tensor) -> Tensor:
    return torch.cat((heads(x).exp(), heads(x)[..., :0]), -1).view(B * N, T * D).sin()


@pytest.mark.parametrize("function", [scores, flattened, joined_with_nothing])
@pytest.mark.parametrize("dynamic", [False, True])
def test_views_behind_a_changed_place_are_right(
    function: Callable[[Tensor], Tensor], dynamic: bool
) -> None:
    ours = torch.compile(function, backend="atom", dynamic=dynamic, options={"glue": "eager"})
    if dynamic:
        torch.testing.assert_close(ours(X), function(X))
        return
    with register_pass(STRIDES_HOLD):
        torch.testing.assert_close(ours(X), function(X))


def joined(x: Tensor) -> Tensor:
    return torch.cat((x.exp(), x[..., :0]), -1)


@pytest.mark.parametrize("function", [rotated, lambda x: rotated(x).transpose(0, 2), joined])
def test_what_is_returned_lies_as_in_eager(function: Callable[[Tensor], Tensor]) -> None:
    def run(x: Tensor) -> Tensor:
        return function(heads(x))

    ours, theirs = torch.compile(run, backend="atom", options={"glue": "eager"})(X), run(X)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride() and atomc.reports()[-1].treated


def test_heads_of_attention_can_be_viewed_where_torch_returns_them_contiguous() -> None:
    def grouped(x: Tensor) -> Tensor:
        q = heads(x).contiguous()
        return F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)

    ours = torch.compile(
        lambda x: (grouped(x), grouped(x).view(B, N * T * D)), backend="atom", options=EAGER
    )
    found, expected = ours(X), grouped(X)
    torch.testing.assert_close(found, (expected, expected.view(B, N * T * D)))
    assert found[0].stride() == expected.stride() and atomc.reports()[-1].treated


def test_heads_of_attention_are_not_copied_for_a_reader_that_transposes_them_back() -> None:
    def grouped(x: Tensor) -> Tensor:
        q = heads(x)
        y = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True)
        return y.transpose(1, 2).reshape(B, T, N * D)

    assert explained(grouped, X, tolerance=1e-6).num_ops == {"attention": 1}
