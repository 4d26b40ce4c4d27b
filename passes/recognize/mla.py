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
handle is passed on: the runtime then caches the latent instead of keys and values. A mask that
shows chosen keys (chosen_mask) becomes the operand `chosen`.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from atomc import ops
from atomc.graph.sizes import spell_shape
from atomc.ops.formats import FLOATS, FP8
from atomc.passes.typed_aten import transpose
from atomc.rewriting.example import Example, OneOf, tensor_example
from atomc.rewriting.rewrite import Case, Rewrite, unsupported

squeeze: Callable[[Tensor, int], Tensor] = torch.ops.aten.squeeze.dim


def _pattern(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None,
    chosen: Tensor | None,
    scale: float,
    heads_first: bool,
) -> Tensor:
    both = ops.linear(latent, weight)
    return attended(q_nope, q_rope, both, k_rope, kv, chosen, scale, heads_first)


def attended(
    q_nope: Tensor,
    q_rope: Tensor,
    both: Tensor,
    k_rope: Tensor,
    kv: Tensor | None,
    chosen: Tensor | None,
    scale: float,
    heads_first: bool,
) -> Tensor:
    """The end of the pattern: attention over `both`, the product that makes keys and values."""
    state: list[Tensor | None] = [] if kv is None else [kv]
    if chosen is not None:
        state = [kv, ops.chosen_mask(chosen)]
    q, k, v = _expanded(q_nope, q_rope, both, k_rope, heads_first)
    return ops.attention(q, k, v, *state, scale=scale)


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
    both = ops.linear(latent, weight)
    q, k, v = _expanded(q_nope, q_rope, both, k_rope, heads_first)
    return ops.attention(q, k, v, None, mask, scale=scale, causal=False)


def _expanded(
    q_nope: Tensor, q_rope: Tensor, both: Tensor, k_rope: Tensor, heads_first: bool
) -> tuple[Tensor, ...]:
    """Queries, keys and values of all heads, tokens before heads."""
    nope = q_nope.shape[-1]
    q = torch.cat((q_nope, q_rope), -1)
    if heads_first:
        batch, heads, tokens, _ = q_rope.shape
        both = both.view(batch, tokens, heads, -1).transpose(1, 2)
    else:
        both = both.view(*q_rope.shape[:-1], -1)
    k = torch.cat((both[..., :nope], k_rope.expand(q_rope.shape)), -1)
    expanded = q, k, both[..., nope:]
    return tuple(each.transpose(1, 2) for each in expanded) if heads_first else expanded


def replacement(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    weight: Tensor,
    kv: Tensor | None,
    chosen: Tensor | None,
    scale: float,
    heads_first: bool,
) -> Tensor:
    state = () if kv is None else (kv,)
    some = {} if chosen is None else {"chosen": chosen}
    if heads_first:
        q_nope, q_rope, k_rope = (transpose(each, 1, 2) for each in (q_nope, q_rope, k_rope))
        latent = squeeze(latent, 1)
    return ops.mla_attention(q_nope, q_rope, latent, k_rope, weight, *state, scale=scale, **some)


def rows_example(heads_first: bool, width: int, sparse: bool) -> Example:
    """Queries of 7 heads, a latent of this width, and the arguments that are no tensors."""
    rows: Example = (
        {
            "q_nope": tensor_example(2, 7, 5, 20),
            "q_rope": tensor_example(2, 7, 5, 12),
            "latent": tensor_example(2, 1, 5, width),
            "k_rope": tensor_example(2, 1, 5, 12),
        }
        if heads_first
        else {
            "q_nope": tensor_example(5, 7, 20),
            "q_rope": tensor_example(5, 7, 12),
            "latent": tensor_example(5, width),
            "k_rope": tensor_example(5, 1, 12),
        }
    )
    chosen = tensor_example(*((2, 5, 9) if heads_first else (5, 9)), dtype=torch.int32)
    return {
        **rows,
        "kv": tensor_example(0, 13, 33, dtype=OneOf(torch.bfloat16, *FP8)),
        "chosen": chosen if sparse else None,
        "scale": 0.25,
        "heads_first": heads_first,
    }


def _example(heads_first: bool, stateful: bool, sparse: bool) -> Example:
    example = {**rows_example(heads_first, 22, sparse), "weight": tensor_example(259, 22)}
    return example if stateful else {**example, "kv": None}


def _masked_example(heads_first: bool) -> Example:
    example = {
        **rows_example(heads_first, 22, sparse=False),
        "weight": tensor_example(259, 22),
        "mask": tensor_example(6, 9, dtype=OneOf(torch.bool, *FLOATS)),
    }
    return {name: value for name, value in example.items() if name not in ("kv", "chosen")}


def guard(q_rope: Tensor, heads_first: bool, **_: object) -> str | None:
    if heads_first and q_rope.dim() != 4:
        return f"q_rope {spell_shape(q_rope.shape)} has {q_rope.dim()} dimensions, expected 4"
    return None


MLA_ATTENTION = Rewrite(
    "mla_attention",
    _pattern,
    replacement,
    _example,
    guard=guard,
    needs={"aten::cat": {}, "aten::expand": {}},
    cases=[
        Case(
            f"{'heads before tokens' if first else 'tokens before heads'}{', with state' * state}"
            f"{', of chosen keys' * sparse}",
            {"heads_first": first, "stateful": state, "sparse": sparse},
            {"chosen_mask": {}} if sparse else {},
        )
        for sparse, first, state in product((False, True), repeat=3)
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
