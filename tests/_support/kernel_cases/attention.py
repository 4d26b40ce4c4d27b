"""Attention, over what is given and over a paged or contiguous cache."""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kernel_cases.draw import E4M3, E4M3FNUZ, Cases, Draw, cache_scales, slots_of


def attended(
    draw: Draw,
    tokens: int = 7,
    keys: int | None = None,
    heads: tuple[int, int] = (8, 2),
    width: int = 64,
    batch: tuple[int, ...] = (),
    **attributes: Any,
) -> dict[str, Any]:
    keys = tokens if keys is None else keys
    return {
        "q": draw.normal(*batch, tokens, heads[0], width),
        "k": draw.normal(*batch, keys, heads[1], width),
        "v": draw.normal(*batch, keys, heads[1], width),
        "scale": width**-0.5,
        **attributes,
    }


def packed_attention(draw: Draw) -> dict[str, Any]:
    q, k, v = draw.heads(33, 8, 2, 2, width=64)
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def heads_before_tokens(draw: Draw) -> dict[str, Any]:
    q, k, v = (draw.normal(2, heads, 7, 64).transpose(1, 2) for heads in (8, 2, 2))
    return {"q": q, "k": k, "v": v, "scale": 0.125}


def bool_mask(draw: Draw, *shape: int) -> Tensor:
    """About a third hidden, and all of row 2."""
    mask = draw.below(3, *shape) > 0
    mask[..., 2, :] = False
    return mask


ATTENTION: Cases = {
    "causal": attended,
    "one token": lambda draw: attended(draw, 1),
    "one token, batch": lambda draw: attended(draw, 1, 33, batch=(2,), causal=False),
    "odd sizes": lambda draw: attended(draw, 33, width=80),
    "several tiles": lambda draw: attended(draw, 200, heads=(4, 2)),
    "widest heads": lambda draw: attended(draw, 65, heads=(2, 1), width=256),
    "causal, fewer keys": lambda draw: attended(draw, 33, 7),
    "as many keys as queries": lambda draw: attended(draw, heads=(4, 4), width=128),
    "one key head, narrow": lambda draw: attended(draw, 33, heads=(6, 1), width=8),
    "batch": lambda draw: attended(draw, batch=(2,)),
    "no tokens": lambda draw: attended(draw, 0),
    "not causal": lambda draw: attended(draw, 7, 33, causal=False),
    "causal, more keys": lambda draw: attended(draw, 7, 33),
    "window": lambda draw: attended(draw, 33, window=5),
    "window longer than the keys": lambda draw: attended(draw, 7, window=64),
    "window, not causal": lambda draw: attended(draw, 33, window=5, causal=False, batch=(2,)),
    "softcap": lambda draw: attended(draw, 33, softcap=2.0),
    "sinks": lambda draw: attended(draw, 33) | {"sinks": draw.normal(8)},
    "sinks, softcap, window, batch": lambda draw: (
        attended(draw, 33, window=5, softcap=2.0, batch=(2,)) | {"sinks": draw.normal(8)}
    ),
    "bool mask": lambda draw: (
        attended(draw, 7, 33, causal=False) | {"mask": bool_mask(draw, 7, 33)}
    ),
    "bool mask, causal": lambda draw: (
        attended(draw, 7, batch=(2,)) | {"mask": bool_mask(draw, 2, 1, 7, 7)}
    ),
    "bool mask of each head": lambda draw: attended(draw, 7) | {"mask": bool_mask(draw, 8, 7, 7)},
    "bool mask, window": lambda draw: (
        attended(draw, 33, window=5) | {"mask": bool_mask(draw, 1, 33, 33)}
    ),
    "float mask": lambda draw: attended(draw, 7, 33, causal=False) | {"mask": draw.normal(7, 33)},
    "float mask, causal": lambda draw: (
        attended(draw, 7, batch=(2,)) | {"mask": draw.normal(2, 1, 7, 7)}
    ),
    "float mask that hides a row": lambda draw: (
        attended(draw, 7, 33, causal=False)
        | {"mask": draw.normal(7, 33).masked_fill(~bool_mask(draw, 7, 33), float("-inf"))}
    ),
    "fp32 mask": lambda draw: (
        attended(draw, 7) | {"mask": draw.normal(1, 7, 7, dtype=torch.float32)}
    ),
    "smallest number as mask": lambda draw: (
        attended(draw, 7, causal=False)
        | {
            "mask": torch.zeros(7, 7, device=draw.device).masked_fill(
                ~bool_mask(draw, 7, 7), torch.finfo().min
            )
        }
    ),
    "values narrower than keys": lambda draw: attended(draw) | {"v": draw.normal(7, 2, 32)},
    "packed": packed_attention,
    "heads before tokens": heads_before_tokens,
    "with a handle": lambda draw: attended(draw) | {"kv": draw.normal(0, 2, 64)},
}


