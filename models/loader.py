"""Loads a checkpoint: builds the model on meta, checks all names and shapes, then reads the
weights.

All checks use the headers of the files and run before the first weight is read.
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

from atomc.json_file import read_json
from atomc.json_types import JSONLike
from atomc.models import REGISTRY, architectures_of, build, model_class, stock
from atomc.models.cache_scales import mark_fp8_state, set_cache_scale
from atomc.models.draft_checkpoint import (
    check_draft_layers,
    check_stored_draft,
    draft_prefix,
    methods_as_stored,
)
from atomc.models.limits import Stored, check_layers, check_memory, check_sizes, check_stored
from atomc.models.load_plan import (
    FLOATS,
    Copy,
    Fill,
    LoadPlan,
    Quantize,
    first_names,
    parameter_names,
    plan_load,
    tensor_of,
)
from atomc.models.shard_paths import INDEX, shard_path
from atomc.quantization import apply, checkpoints
from atomc.quantization.apply import Methods
from atomc.quantization.config import QuantizationConfig, Request, decide, stored_config
from atomc.quantization.linear import LinearMethod
from atomc.quantization.stored_size import stored_bytes, unquantized_bytes
from atomc.weights.registry import parameter_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("atomc")

THREADS = 8
TENSORS_PER_JOB = 32
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    load_format: str = "auto",
    quantization: Request = None,
    draft_layer: bool = False,
    mmap: bool = True,
    progress: bool = True,
) -> nn.Module:
    """The model in directory `path`, ready for inference: eval mode, no gradients.

    dtype         None: that of config.json, else that of the stored weights
    load_format   "auto" and "safetensors" read the weights; "dummy": small random weights, equal in
                  each load
    quantization  quantizes the weights during loading: a name in atomc.quantization.ONLINE, or
                  {"scheme": name, "ignore": [patterns of layers to skip]}. None: as stored. See
                  docs/quantization.md
    draft_layer   load the first draft layer too (atomc.models.mtp)
    mmap          weights are views of the mapped files if dtype and device allow it; False: files
                  are read into memory, which is faster from a network disk

    Raises FileNotFoundError or ValueError for a missing, damaged or inconsistent file, and
    ValueError for a model without draft layers if one is wanted.
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

    if draft_layer:
        check_draft_layers(config, architectures[0], model_class(architectures))
    if draft_layer and stored is not None:
        check_stored_draft(config, stored, path)
    if model_class(architectures) is not None:
        quant_config = decide(quantization, path, config)
        model = build(config, dtype, "meta", draft_layer=draft_layer)
    else:
        cls = stock.hf_class(architectures, sorted(REGISTRY))
        quant_config = _decide_for_stock(quantization, path, config)
        if stored is not None or quant_config is None:
            _check_stock_size(cls, path, config, dtype, stored, device)
        if quant_config is None:
            return ready(_load_stock(cls, path, config, dtype, device, stored is None))
        model = stock.build_on_meta(cls, config, dtype)
    methods = _quantized_layers(model, quant_config, path)
    if stored is None:
        _load_dummy(model, methods, device)
        return ready(model)
    if draft_layer and quant_config is not None and not quant_config.online:
        methods = methods_as_stored(methods, stored, draft_prefix(config))
    plan = _plan(model, stored, quant_config, methods, path, dtype)
    _execute(plan, model, methods, device, mmap, progress)
    return ready(model)


def _load_dummy(model: nn.Module, methods: Methods, device: torch.device | str) -> None:
    """Give a model on meta random weights, quantized by these methods: those of one input, or the
    experts of a layer, before the next are made.
    """
    wanted = stored_bytes(model, methods) + unquantized_bytes(model, methods)
    check_memory(wanted, type(model).__name__, device)
    allocate_buffers(model, device)
    parameters = parameter_names(model)
    for name, method in methods.experts.items():
        of_experts = [names for names in parameters if names[0].startswith(f"{name}.")]
        parameters = [names for names in parameters if names not in of_experts]
        fill_randomly(model, device, of_experts)
        apply.quantize_experts(model, name, method)
    for group in apply.groups(methods.linears):
        layers = [name for name, _ in group]
        weights = [(f"{name}.weight",) for name in layers]
        parameters = [names for names in parameters if names not in weights]
        fill_randomly(model, device, weights)
        apply.quantize_layers(model, layers, methods.linears)
    fill_randomly(model, device, parameters)


