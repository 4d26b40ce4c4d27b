"""Replace attention over keys and values that are expanded from a latent by one op (DeepSeek's
latent attention).

    latent > linear > view +- [..., :P] -+
                           |             cat -> k -+
    k_rope > expand -------|-------------+         |
                           +- [..., P:] ----> v ---+- attention
    q_nope, q_rope > cat ---------------------> q -+
 =>
    mla_attention(q_nope, q_rope, latent, k_rope, weight)

The dimension of heads may be before that of tokens, as in the classes of transformers. A state
handle is passed on: the runtime then caches the latent instead of keys and values.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import spell_shape
from atomc.ops.formats import FLOATS, FP8
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite, unsupported

transpose: Callable[[Tensor, int, int], Tensor] = torch.ops.aten.transpose.int
squeeze: Callable[[Tensor, int], Tensor] = torch.ops.aten.squeeze.dim


def _pattern(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None,
    scale: float,
    heads_first: bool,
) -> Tensor:
    q, k, v = _expanded(q_nope, q_rope, latent, k_rope, weight, heads_first)
    return ops.attention(q, k, v, *(() if kv is None else (kv,)), scale=scale)


def _masked(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    mask: Tensor,
    scale: float,
    heads_first: bool,
) -> Tensor:
    q, k, v = _expanded(q_nope, q_rope, latent, k_rope, weight, heads_first)
    return ops.attention(q, k, v, None, mask, scale=scale, causal=False)


def _expanded(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    heads_first: bool,
) -> tuple[Tensor, ...]:
    """Queries, keys and values of all heads, tokens before heads."""
    nope = q_nope.shape[-1]
    both, q = ops.linear(latent, weight), torch.cat((q_nope, q_rope), -1)
    if heads_first:
        batch, heads, tokens, _ = q_rope.shape
        both = both.view(batch, tokens, heads, -1).transpose(1, 2)
    else:
        both = both.view(*q_rope.shape[:-1], -1)
    k = torch.cat((both[..., :nope], k_rope.expand(q_rope.shape)), -1)
    found = q, k, both[..., nope:]
    return tuple(each.transpose(1, 2) for each in found) if heads_first else found


def _replacement(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None,
    scale: float,
    heads_first: bool,
) -> Tensor:
    state = () if kv is None else (kv,)
    if heads_first:
        q_nope, q_rope, k_rope = (transpose(each, 1, 2) for each in (q_nope, q_rope, k_rope))
        latent = squeeze(latent, 1)
    return ops.mla_attention(q_nope, q_rope, latent, k_rope, weight, *state, scale=scale)


def _example(heads_first: bool, stateful: bool) -> Example:
    handle = tensor_example(0, 3, 33, dtype=OneOf(torch.bfloat16, *FP8))
    return _operands(heads_first) | {"kv": handle if stateful else None}


def _masked_example(heads_first: bool) -> Example:
    mask = tensor_example(6, 9, dtype=OneOf(torch.bool, *FLOATS))
    return _operands(heads_first) | {"mask": mask}


def _operands(heads_first: bool) -> Example:
    made: Example = (
        {
            "q_nope": tensor_example(2, 7, 5, 20),
            "q_rope": tensor_example(2, 7, 5, 12),
            "latent": tensor_example(2, 1, 5, 22),
            "k_rope": tensor_example(2, 1, 5, 12),
        }
        if heads_first
        else {
            "q_nope": tensor_example(5, 7, 20),
            "q_rope": tensor_example(5, 7, 12),
            "latent": tensor_example(5, 22),
            "k_rope": tensor_example(5, 1, 12),
        }
    )
    more = {"weight": tensor_example(259, 22), "scale": 0.25, "heads_first": heads_first}
    return {**made, **more}


def _guard(q_rope: Tensor, heads_first: bool, **_: object) -> str | None:
    if heads_first and q_rope.dim() != 4:
        return f"q_rope {spell_shape(q_rope.shape)} has {q_rope.dim()} dimensions, expected 4"
    return None


MLA_ATTENTION = Rewrite(
    "mla_attention",
    _pattern,
    _replacement,
    _example,
    guard=_guard,
    needs={"aten::cat": {}, "aten::expand": {}},
    cases=[
        Case(
            f"{'heads before tokens' if first else 'tokens before heads'}{', with state' * state}",
            {"heads_first": first, "stateful": state},
        )
        for first, state in product((False, True), repeat=2)
    ],
)
MASKED_MLA = tuple(
    unsupported(
        "mla_attention",
        "masked",
        _masked,
        partial(_masked_example, heads_first),
        ("attention", "aten::cat", "aten::expand"),
        "a mask that is not known to hide exactly the later keys: transformers makes one from "
        "attention_mask and, without a cache, from position_ids",
    )
    for heads_first in (False, True)
)
