"""Executes the plan of a load: reads stored weights into a model on meta, and quantizes them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.loading.cache_scales import set_cache_scale
from atomc.loading.limits import Stored
from atomc.loading.load_plan import Copy, Fill, LoadPlan, PlanEntry, Quantize
from atomc.parallel.shard_slice import ShardSlice
from atomc.quantization import apply
from atomc.quantization.apply import Methods
from atomc.quantization.linear import LinearMethod
from atomc.weights.parameters import allocate_buffers, assign, empty, tensor_of

# An open file of weights: safetensors' class has no type.
Opener = Callable[[Path], Any]

THREADS = 8
TENSORS_PER_JOB = 32


def execute(
    plan: LoadPlan,
    model: nn.Module,
    methods: Methods,
    device: torch.device | str,
    mmap: bool,
    progress: bool,
) -> None:
    """Read and quantize weights as planned, into a model on meta. Raises ValueError for stored
    values that are invalid for a layer or cache.
    """
    allocate_buffers(model, device)
    # To open a file is to parse its header.
    opener: Opener = lru_cache(maxsize=2)(partial(safetensors.safe_open, framework="pt"))
    total = sum(weight.nbytes for weight in model.parameters())
    # disable=None: no bar without a terminal.
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", disable=None if progress else True
    ) as bar:
        for num_bytes in _fill((*plan.fills, *plan.copies), model, device, mmap):
            bar.update(num_bytes)
        for group in plan.quantized:
            bar.update(_quantize(group, model, methods.linears, device, opener))
        for layer, entries in plan.experts:
            for num_bytes in _fill(entries, model, device, mmap):
                bar.update(num_bytes)
            apply.quantize_experts(model, layer, methods.experts[layer])
    try:
        for name, stored, target in plan.scales:
            set_cache_scale(target, name, read_tensor(opener, stored, torch.float32, device))
        apply.process_weights_after_loading(model)
    except ValueError as error:
        raise ValueError(f"{plan.path}: {error}") from error


def _fill(
    entries: Sequence[PlanEntry], model: nn.Module, device: torch.device | str, mmap: bool
) -> Iterator[int]:
    """Read weights into parameters of the model; yields the bytes of each."""
    for names in dict.fromkeys(entry.names for entry in entries if isinstance(entry, Copy)):
        assign(model, names, empty(tensor_of(model, names[0]), device))
    for entry, weight in read(entries, model, device, mmap):
        if isinstance(entry, Fill):
            assign(model, entry.names, weight)
        yield weight.nbytes


def _quantize(
    group: Sequence[Quantize],
    model: nn.Module,
    methods: Mapping[str, LinearMethod],
    device: torch.device | str,
    opener: Opener,
) -> int:
    """Read and quantize the layers of one input; returns the bytes read. The unquantized weights
    are freed on return.
    """
    weights = {
        layer: read_tensor(opener, stored, dtype, device, cut)
        for layer, stored, dtype, cut in group
    }
    apply.quantize_layers(model, list(weights), methods, weights.get)
    return sum(weight.nbytes for weight in weights.values())


def read_tensor(
    opener: Opener,
    stored: Stored,
    dtype: torch.dtype,
    device: torch.device | str,
    cut: ShardSlice | None = None,
) -> Tensor:
    weight: Tensor = opener(stored.file).get_tensor(stored.name)
    return (weight if cut is None else cut.of(weight)).to(device, dtype)


def read(
    entries: Iterable[PlanEntry], model: nn.Module, device: torch.device | str, mmap: bool
) -> Iterator[tuple[PlanEntry, Tensor]]:
    """The weights of fills, in the planned shape and dtype, and those of copies, which are in the
    model's parameters by then. Read by several threads, in the order of completion.
    """
    by_file: dict[Path, list[PlanEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.stored.file, []).append(entry)

    def placed(entry: PlanEntry, weight: Tensor) -> tuple[PlanEntry, Tensor]:
        if entry.cut is not None:  # of a mapped file, only the part is read
            weight = entry.cut.of(weight)
        if weight.dtype == torch.float8_e8m0fnu:
            weight = weight.view(torch.uint8)
        if isinstance(entry, Copy):
            return entry, copy_into(tensor_of(model, entry.names[0]), entry, weight)
        return entry, weight.to(device, entry.dtype).reshape(entry.shape)

    def read_some(file: Path, group: list[PlanEntry]) -> list[tuple[PlanEntry, Tensor]]:
        if not mmap:
            tensors = safetensors.torch.load(file.read_bytes())
            return [placed(entry, tensors[entry.stored.name]) for entry in group]
        with safetensors.safe_open(file, framework="pt") as opened:
            return [placed(entry, opened.get_tensor(entry.stored.name)) for entry in group]

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = []
        for file, group in by_file.items():
            # Several threads share a mapped file, which is cheap to open; another file is read
            # once.
            step = TENSORS_PER_JOB if mmap else len(group)
            jobs += [
                pool.submit(read_some, file, group[i : i + step])
                for i in range(0, len(group), step)
            ]
        try:
            for job in as_completed(jobs):
                yield from job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def copy_into(parameter: Tensor, copy: Copy, weight: Tensor) -> Tensor:
    """Copy the weight into its part of the parameter, and return the part."""
    if copy.part is None:
        # One expert at a time: a transposed copy needs memory of its size.
        for target, source in zip(parameter, weight, strict=True):
            target.copy_(source.mT)
        return parameter
    expert, first, end = copy.part
    part = parameter[expert, first:end]
    return part.copy_(weight.reshape(part.shape))
