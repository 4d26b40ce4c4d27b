"""Rejects implausible sizes in config.json and in headers of weights before they cost memory.

The largest models have about 130 layers and 1,000 experts; the limits are higher, and prevent
builds that take hours. The content of a checkpoint gives tighter limits.
"""

import math
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from atomc import cgroup
from atomc.files.json_types import JSONMapping
from atomc.models.config import NUM_EXPERTS

MAX_LAYERS = 512
MAX_EXPERTS = 4096
MAX_COUNT = 2**20
MAX_SIZE = 2**31 - 1
LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(encoder|decoder)_layers")
EXPERTS = re.compile(r"\w*experts")
COUNTS = re.compile(r"num_\w+")
SIZES = re.compile(r"(n|max|d)_\w+|\w+_(size|dim|heads|rank|positions|embeddings|head)")
# At most this many parameters per stored number: transformers converts some weights; an int32 packs
# 16 of two bits.
MAX_RATIO, MAX_RATIO_QUANTIZED = 2, 16
# Tensors of a checkpoint: each costs 20 us to check. Kimi K2 in 4 bits has 211,000.
MAX_TENSORS = 2**18
MAX_HEADER = 10**8  # bytes of a header, by the format
# Bytes of a model's masks and tables, which no checkpoint stores: those of CodeGen take 2**27.
MAX_BUFFERS = 2**30


class Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str  # as safetensors writes it: "BF16"
    shape: tuple[int, ...]
    name: str


def check_sizes(config: JSONMapping, where: str = "") -> None:
    """Raise ValueError for a size in config.json, or in a nested config, beyond the limits."""
    _check_chosen(config, where)
    for name, value in config.items():
        if isinstance(value, Mapping):
            if name.endswith("_config"):
                check_sizes(value, f"{where}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            most = _limit_of(name)
            if most is not None and not value <= most:
                raise ValueError(
                    f"config.json: {where}{name} is {_short(value)}, expected at most {most}; "
                    "download it again"
                )


def _check_chosen(config: JSONMapping, where: str) -> None:
    """Raise ValueError if num_experts_per_tok is 0 or more than the number of experts."""
    experts = next((config[name] for name in NUM_EXPERTS if config.get(name) is not None), None)
    per_token = config.get("num_experts_per_tok")
    if (
        isinstance(experts, int)
        and isinstance(per_token, int)
        and experts > 0
        and not 1 <= per_token <= experts
    ):
        raise ValueError(
            f"config.json: {where}num_experts_per_tok is {_short(per_token)}, expected 1 to "
            f"{experts}, the "
            "number of experts"
        )


def _limit_of(name: str) -> int | None:
    """The limit of a field of this name; None if it is not a size."""
    for pattern, most in (
        (LAYERS, MAX_LAYERS),
        (EXPERTS, MAX_EXPERTS),
        (COUNTS, MAX_COUNT),
        (SIZES, MAX_SIZE),
    ):
        if pattern.fullmatch(name):
            return most
    return None


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:8]}... ({len(text)} digits)"


def check_layers(config: JSONMapping, stored: int) -> None:
    """Raise ValueError if config.json has more layers than the checkpoint has tensors."""
    for name, value in config.items():
        if LAYERS.fullmatch(name) and isinstance(value, int) and value > stored:
            raise ValueError(
                f"config.json: {name} is {value}, and the checkpoint has {stored} tensors; are "
                "config.json "
                "and the weights of the same checkpoint?"
            )


def check_headers(files: Iterable[Path], most: int = MAX_TENSORS) -> None:
    """Raise ValueError if safetensors files have more tensors than this; does not parse them."""
    total = 0
    for file in files:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
            # Each tensor is an object, in an object.
            total += max(opened.read(min(size, MAX_HEADER)).count(b"{") - 1, 0)
        if total > most:
            raise ValueError(
                f"{file.name}: the header has {total} tensors or more, expected at most {most} in "
                "all files; download it again"
            )


def check_buffers(model: nn.Module, name: str) -> None:
    """Raise ValueError if a model on meta has masks and tables larger than those of any model."""
    sizes = {key: buffer.nbytes for key, buffer in model.named_buffers()}
    if sum(sizes.values()) > MAX_BUFFERS:
        largest = max(sizes, key=lambda key: sizes[key])
        raise ValueError(
            f"config.json describes a {name} with {sum(sizes.values()) / 2**30:.1f} GiB of masks "
            f"and tables such as {largest}, expected at most {MAX_BUFFERS / 2**30:.0f} GiB; "
            "download it again"
        )


def check_stored(
    model: nn.Module, name: str, stored: Mapping[str, Stored], *, quantized: bool
) -> None:
    """Raise ValueError if a model on meta has far more parameters than the checkpoint stores."""
    wanted = sum(weight.numel() for weight in model.parameters())
    num_stored = sum(math.prod(tensor.shape) for tensor in stored.values())
    if wanted > num_stored * (MAX_RATIO_QUANTIZED if quantized else MAX_RATIO):
        raise ValueError(
            f"config.json describes a {name} of {wanted} parameters, and the checkpoint has "
            f"{num_stored} numbers; "
            "are config.json and the weights of the same checkpoint?"
        )


def check_memory(wanted: int, name: str, device: torch.device | str) -> None:
    """Raise ValueError if the weights of a model need more memory than is free on the device.

    wanted  bytes of the weights, and of what loading them needs at a time
    """
    free = free_bytes(torch.device(device))
    if wanted > free:
        raise ValueError(
            f"config.json describes a {name} whose weights take {wanted / 2**30:.1f} GiB, and "
            f"{device} has "
            f"{free / 2**30:.1f} GiB free: use a smaller model, or fewer bits per weight (dtype "
            "bfloat16, or quantization)"
        )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_on_host()


def free_on_host() -> int:
    """Bytes of host memory that this process can still allocate."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    available = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")),
        4 * 2**30,
    )  # not Linux: a guess; option kv_bytes sets the size of the cache
    allowed = cgroup.memory_left()
    return available if allowed is None else min(available, allowed)