def _check_stock_size(
    cls: "type[PreTrainedModel]",
    path: Path,
    config: Mapping[str, JSONLike],
    dtype: torch.dtype,
    stored: dict[str, Stored] | None,
    device: torch.device | str,
) -> None:
    """Raise ValueError if a transformers model has more parameters than its checkpoint, or if its
    random weights exceed the free memory.
    """
    model = stock.empty_model(cls, config, dtype)
    if stored is None:
        wanted = sum(weight.nbytes for weight in model.parameters())
        check_memory(wanted, cls.__name__, device)
    else:
        quantized = stored_config(path, config) is not None
        check_stored(model, cls.__name__, stored, quantized=quantized)


def _load_stock(
    cls: "type[PreTrainedModel]",
    path: Path,
    config: Mapping[str, JSONLike],
    dtype: torch.dtype,
    device: torch.device | str,
    dummy: bool,
) -> nn.Module:
    """A transformers model with the weights of the checkpoint, loaded by transformers, or with
    random weights.
    """
    if not dummy:
        return stock.load(cls, path, dtype, device)
    model = stock.build(cls, config, dtype, device)
    fill_randomly(model, device)
    return model


def _prefix(model: nn.Module) -> str:
    """The prefix of parameter names that names in a checkpoint do not have."""
    return stock.PREFIX if isinstance(model, stock.StockModel) else ""


def _quantized_layers(
    model: nn.Module, quant_config: QuantizationConfig | None, path: Path
) -> Methods:
    """The layers to quantize. If the cache is quantized too, converts the state handles to its
    dtype.
    """
    if quant_config is None:
        return Methods()
    for note in quant_config.notes:
        log.warning("%s: %s", path, note)
    if quant_config.kv_cache_dtype == "fp8":
        mark_fp8_state(model)
    return apply.methods_of(model, quant_config, _prefix(model))


def _plan(
    model: nn.Module,
    stored: dict[str, Stored],
    quant_config: QuantizationConfig | None,
    methods: Methods,
    path: Path,
    dtype: torch.dtype,
) -> LoadPlan:
    """The plan for these tensors of a checkpoint. Logs the names that are not part of the model."""
    stored = _model_names(model, stored, quant_config)
    online = quant_config is not None and quant_config.online
    if not online:
        try:
            shapes = {name: tensor.shape for name, tensor in stored.items()}
            apply.create_weights(model, methods, dtype, shapes)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        apply.drop_optional(model, stored)
    plan = plan_load(model, stored, path, dtype, methods if online else None)
    if plan.skipped:
        log.info(
            "%s: skipped %s, which are not part of %s",
            path,
            first_names(plan.skipped),
            type(model).__name__,
        )
    return plan


def _model_names(
    model: nn.Module, stored: dict[str, Stored], quant_config: QuantizationConfig | None
) -> dict[str, Stored]:
    """The tensors by their names in the model."""
    rename, prefix = quant_config.rename if quant_config else {}, _prefix(model)
    blocks = {name.rpartition(".")[2] for name, _ in model.named_modules()}

    def model_name(name: str) -> str:
        if "block_sparse_moe" not in blocks:  # Mixtral's name of it in transformers 4
            name = name.replace(".block_sparse_moe.", ".mlp.")
        owner, dot, leaf = name.rpartition(".")
        return prefix + owner + dot + rename.get(leaf, leaf)

    return {model_name(name): tensor for name, tensor in stored.items()}


def _execute(
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
    total = sum(weight.nbytes for weight in model.parameters())
    # disable=None: no bar without a terminal.
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="weights", disable=None if progress else True
    ) as bar:
        for num_bytes in _fill((*plan.fills, *plan.copies), model, device, mmap):
            bar.update(num_bytes)
        for group in plan.quantized:
            bar.update(_quantize(group, model, methods.linears, device))
        for layer, entries in plan.experts:
            for num_bytes in _fill(entries, model, device, mmap):
                bar.update(num_bytes)
            apply.quantize_experts(model, layer, methods.experts[layer])
    try:
        for name, stored, target in plan.scales:
            set_cache_scale(target, name, read_tensor(stored, torch.float32, device))
        apply.process_weights_after_loading(model)
    except ValueError as error:
        raise ValueError(f"{plan.path}: {error}") from error


def _fill(
    entries: Sequence[Fill | Copy], model: nn.Module, device: torch.device | str, mmap: bool
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
) -> int:
    """Read and quantize the layers of one input; returns the bytes read. The unquantized weights
    are freed on return.
    """
    weights = {layer: read_tensor(stored, dtype, device) for layer, stored, dtype in group}
    apply.quantize_layers(model, list(weights), methods, weights.get)
    return sum(weight.nbytes for weight in weights.values())


