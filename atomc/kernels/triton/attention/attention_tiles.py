"""The tiles of attention over a paged cache, and how many programs share the keys of one: chosen by
shapes only.
"""

import functools
from typing import NamedTuple

import torch
import triton

from atomc.kernels.triton.launch.launch import dot_size
from atomc.kernels.triton.launch.tiles import PAGED_DECODE, PAGED_PREFILL
from atomc.platform import Platform

MAX_SPLITS = 128


class Tiling(NamedTuple):
    """Tiles of `rows` x `keys`, and `splits` programs for the keys of one tile.

    by_sequence  a program computes all tiles of one sequence, and does not search for its sequence
    registers    the maximum per thread, so that more programs run at once
    """

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int
    by_sequence: bool = False
    registers: int | None = None


def tiling(
    num_rows: int,
    num_sequences: int,
    group: int,
    kv_heads: int,
    width: int,
    itemsize: int,
    longest: int,
    device: torch.device,
) -> Tiling:
    """The tiling for these shapes. `longest` is the capacity of a row of the block tables, not the
    length of a sequence.
    """
    per_sequence = triton.cdiv(num_rows, max(num_sequences, 1)) * group
    least = dot_size(group)
    # More rows than sequences may be drafts for all of them, or, in a captured step, a prompt and
    # padding sequences.
    by_sequence = num_rows == num_sequences and group <= 64
    num_sms = multiprocessors(device)
    if by_sequence:
        per_four = triton.cdiv(4 * num_sequences * kv_heads, num_sms)
        tile = PAGED_DECODE.choose(device, per_four, width * itemsize)
        rows = max(least, triton.next_power_of_2(per_sequence))
    else:
        tiles = num_rows // max(128 // group, 1) + min(num_sequences, num_rows)
        per_sm = triton.cdiv(tiles * kv_heads, num_sms)
        tile = PAGED_PREFILL.choose(device, per_sequence, per_sm, width * itemsize)
        rows = max(least, tile.rows)
    keys, warps, stages, registers = tile.keys, tile.warps, tile.stages, tile.registers
    if itemsize == 4:
        rows, keys, warps, stages = max(least, min(rows, 32)), 16 if width > 128 else 32, 8, 2
    tiles = (
        num_sequences if by_sequence else num_rows // (rows // group) + min(num_sequences, num_rows)
    )
    splits = min(
        tile.programs * num_sms // max(tiles * kv_heads, 1), triton.cdiv(longest, keys), MAX_SPLITS
    )
    return Tiling(rows, keys, max(splits, 1), warps, stages, by_sequence, registers)


def has_room(device: torch.device) -> bool:
    """Whether a program can have 141,824 bytes of shared memory, which the tables of tiles require.

    Otherwise `paged_attention` uses smaller tiles and two stages; for sm89 and gfx942 these are
    compiled in tests, but were not run.
    """
    return shared_memory(device) >= 141_824


@functools.cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that a program can have."""
    if device.type == "cpu":  # Triton's interpreter runs in place of an H200
        return 227 * 2**10
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 64 * 2**10)  # absent on ROCm


def fitted_tiling(cut: Tiling, width: int, device: torch.device) -> Tiling:
    """The tiling, smaller where a program has less shared memory than the tables of tiles take."""
    if not has_room(device):
        keys = 4096 // triton.next_power_of_2(width)
        return cut._replace(keys=max(16, min(cut.keys, keys)), stages=2, registers=None)
    return cut


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter runs in place of an H200
        return Platform.named("h200").num_sms
    return torch.cuda.get_device_properties(device).multi_processor_count
