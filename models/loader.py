"""From a checkpoint directory to a model: build on meta, check every name and shape, then read.

Everything is checked against the headers before the first weight is read; what fails raises, and no
model is returned.
"""

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.json_file import Json, read_json
from atomc.models import REGISTRY, architectures_of, build, model_class, stock
from atomc.models.cache_scales import mark_fp8_state, set_cache_scale
from atomc.models.limits import Stored, check_layers, check_memory, check_sizes, check_stored
from atomc.models.load_plan import (
    FLOATS,
    Fill,
    LoadPlan,
    Quantize,
    parameter_names,
    plan_load,
    some,
)
from atomc.models.shard_paths import INDEX, shard_path
from atomc.quantization import apply, checkpoints
from atomc.quantization.config import QuantizationConfig, Request, decide, stored_config
from atomc.quantization.linear import LinearMethod
from atomc.weights.registry import parameter_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("atomc")

THREADS = 8
TENSORS_A_JOB = 32
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    quantization: Request = None,
    mmap: bool = True,
    progress: bool = True,
) -> nn.Module:
    """The model in directory `path`, ready for inference: eval mode, no gradients.

    dtype        None: what config.json says, else what is stored
    load_format  "auto" and "safetensors" read the weights; "dummy": small random ones, the same
                 each time
    quantization how to quantize the weights when they are read: a name in
    atomc.quantization.ONLINE, or {"scheme": name,
                 "ignore": [patterns of layers to keep]}. None: as the checkpoint is. See
                 docs/quantization.md
    mmap         weights are views of the mapped files where dtype and device allow; False: files
                 are read into memory, faster from a network disk

    Raises FileNotFoundError or ValueError if something is missing, damaged, or does not fit.
    """
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {LOAD_FORMATS}")
    config = load_config(path)
    architectures = architectures_of(config)
    stored = None if load_format == "dummy" else stored_tensors(path)
    if stored is not None:
        check_layers(config, len(stored))
    dtype = dtype or config_dtype(config) or stored_dtype(stored or {})

    if model_class(architectures) is not None:
        how = decide(quantization, path, config)
        model = build(config, dtype, "meta")
    else:
        cls = stock.hf_class(architectures, sorted(REGISTRY))
        how = _for_stock(quantization, path, config)
        _check_outline(cls, path, config, dtype, stored, device)
        if how is None:
            return ready(_by_transformers(cls, path, config, dtype, device, stored is None))
        model = stock.build_on_meta(cls, config, dtype)
    methods = _quantized_layers(model, how, path)
    if stored is None:
        check_memory(model, type(model).__name__, device)
        allocate_buffers(model, device)
        fill_randomly(model, device)
        for group in apply.groups(methods):
            apply.quantize_layers(model, [name for name, _ in group], methods)
        return ready(model)

    if how is not None and not how.online:
        apply.create_weights(model, methods, dtype)
    plan = _planned(model, stored, how, methods, path, dtype)
    _execute(plan, model, methods, device, mmap, progress)
    return ready(model)


def _check_outline(
    cls: "type[PreTrainedModel]",
    path: Path,
    config: Mapping[str, Json],
    dtype: torch.dtype,
    stored: dict[str, Stored] | None,
    device: torch.device | str,
) -> None:
    """Raise ValueError if a class of transformers is larger than its checkpoint, or than the memory
    for random weights.
    """
    outline = stock.empty_model(cls, config, dtype)
    if stored is None:
        check_memory(outline, cls.__name__, device)
    else:
        check_stored(
            outline, cls.__name__, stored, quantized=stored_config(path, config) is not None
        )


def _by_transformers(
    cls: "type[PreTrainedModel]",
    path: Path,
    config: Mapping[str, Json],
    dtype: torch.dtype,
    device: torch.device | str,
    dummy: bool,
) -> nn.Module:
    """The class of transformers with the checkpoint's weights, or with random ones."""
    if not dummy:
        return stock.load(cls, path, dtype, device)
    model = stock.build(cls, config, dtype, device)
    fill_randomly(model, device)
    return model


def _prefix(model: nn.Module) -> str:
    """Of every parameter's name, before the name that a checkpoint has."""
    return stock.PREFIX if isinstance(model, stock.StockModel) else ""


