"""Tokens of processes that share experts: each travels once to each process that has one of its
experts, and the sums of its results travel back. Nothing waits for the host.
"""

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.checks import first_refusal, named, too_wide, unlike
from atomc.kernels.mori.exchange import MAX_RANKS, exchange_of, not_connected
from atomc.ops.dispatch import no_scales
from atomc.ops.formats import FP8
from atomc.ops.op import Refusal
from atomc.platform import Platform

ARCHS = ("gfx942", "gfx950")
PIECE = 16  # bytes that a lane copies at once
MOST_CHOICES = 64  # a lane has one


def _unfit(platform: Platform, ranks: int, process_group: str) -> Refusal | None:
    if platform.arch not in ARCHS:
        return Refusal("hardware", f"MORI's kernels are used on {' and '.join(ARCHS)}")
    if ranks > MAX_RANKS:
        return Refusal(
            "argument", f"{ranks} processes: MORI's kernels are used for up to {MAX_RANKS}"
        )
    if platform.here and (process_group, "") not in platform.peer_groups:
        return Refusal("library", not_connected(process_group, platform.peer_groups))
    return None


def _split_pieces(x: Tensor) -> Refusal | None:
    width = x.shape[1] * x.dtype.itemsize
    return (
        Refusal("shape", f"rows of {width} bytes are not a multiple of {PIECE}")
        if width % PIECE
        else None
    )


def _many_choices(ids: Tensor) -> Refusal | None:
    return too_wide(ids.shape[1], MOST_CHOICES, "choices")


@ops.dispatch_tokens.kernel(
    "mori",
    refuses=first_refusal(
        _unfit,
        named("x", unlike, (torch.bfloat16, *FP8)),
        named("x_scale", unlike, (torch.float32,)),
        _split_pieces,
        _many_choices,
    ),
)
def dispatch_tokens(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    nowhere: int,
    ranks: int,
    process_group: str,
    x_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    exchange, experts = exchange_of(process_group), places.shape[1]
    slots_of_rank, rows = experts // ranks, ranks * len(x)
    slots = places[1][ids.long().clamp(0, experts - 1)]
    received = exchange.dispatch(x, x_scale, weights, slots, slots_of_rank)
    local = received.slots[:rows].to(places.dtype) - exchange.rank * slots_of_rank
    is_row = torch.arange(rows, device=x.device).unsqueeze(1) < received.used
    is_local = is_row & (local >= 0) & (local < slots_of_rank)
    return (
        received.x[:rows],
        local.masked_fill(~is_local, nowhere),
        received.weights[:rows].to(weights.dtype).masked_fill(~is_local, 0.0),
        no_scales(x) if received.scales is None else received.scales[:rows],
    )


@ops.combine_tokens.kernel(
    "mori", refuses=first_refusal(_unfit, named("partial", unlike, (torch.bfloat16,)))
)
def combine_tokens(partial: Tensor, process_group: str) -> Tensor:
    return exchange_of(process_group).combine(partial)
