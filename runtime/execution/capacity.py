"""Sizes the caches: number of blocks and block size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atomc.loading.limits import free_on_host
from atomc.runtime.scheduling.state_rows import StateRows

CPU_SHARE = 0.25  # of the free memory; the rest is for other processes
GRAPH_SHARE = 0.03  # of a GPU's memory, for CUDA graphs
SNAPSHOT_SHARE = 0.125  # of the memory of the caches, for snapshots of per-sequence state
# With one block per sequence, memory is reserved for the maximum length. If memory is short, prefer
# fewer sequences of this length to more shorter ones.
MIN_LENGTH = 2048
# For each group of layers, the bytes per token of all its layers, and its window.
Groups = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Capacity:
    """num_blocks[i] blocks of block_size tokens in group i, and the maximum sequence length.

    snapshots   number of snapshots of per-sequence state
    """

    num_blocks: tuple[int, ...]
    block_size: int
    max_model_len: int
    snapshots: int = 0


def capacity(
    *,
    groups: Groups,
    block_size: int | None,
    available: int,
    max_num_seqs: int,
    longest: int,
    max_num_batched_tokens: int = 2048,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    bytes_per_sequence: int = 0,
    image_bytes: int = 0,
    rewinds: bool = False,
    snapshots: int | None = 0,
) -> Capacity:
    """The size of the caches: as configured, else as large as memory allows, but not more than
    max_num_seqs sequences can use.

    block_size       tokens per block of the layout; None: one block holds a whole sequence
    available        bytes to use if neither num_blocks nor kv_bytes is given
    longest          maximum sequence length of the model
    max_model_len    maximum sequence length that must fit; None: as memory allows, up to longest
    image_bytes      for embeddings of images: not available if the size is not configured
    bytes_per_sequence   per-sequence state, for each of its rows (StateRows); reserved first
    rewinds          whether each slot has a second row, for the state before a draft
    snapshots        number of snapshots of per-sequence state; None: at most max_num_seqs, in
                     SNAPSHOT_SHARE of the memory that the other rows leave

    Raises ValueError if a sequence of max_model_len tokens does not fit.
    """
    rows, sized = StateRows(max_num_seqs, rewinds), num_blocks is not None
    room = kv_bytes or max(available - image_bytes, 0)
    room, snapshots = _left_for_blocks(room, rows, bytes_per_sequence, snapshots, sized=sized)
    length = max_model_len or longest
    if not groups:
        return Capacity((), block_size or length, length, snapshots)
    bytes_per_token = sum(size for size, _ in groups)
    tokens = room // bytes_per_token  # if each group had a block for all of them
    if block_size is None:
        whole_blocks = _length_of_whole_blocks(tokens, num_blocks or max_num_seqs)
        length = max_model_len or min(length, whole_blocks)
        block_size = max(length, 1)
    if num_blocks is not None:
        counts = [num_blocks] * len(groups)
    else:
        most = _useful_blocks(groups, max_num_seqs, length, block_size, max_num_batched_tokens)
        counts = _equal_shares(room // block_size, groups, most)
    holds = _max_blocks(counts, groups) * block_size
    length = max_model_len or min(length, holds)
    if min(counts) < 1 or not 2 <= length <= holds:
        also = ", state_snapshots" * (snapshots > 0) + ", image_cache_bytes" * (image_bytes > 0)
        raise ValueError(
            f"a sequence of {length} tokens does not fit into the cache, which holds "
            f"{holds or tokens} (a token takes {bytes_per_token} bytes, a block "
            f"{bytes_per_token * block_size}): lower max_model_len, max_num_batched_tokens{also} "
            "or max_num_seqs, or raise gpu_memory_utilization, kv_bytes or num_blocks"
        )
    return Capacity(tuple(counts), block_size, length, snapshots)


def _left_for_blocks(
    room: int, rows: StateRows, bytes_per_sequence: int, snapshots: int | None, *, sized: bool
) -> tuple[int, int]:
    """Bytes left for blocks after per-sequence state, and the number of snapshots.

    rows    without snapshots
    sized   the number of blocks is configured, and the memory is unknown
    """
    if not bytes_per_sequence:
        return room, 0
    left = room - rows.total * bytes_per_sequence
    if snapshots is None:
        snapshots = default_snapshots(rows.slots, bytes_per_sequence, None if sized else left)
    left -= snapshots * bytes_per_sequence
    if left < 0 and not sized:
        twice = ", twice because of drafts," if rows.rewinds else ""
        snapshots_part = f" and {snapshots} snapshots" if snapshots else ""
        raise ValueError(
            f"the state of {rows.slots} sequences{twice}{snapshots_part} takes {room - left} bytes "
            f"({bytes_per_sequence} each), and there is room for {room}: lower "
            f"max_num_seqs{' or state_snapshots' if snapshots else ''}, or raise "
            "gpu_memory_utilization or kv_bytes"
        )
    return left, snapshots


def default_snapshots(max_num_seqs: int, bytes_per_sequence: int, room: int | None) -> int:
    """Number of snapshots unless it is configured. room: bytes that the other rows leave; None:
    unknown.
    """
    if room is None:
        return math.ceil(max_num_seqs * SNAPSHOT_SHARE)
    return min(max_num_seqs, max(int(room * SNAPSHOT_SHARE), 0) // bytes_per_sequence)


def _length_of_whole_blocks(tokens: int, num_sequences: int) -> int:
    """Maximum sequence length if a block holds a whole sequence and all blocks hold `tokens`."""
    return max(tokens // num_sequences, min(tokens, MIN_LENGTH))


def max_blocks_per_sequence(
    length: int, window: int, block_size: int, max_num_batched_tokens: int
) -> int:
    """Blocks that a sequence of this length uses at most in a group with this window."""
    blocks = -(-length // block_size)
    return (
        min(blocks, -(-(window + 2 * max_num_batched_tokens) // block_size) + 2)
        if window
        else blocks
    )


def _useful_blocks(
    groups: Groups,
    max_num_seqs: int,
    length: int,
    block_size: int,
    max_num_batched_tokens: int,
) -> list[int]:
    """For each group, the blocks that max_num_seqs sequences of this length use at most."""
    return [
        max_num_seqs * max_blocks_per_sequence(length, window, block_size, max_num_batched_tokens)
        for _, window in groups
    ]


def _max_blocks(counts: Sequence[int], groups: Groups) -> int:
    """Blocks of the longest sequence that fits: groups without a window hold all its tokens."""
    unwindowed = [count for count, (_, window) in zip(counts, groups, strict=True) if not window]
    return min(unwindowed or [max(counts)])


def _equal_shares(room: int, groups: Groups, most: Sequence[int]) -> list[int]:
    """Number of blocks of each group: equal, but at most most[i], within `room` bytes for one token
    of each block.
    """
    sizes = [size for size, _ in groups]
    counts = [0] * len(sizes)
    growing = list(range(len(sizes)))
    while growing:
        left = room - sum(size * count for size, count in zip(sizes, counts, strict=True))
        more = min(
            left // sum(sizes[i] for i in growing), min(most[i] - counts[i] for i in growing)
        )
        if more <= 0:
            break
        for i in growing:
            counts[i] += more
        growing = [i for i in growing if counts[i] < most[i]]
    return counts


def free_memory(
    device: torch.device, utilization: float, activations: int, *, processes: int
) -> int:
    """Bytes available for the caches on the device.

    On a GPU, `utilization` of its memory less memory in use, activations and CUDA graphs.
    processes: number of those that share the memory of a host.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return max(int(free - total * (1 - utilization + GRAPH_SHARE)) - activations, 0)
    return int(free_on_host() * CPU_SHARE) // processes


def check_free(needed: int) -> None:
    """Raises RuntimeError, as torch does, if the host has less memory than this."""
    if needed > (free := free_on_host()):
        raise RuntimeError(f"can't allocate memory: the caches take {needed} bytes of {free} free")