def _decide_for_stock(
    wanted: Request, path: Path, config: Mapping[str, JSONLike]
) -> QuantizationConfig | None:
    """As decide(); None, with a line in the log, for a format that only transformers can load."""
    stored = stored_config(path, config)
    method = stored.get("quant_method") if stored else None
    if stored and wanted is None and method not in checkpoints.PARSERS:
        log.warning(
            "%s: weights of quant_method %r are loaded by transformers and run by its layers",
            path,
            method,
        )
        return None
    return decide(wanted, path, config)


def ready(model: nn.Module) -> nn.Module:
    """The model in eval mode and without gradients."""
    return model.requires_grad_(False).eval()


def load_config(path: str | Path) -> Mapping[str, JSONLike]:
    """config.json of a checkpoint directory. Raises FileNotFoundError if it is missing, ValueError
    for sizes beyond the limits.
    """
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


def config_dtype(config: Mapping[str, JSONLike]) -> torch.dtype | None:
    """The dtype in config.json (transformers 5: `dtype`, older: `torch_dtype`); None if it has
    none. Raises ValueError for a name that is not a floating-point dtype.
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
    """The tensors of a checkpoint by name, from the headers of its files; if there are several
    files, from those that the index names.
    """
    index = path / INDEX
    single = path / "model.safetensors"
    if single.is_file():
        return read_header(single)
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise FileNotFoundError(
            f"{path} has neither {single.name} nor {index.name}; it has {found}"
        )
    weight_map = _weight_map(index)
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        shard = shard_path(path, file_name)
        if not shard.is_file():
            raise FileNotFoundError(
                f"{path} lacks {file_name}, which {index.name} names; download it again"
            )
        headers[file_name] = read_header(shard)
    absent = sorted(
        name for name, file_name in weight_map.items() if name not in headers[file_name]
    )
    if absent:
        raise ValueError(
            f"{index}: {first_names(absent)} not in the file it names ({weight_map[absent[0]]})"
        )
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def _weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file. Raises ValueError for another file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        raise ValueError(f"{index} has no weight_map (name of tensor -> file); download it again")
    return weight_map


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file. Raises ValueError for a damaged file."""
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


def read_tensor(stored: Stored, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    with safetensors.safe_open(stored.file, framework="pt") as opened:
        weight: Tensor = opened.get_tensor(stored.name)
        return weight.to(device, dtype)


def read(
    entries: Iterable[Fill | Copy], model: nn.Module, device: torch.device | str, mmap: bool
) -> Iterator[tuple[Fill | Copy, Tensor]]:
    """The weights of fills, in the planned shape and dtype, and those of copies, which are in the
    model's parameters by then. Read by several threads, in the order of completion.
    """
    by_file: dict[Path, list[Fill | Copy]] = {}
    for entry in entries:
        by_file.setdefault(entry.stored.file, []).append(entry)

    def placed(entry: Fill | Copy, weight: Tensor) -> tuple[Fill | Copy, Tensor]:
        if weight.dtype == torch.float8_e8m0fnu:
            weight = weight.view(torch.uint8)
        if isinstance(entry, Copy):
            return entry, copy_into(tensor_of(model, entry.names[0]), entry, weight)
        return entry, weight.to(device, entry.dtype).reshape(entry.shape)

    def read_some(file: Path, group: list[Fill | Copy]) -> list[tuple[Fill | Copy, Tensor]]:
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


def assign(model: nn.Module, names: tuple[str, ...], weight: Tensor) -> None:
    """Set the parameter or buffer of all these names to the weight."""
    parameter = parameter_of(weight)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, leaf, weight if leaf in module._buffers else parameter)


def allocate_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Allocate the buffers of a model on meta: uninitialized, unless their module sets them when it
    moves (Rotary).
    """
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module._apply(lambda tensor: empty(tensor, device), recurse=False)  # type: ignore[no-untyped-call]
        elif not module._parameters:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def empty(like: Tensor, device: torch.device | str) -> Tensor:
    """As torch.empty_like with strides, which imports symbolic shapes for a tensor on meta."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def fill_randomly(
    model: nn.Module,
    device: torch.device | str,
    parameters: Sequence[tuple[str, ...]] | None = None,
) -> None:
    """Set parameters to random values: small, and around 1 for norms. They depend only on the name,
    shape, dtype and device type of a parameter.

    parameters  the names of each; None: all
    """
    for names in parameter_names(model) if parameters is None else parameters:
        like = model.get_parameter(names[0])
        generator = torch.Generator(device).manual_seed(zlib.crc32(names[0].encode()))
        mean = 1.0 if "norm" in names[0] and names[0].endswith("weight") else 0.0
        assign(model, names, empty(like, device).normal_(mean, 0.02, generator=generator))
