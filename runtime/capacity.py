"""How many blocks of which size the caches get."""

from dataclasses import dataclass
from pathlib import Path

import torch

# What is left of the free memory is for activations, and on a CPU for everybody else.
GPU_SHARE = 0.85
CPU_SHARE = 0.25
# Where a block holds a whole sequence, length costs memory before it is used: in little memory, fewer sequences of
# this length rather than many short ones.
MIN_LENGTH = 2048


@dataclass(frozen=True)
class Capacity:
    """num_blocks blocks of block_size tokens, and the tokens of the longest sequence."""

    num_blocks: int
    block_size: int
    max_model_len: int


def capacity(
    *, bytes_per_token: int, block_size: int | None, available: int, max_num_seqs: int, longest: int,
    max_model_len: int | None = None, num_blocks: int | None = None, kv_bytes: int | None = None,
) -> Capacity:  # fmt: skip
    """The caches' size as the user wants it; else what fits, and no more than max_num_seqs sequences can use.

    bytes_per_token  of all layers together
    block_size       tokens a block by the layout; None: one block holds the longest sequence
    available        bytes to use if neither num_blocks nor kv_bytes says it
    longest          tokens of the longest sequence that makes sense
    max_model_len    tokens of the longest sequence that must fit; None: as long as there is room, up to longest

    Raises ValueError if the longest sequence does not fit.
    """
    length = max_model_len or longest
    room = (kv_bytes or available) // bytes_per_token  # tokens

    if block_size is None:
        if max_model_len is None:
            length = min(length, max(room // (num_blocks or max_num_seqs), min(room, MIN_LENGTH)))
        block_size = max(length, 1)
        num_blocks = num_blocks or min(room // block_size, max_num_seqs)
    else:
        num_blocks = num_blocks or min(room // block_size, -(-length // block_size) * max_num_seqs)
        room = num_blocks * block_size
        if max_model_len is None:
            length = min(length, room)
    if num_blocks < 1 or length > num_blocks * block_size or length < 2:
        raise ValueError(
            f"a sequence of {length} tokens does not fit into the cache, which holds {room} (a token takes "
            f"{bytes_per_token} bytes): lower max_model_len, or raise kv_bytes or num_blocks"
        )
    return Capacity(num_blocks, block_size, length)


def free_memory(device: torch.device) -> int:
    """Bytes that the caches may take on the device if nobody says otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(_available_on_host() * CPU_SHARE)


def _available_on_host() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 * 2**30  # not Linux: a guess that kv_bytes corrects
