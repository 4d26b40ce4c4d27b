"""The memory of a plan: weights, caches, and the sequences that fit."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from torch.nn import ModuleList

from atomc.ops.state import StateSpec, block_size_of, groups_of
from atomc.planning.device_model import Model
from atomc.planning.plan_report import Memory
from atomc.platform import Platform
from atomc.program import Program
from atomc.runtime.execution.capacity import (
    CPU_SHARE,
    GRAPH_SHARE,
    capacity,
    default_snapshots,
    max_blocks_per_sequence,
)
from atomc.runtime.execution.draft import DraftProgram
from atomc.runtime.scheduling.state_rows import StateRows

MAX_NUM_BATCHED_TOKENS = 2048
UTILIZATION = 0.9
MANY_SEQUENCES = 10**6  # more than any memory can hold


def memory_of(
    model: Model,
    program: Program,
    draft: DraftProgram | None,
    platform: Platform,
    longest: int | None,
) -> Memory:
    """What the model holds, and how many sequences of `longest` tokens (None: the length that the
    model is made for) fit beside it.
    """
    held = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    weights = sum(tensor.nbytes for tensor in held.values())
    layers = ModuleList(draft.layer for draft in model.draft_layers)
    of_draft = sum(x.nbytes for x in layers.parameters())
    programs = [program, *(draft.text_programs if draft else [])]
    copies = sum(compiled.prepared_bytes - compiled.replaced_bytes for compiled in programs)
    specs = [*program.specs, *(draft.specs if draft else ())]
    made_for = model.config.get("max_position_embeddings")
    length = longest or (made_for if isinstance(made_for, int) else 4096)
    per_token = sum(spec.bytes_per_token() for spec in specs)
    per_sequence = sum(spec.bytes_per_sequence() for spec in specs)
    memory = Memory(
        platform.memory, weights, copies, 0, per_token, length, None, None, per_sequence, of_draft
    )
    if not platform.memory or not specs:
        return memory
    cache = _left_for_caches(platform, weights + copies)
    fits, that_fits, snapshots = _sequences(specs, cache, length, rewinds=draft is not None)
    return replace(memory, cache=cache, fits=fits, longest_that_fits=that_fits, snapshots=snapshots)


def _left_for_caches(platform: Platform, weights: int) -> int:
    """Bytes for the caches; on a CPU, a share of the memory, whatever the weights take."""
    if platform.is_cpu:
        return int(platform.memory * CPU_SHARE)
    return max(int(platform.memory * (UTILIZATION - GRAPH_SHARE)) - weights, 0)


def _sequences(
    specs: Sequence[StateSpec], room: int, length: int, *, rewinds: bool
) -> tuple[int, int, int]:
    """(number of sequences of this length that fit, length of the longest sequence that fits,
    number of snapshots beside them). rewinds: as in StateRows.
    """
    per_sequence = sum(spec.bytes_per_sequence() for spec in specs)
    if not per_sequence:
        return *_block_capacity(specs, room, length), 0

    # Each sequence also takes its state per sequence, and snapshots take a share of the rest.
    def snapshots(sequences: int) -> int:
        rows = StateRows(sequences, rewinds).total
        return default_snapshots(sequences, per_sequence, room - rows * per_sequence)

    def left(sequences: int) -> int:
        return room - StateRows(sequences, rewinds, snapshots(sequences)).total * per_sequence

    fits = bisect_left(
        range(1, max(room // per_sequence, 0) + 1),
        True,
        key=lambda n: left(n) < 0 or _block_capacity(specs, left(n), length)[0] < n,
    )
    if fits:
        return fits, length, snapshots(fits)
    return 0, _block_capacity(specs, left(1), length)[1] if left(1) >= 0 else 0, 0


def _block_capacity(specs: Sequence[StateSpec], room: int, length: int) -> tuple[int, int]:
    """As `_sequences`, for the state that is kept per token."""
    groups, block_size = groups_of(specs), block_size_of(specs) or length
    if not groups:
        return MANY_SEQUENCES, length
    sizes = {
        "groups": groups,
        "block_size": block_size,
        "available": room,
        "longest": length,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    try:
        blocks = capacity(**sizes, max_num_seqs=MANY_SEQUENCES, max_model_len=length)  # type: ignore[arg-type]
    except ValueError:
        try:
            return 0, capacity(**sizes, max_num_seqs=MANY_SEQUENCES).max_model_len  # type: ignore[arg-type]
        except ValueError:
            return 0, 0
    per_sequence = [
        max_blocks_per_sequence(length, window, block_size, MAX_NUM_BATCHED_TOKENS)
        for _, window in groups
    ]
    return min(
        count // of_one for count, of_one in zip(blocks.num_blocks, per_sequence, strict=True)
    ), length