def _quantized_layers(
    model: nn.Module, how: QuantizationConfig | None, path: Path
) -> dict[str, LinearMethod]:
    """The linear layers that are quantized, by name; the state handles are marked if the cache is,
    too.
    """
    if how is None:
        return {}
    for note in how.notes:
        log.warning("%s: %s", path, note)
    if how.kv_cache_dtype == "fp8":
        mark_fp8_state(model)
    return apply.linears(model, how, _prefix(model))


def _planned(
    model: nn.Module,
    stored: dict[str, Stored],
    how: QuantizationConfig | None,
    methods: Mapping[str, LinearMethod],
    path: Path,
    dtype: torch.dtype,
) -> LoadPlan:
    """The plan for these tensors of a checkpoint. What is no part of the model is named in the
    log.
    """
    stored = _our_names(model, stored, how)
    online = methods if how is not None and how.online else {}
    if not online:
        apply.drop_optional(model, stored)
    plan = plan_load(model, stored, path, dtype, online)
    if plan.skipped:
        log.info(
            "%s: skipped %s, which are no part of %s",
            path,
            some(plan.skipped),
            type(model).__name__,
        )
    return plan


def _our_names(
    model: nn.Module, stored: dict[str, Stored], how: QuantizationConfig | None
) -> dict[str, Stored]:
    """The tensors under the names that our layers have."""
    rename, prefix = how.rename if how else {}, _prefix(model)

    def own(name: str) -> str:
        owner, dot, leaf = name.rpartition(".")
        return prefix + owner + dot + rename.get(leaf, leaf)

    return {own(name): tensor for name, tensor in stored.items()}


def _execute(
    plan: LoadPlan,
    model: nn.Module,
    methods: Mapping[str, LinearMethod],
    device: torch.device | str,
    mmap: bool,
    progress: bool,
) -> None:
    """Give a model on meta what is planned. Raises ValueError for stored values that a layer or a
    cache cannot have.
    """
    allocate_buffers(model, device)
    total = sum(weight.nbytes for weight in model.parameters())
    # disable=None: no bar where there is no terminal.
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", disable=None if progress else True
    ) as bar:
        for fill, weight in read(plan.fills, device, mmap):
            assign(model, fill.names, weight)
            bar.update(weight.nbytes)
        for group in plan.quantized:
            bar.update(_quantize(group, model, methods, device))
    try:
        for name, stored, target in plan.scales:
            set_cache_scale(target, name, one(stored, torch.float32, device))
        apply.process_weights_after_loading(model)
    except ValueError as error:
        raise ValueError(f"{plan.path}: {error}") from error


def _quantize(
    group: Sequence[Quantize],
    model: nn.Module,
    methods: Mapping[str, LinearMethod],
    device: torch.device | str,
) -> int:
    """Read and quantize the layers of one input. Nothing keeps their weights, of so many bytes,
    when this returns.
    """
    weights = {layer: one(stored, dtype, device) for layer, stored, dtype in group}
    apply.quantize_layers(model, list(weights), methods, weights.get)
    return sum(weight.nbytes for weight in weights.values())


def _for_stock(
    wanted: Request, path: Path, config: Mapping[str, Json]
) -> QuantizationConfig | None:
    """As decide(); None, with a line in the log, for what transformers has to load itself."""
    stored = stored_config(path, config)
    method = stored.get("quant_method") if stored else None
    if stored and wanted is None and (method not in checkpoints.PARSERS or method == "mxfp4"):
        log.warning(
            "%s: weights of quant_method %r are loaded by transformers and run as its layers do",
            path,
            method,
        )
        return None
    return decide(wanted, path, config)