def paged(
    draw: Draw,
    sequences: list[tuple[int, int]],
    heads: tuple[int, int] = (8, 2),
    width: int = 64,
    padding: int = 0,
    cache: torch.dtype | None = None,
    **attributes: Any,
) -> dict[str, Any]:
    """Sequences of (new tokens, length) over caches that hold their keys, and rows of no sequence
    behind them.
    """
    lengths = [length for _, length in sequences]
    k_cache, v_cache, blocks = draw.caches(lengths, heads[1], width, cache)
    block_size = k_cache.shape[1]
    for own, length in zip(blocks, lengths, strict=True):
        slots = draw.ints(slots_of(own, range(length), block_size))
        for state in (k_cache, v_cache):
            state[slots // block_size, slots % block_size] = draw.normal(
                length, heads[1], width
            ).to(state.dtype)
    starts = torch.tensor([0] + [new for new, _ in sequences]).cumsum(0)
    return {
        "q": draw.normal(int(starts[-1]) + padding, heads[0], width),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "query_start": starts.to(torch.int32).to(draw.device),
        "seq_lens": draw.ints(lengths, torch.int32),
        "block_tables": torch.tensor(blocks, dtype=torch.int32, device=draw.device),
        "token": draw.normal(0),
        "scale": width**-0.5,
        **attributes,
    }


def narrow_values(draw: Draw, sequences: list[tuple[int, int]]) -> dict[str, Any]:
    """Keys of 192 columns and values of 128, as in DeepSeek-V3."""
    arguments = paged(draw, sequences, heads=(2, 2), width=192)
    wide = arguments["v_cache"]
    _, v_cache, _ = draw.caches([length for _, length in sequences], 2, 128, wide.dtype)
    return arguments | {"v_cache": v_cache.copy_(wide[..., :128])}


DECODE = [(1, 5), (1, 33), (1, 16), (1, 17), (1, 1)]

PREFILL = [(7, 7), (33, 33), (1, 1)]

CHUNKS = [(7, 20), (16, 33), (3, 4)]

MIXED = [(1, 40), (0, 9), (33, 33), (4, 21), (0, 0)]

