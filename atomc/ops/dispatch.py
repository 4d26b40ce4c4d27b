"""Experts of a mixture on several processes that each have tokens of their own: all tokens go to
all processes, and the results of their experts come back.

T tokens of a process, the same number on each; N processes; k experts of a token, E experts, H
width of the model. process_group: as in atomc.ops.collective.
"""

import torch
from torch import Tensor

from atomc.ops.op import op
from atomc.ops.op_cost import (
    Formula,
    OpCall,
    Operand,
    bytes_of,
    sent_to_gather,
)
from atomc.ops.op_traits import Kind

functional = torch.ops._c10d_functional


def _dispatch_shape(
    x: Tensor, ids: Tensor, weights: Tensor, places: Tensor, ranks: int, x_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = ranks * x.shape[0]
    return (
        x.new_empty(rows, x.shape[1]),
        x.new_empty(rows, ids.shape[1], dtype=places.dtype),
        weights.new_empty(rows, weights.shape[1]),
        no_scales(x) if x_scale is None else x_scale.new_empty(rows, x_scale.shape[1]),
    )


def no_scales(x: Tensor) -> Tensor:
    """The scales of rows that have none."""
    return x.new_empty(0, dtype=torch.float32)


def _sent_by_dispatch(call: OpCall, processes: Formula) -> Formula:
    operands = (call.arguments[name] for name in ("x", "ids", "weights", "x_scale"))
    sent = bytes_of(operand for operand in operands if isinstance(operand, Operand))
    return sent_to_gather(sent, processes)


@op(kind=Kind.COLLECTIVE, rows=None, shape=_dispatch_shape, sent=_sent_by_dispatch)
def dispatch_tokens(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    nowhere: int,
    ranks: int,
    process_group: str,
    x_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens of all processes, by process, for the experts of this one: x [T, H], ids and
    weights [T, k], x_scale [T, S] -> [N * T, H], [N * T, k] twice and [N * T, S], or [0] without
    scales. Ids become rows of the weights of this process; choices of an expert of another one have
    the weight 0. A kernel that sends tokens only to the processes of their experts may give them in
    any order, and for the others rows with any x and no expert here: its combine_tokens knows which
    rows are whose.

    x        values, or codes of one byte with scales by row or by token of the whole x
    x_scale  those of rows, fp32
    places   [2, E] int64: id of an expert -> its row in the weights of this process, `nowhere` if
             another one has it; and its number if the weights of all processes followed each other,
             E // N rows of each: if none has it, that of a row of this process beyond its weights
    ranks    N
    """
    # One after the other: gloo of torch 2.13 corrupts memory where two gathers are under way.
    tokens = _gathered(x, ranks, process_group)
    expert_ids = _gathered(ids, ranks, process_group)
    expert_weights = _gathered(weights, ranks, process_group)
    scales = no_scales(x) if x_scale is None else _gathered(x_scale, ranks, process_group)
    # While kernels are loaded, no router runs, and ids are what was in memory.
    local = places[0][expert_ids.long().clamp(0, places.shape[1] - 1)]
    return tokens, local, expert_weights.masked_fill(local == nowhere, 0.0), scales


def _gathered(x: Tensor, ranks: int, process_group: str) -> Tensor:
    rows, has_codes = x.contiguous(), x.dtype.itemsize == 1
    if has_codes:  # not every backend of torch.distributed knows fp8
        rows = rows.view(torch.uint8)
    gathered: Tensor = functional.wait_tensor(
        functional.all_gather_into_tensor(rows, ranks, process_group)
    )
    return gathered.view(x.dtype) if has_codes else gathered


@op(
    kind=Kind.COLLECTIVE,
    rows=None,
    shape=lambda partial, ranks: partial.new_empty(partial.shape[0] // ranks, partial.shape[1]),
    sent=lambda call, processes: (processes - 1) * call["partial"].bytes / processes,
    half_of="ids",
)
def combine_tokens(partial: Tensor, ids: Tensor, ranks: int, process_group: str) -> Tensor:
    """The sum over processes of their results for the tokens of this one. [N * T, H], as
    dispatch_tokens gives the tokens -> [T, H] in the same dtype.

    ids    that dispatch_tokens gave with them
    ranks  N
    """
    summed = functional.reduce_scatter_tensor(partial.contiguous(), "sum", ranks, process_group)
    waited: Tensor = functional.wait_tensor(summed)
    return waited