def ready(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def load_config(path: str | Path) -> Mapping[str, Json]:
    """config.json of a checkpoint directory."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is not a directory; expected one with config.json and *.safetensors"
        )
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; is it a complete checkpoint?")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str | None):
        raise ValueError(
            f"config.json: model_type is {config['model_type']!r:.40}, expected a text"
        )
    check_sizes(config)
    return config


def config_dtype(config: Mapping[str, Json]) -> torch.dtype | None:
    """The dtype config.json names (transformers 5: `dtype`, older: `torch_dtype`), None if it names
    none.
    """
    name = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    if name is None:
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"config.json: dtype {name!r:.40} is not a dtype of torch, such as 'bfloat16'"
        )
    if not dtype.is_floating_point:
        raise ValueError(
            f"config.json: dtype {name!r} is not a floating-point dtype, such as 'bfloat16'"
        )
    return dtype


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by name, from the headers alone. An index says which file a
    name is read from.
    """
    index = path / INDEX
    single = path / "model.safetensors"
    if single.is_file():
        return header(single)
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"{path} has neither {single.name} nor {index.name}; it has {found}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map (name of tensor -> file); download it again")
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        shard = shard_path(path, file_name)
        if not shard.is_file():
            raise FileNotFoundError(
                f"{path} lacks {file_name}, which {index.name} names; download it again"
            )
        headers[file_name] = header(shard)
    absent = sorted(
        name for name, file_name in weight_map.items() if name not in headers[file_name]
    )
    if absent:
        raise ValueError(
            f"{index}: {some(absent)} not in the file it names ({weight_map[absent[0]]})"
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def header(file: Path) -> dict[str, Stored]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: Stored(file, part.get_dtype(), tuple(part.get_shape()), name)
                for name, part in slices.items()
            }
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}); download it again") from error


def stored_dtype(stored: dict[str, Stored]) -> torch.dtype:
    """The dtype of the first floating-point tensor; fp32 if there is none."""
    return next(
        (FLOATS[tensor.dtype] for tensor in stored.values() if tensor.dtype in FLOATS),
        torch.float32,
    )


def one(stored: Stored, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    with safetensors.safe_open(stored.file, framework="pt") as opened:
        weight: Tensor = opened.get_tensor(stored.name)
        return weight.to(device, dtype)


def read(
    fills: Iterable[Fill], device: torch.device | str, mmap: bool
) -> Iterator[tuple[Fill, Tensor]]:
    """The weights, in the order in which they arrive, read by several threads; in shape and dtype
    as planned.
    """
    by_file: dict[Path, list[Fill]] = {}
    for fill in fills:
        by_file.setdefault(fill.stored.file, []).append(fill)

    def fitted(fill: Fill, weight: Tensor) -> tuple[Fill, Tensor]:
        if weight.dtype == torch.float8_e8m0fnu:
            weight = weight.view(torch.uint8)
        return fill, weight.to(device, fill.dtype).reshape(fill.shape)

    def part(file: Path, group: list[Fill]) -> list[tuple[Fill, Tensor]]:
        if not mmap:
            tensors = safetensors.torch.load(file.read_bytes())
            return [fitted(fill, tensors[fill.stored.name]) for fill in group]
        with safetensors.safe_open(file, framework="pt") as opened:
            return [fitted(fill, opened.get_tensor(fill.stored.name)) for fill in group]

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = []
        for file, group in by_file.items():
            # A mapped file is cheap to open again, so that several threads share it; one that is
            # read is read once.
            step = TENSORS_A_JOB if mmap else len(group)
            jobs += [
                pool.submit(part, file, group[i : i + step]) for i in range(0, len(group), step)
            ]
        try:
            for job in as_completed(jobs):
                yield from job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def assign(model: nn.Module, names: tuple[str, ...], weight: Tensor) -> None:
    """Make weight the parameter of all these names."""
    parameter = parameter_of(weight)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameter)


def allocate_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Buffers of a model built on meta: they are empty, or their module fills them when it is moved
    (Rotary).
    """
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module._apply(lambda tensor: empty(tensor, device), recurse=False)  # type: ignore[no-untyped-call]
        elif not module._parameters:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def empty(like: Tensor, device: torch.device | str) -> Tensor:
    """Memory for such a tensor. (torch.empty_like of one on meta imports what torch's compiler
    knows of sizes.)
    """
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def fill_randomly(model: nn.Module, device: torch.device | str) -> None:
    """Small weights, norms near 1. A parameter's values depend only on its name, shape, dtype and
    kind of device.
    """
    for names in parameter_names(model):
        like = model.get_parameter(names[0])
        generator = torch.Generator(device).manual_seed(zlib.crc32(names[0].encode()))
        mean = 1.0 if "norm" in names[0] and names[0].endswith("weight") else 0.0
        assign(model, names, empty(like, device).normal_(mean, 0.02, generator=generator))