PAGED_ATTENTION: Cases = {
    "decode": lambda draw: paged(draw, DECODE),
    "one sequence": lambda draw: paged(draw, [(1, 300)]),
    "prefill": lambda draw: paged(draw, PREFILL),
    "chunks": lambda draw: paged(draw, CHUNKS),
    "drafts": lambda draw: paged(draw, [(4, 33), (4, 4), (4, 18)]),
    "mixed, some without new tokens": lambda draw: paged(draw, MIXED),
    "padding rows": lambda draw: paged(draw, MIXED, padding=3),
    "padding rows only": lambda draw: paged(draw, [(0, 9)], padding=3),
    "several tiles": lambda draw: paged(draw, [(70, 300), (1, 290), (150, 150)], heads=(4, 2)),
    "as many keys as queries, decode": lambda draw: paged(draw, DECODE, heads=(4, 4), width=128),
    "as many keys as queries": lambda draw: paged(draw, MIXED, heads=(4, 4), width=80),
    "one key head, narrow": lambda draw: paged(draw, MIXED, heads=(6, 1), width=8),
    "values narrower than keys, decode": lambda draw: narrow_values(draw, DECODE),
    "values narrower than keys": lambda draw: narrow_values(draw, MIXED),
    "window, decode": lambda draw: paged(draw, DECODE, window=6),
    "window": lambda draw: paged(draw, MIXED, window=6),
    "window of whole blocks": lambda draw: paged(draw, MIXED, window=16),
    "window longer than the keys": lambda draw: paged(draw, MIXED, window=64),
    "softcap": lambda draw: paged(draw, MIXED, softcap=2.0),
    "sinks, decode": lambda draw: paged(draw, DECODE) | {"sinks": draw.normal(8)},
    "sinks": lambda draw: paged(draw, MIXED) | {"sinks": draw.normal(8)},
    "sinks, softcap, window": lambda draw: (
        paged(draw, MIXED, softcap=2.0, window=6) | {"sinks": draw.normal(8)}
    ),
    "fp8": lambda draw: paged(draw, MIXED, cache=E4M3),
    "fp8 with scales, decode": lambda draw: paged(draw, DECODE, cache=E4M3) | cache_scales(draw),
    "fp8 with scales": lambda draw: paged(draw, MIXED, cache=E4M3, window=6) | cache_scales(draw),
    "fp8 with scales, softcap": lambda draw: (
        paged(draw, MIXED, cache=E4M3, softcap=2.0) | cache_scales(draw)
    ),
    "e4m3fnuz with scales": lambda draw: paged(draw, CHUNKS, cache=E4M3FNUZ) | cache_scales(draw),
    "packed": lambda draw: paged(draw, CHUNKS) | {"q": draw.heads(26, 8, 2, 2, width=64)[0]},
    "batch of one": lambda draw: paged(draw, CHUNKS) | {"q": draw.normal(1, 26, 8, 64)},
}


def varlen(
    draw: Draw,
    lengths: list[int],
    heads: tuple[int, int] = (4, 4),
    width: int = 64,
    padding: int = 0,
) -> dict[str, Any]:
    """Packed sequences of these lengths, and rows of no sequence behind them."""
    rows = sum(lengths) + padding
    return {
        "q": draw.normal(rows, heads[0], width),
        "k": draw.normal(rows, heads[1], width),
        "v": draw.normal(rows, heads[1], width),
        "query_start": draw.ints([0, *accumulate(lengths)], torch.int32),
        "scale": width**-0.5,
    }


def varlen_of_one_projection(draw: Draw) -> dict[str, Any]:
    """q, k and v as parts of one product, as in the attention of Qwen3-VL's vision encoder."""
    q, k, v = draw.normal(22, 3, 4, 16).unbind(1)
    return varlen(draw, [6, 16], width=16) | {"q": q, "k": k, "v": v}


VARLEN_ATTENTION: Cases = {
    "three sequences": lambda draw: varlen(draw, [7, 33, 16]),
    "one sequence": lambda draw: varlen(draw, [65]),
    "several tiles": lambda draw: varlen(draw, [150, 1, 70], heads=(2, 2)),
    "single rows": lambda draw: varlen(draw, [1, 1, 1]),
    "as many sequences as rows": lambda draw: varlen(draw, [0, 3, 0]),
    "an empty sequence": lambda draw: varlen(draw, [5, 0, 9]),
    "padding rows": lambda draw: varlen(draw, [7, 20], padding=3),
    "no rows": lambda draw: varlen(draw, [0]),
    "odd width": lambda draw: varlen(draw, [7, 33], width=72),
    "widest heads": lambda draw: varlen(draw, [33, 18], heads=(2, 1), width=256),
    "grouped heads": lambda draw: varlen(draw, [33, 18], heads=(6, 2)),
    "values narrower than keys": lambda draw: varlen(draw, [7, 33]) | {"v": draw.normal(40, 4, 32)},
    "parts of one projection": varlen_of_one_projection,
}
