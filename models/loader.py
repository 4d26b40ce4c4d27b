"""From a checkpoint directory to a model: build on meta, check every name and shape, then read.

Everything is checked against the headers before the first weight is read; what fails raises, and no model is returned.
"""

import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from tqdm import tqdm

from atomc.json_file import read_json
from atomc.models import REGISTRY, architectures_of, build, model_class, stock
from atomc.models.cache_scales import cache_scales, mark_fp8_state, set_cache_scale
from atomc.models.limits import Stored, check_layers, check_memory, check_sizes, check_stored
from atomc.models.shard_paths import INDEX, shard_path
from atomc.quantization import apply, checkpoints
from atomc.quantization.config import QuantizationConfig, Request, decide, stored_config
from atomc.quantization.linear import LinearMethod
from atomc.weights import parameter_of

log = logging.getLogger("atomc")

THREADS = 8
TENSORS_A_JOB = 32
LOAD_FORMATS = ("auto", "safetensors", "dummy")
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of quantized weights; these are never converted.
CODES = {
    torch.float8_e4m3fn: ("F8_E4M3",),
    torch.int8: ("I8",),
    torch.uint8: ("U8", "F8_E8M0"),
    torch.int32: ("I32",),
    torch.int64: ("I64",),
}
# Old Llama checkpoints store the rotary frequencies; heads for multi-token prediction are no part of the model. Queries
# are not kept in fp8, and what keeps no state needs no scales for it.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(hf_model\.)?(model\.)?mtp\.|\.(q|k|v|kv)_scale$")


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
    load_format  "auto" and "safetensors" read the weights; "dummy": small random ones, the same each time
    quantization how to quantize the weights when they are read: a name in atomc.quantization.ONLINE, or {"scheme": name,
                 "ignore": [patterns of layers to keep]}. None: as the checkpoint is. See docs/quantization.md
    mmap         weights are views of the mapped files where dtype and device allow; False: files are read into memory,
                 faster from a network disk

    Raises FileNotFoundError or ValueError if something is missing, damaged, or does not fit.
    """
    path = Path(path)
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r} is not one of {LOAD_FORMATS}")
    config = load_config(path)
    architectures = architectures_of(config)
    stored = stored_tensors(path) if load_format != "dummy" else {}
    if load_format != "dummy":
        check_layers(config, len(stored))
    dtype = dtype or config_dtype(config) or stored_dtype(stored)

    how: QuantizationConfig | None
    if model_class(architectures) is not None:
        how = decide(quantization, path, config)
        model = build(config, dtype, "meta")
    else:
        cls = stock.hf_class(architectures, sorted(REGISTRY))
        how = _for_stock(quantization, path, config)
        outline = stock.empty_model(cls, config, dtype)
        if load_format == "dummy":
            check_memory(outline, cls.__name__, device)
        else:
            check_stored(outline, cls.__name__, stored, quantized=stored_config(path, config) is not None)
        if how is None:
            return ready(_by_transformers(cls, path, config, dtype, device, load_format == "dummy"))
        model = stock.build_on_meta(cls, config, dtype)
    for note in how.notes if how else ():
        log.warning("%s: %s", path, note)
    prefix = stock.PREFIX if isinstance(model, stock.StockModel) else ""
    methods = apply.linears(model, how, prefix) if how else {}
    if how and how.kv_cache_dtype == "fp8":
        mark_fp8_state(model)
    if load_format == "dummy":
        check_memory(model, type(model).__name__, device)
        allocate_buffers(model, device)
        fill_randomly(model, device)
        quantize_groups(model, methods, lambda name: None)
    else:
        stored = {prefix + name: tensor for name, tensor in _renamed(stored, how).items()}
        _fill(model, stored, how, methods, path, dtype, device, mmap, progress)
    return ready(model)


def _by_transformers(
    cls: type, path: Path, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str, dummy: bool
) -> nn.Module:
    """The class of transformers with the checkpoint's weights, or with random ones."""
    if not dummy:
        return stock.load(cls, path, dtype, device)
    model = stock.build(cls, config, dtype, device)
    fill_randomly(model, device)
    return model


def _fill(
    model: nn.Module, stored: dict[str, Stored], how: QuantizationConfig | None,
    methods: dict[str, LinearMethod], path: Path, dtype: torch.dtype, device: torch.device | str, mmap: bool,
    progress: bool,
) -> None:  # fmt: skip
    """Give a model on meta the stored weights, quantized as `how` says."""
    online = how is not None and how.online
    if how and not online:
        apply.create_weights(model, methods, dtype)
        apply.drop_optional(model, stored)
    scales = cache_scales(model, stored)
    sources = match_names(model, {name: tensor for name, tensor in stored.items() if name not in scales}, path)
    allocate_buffers(model, device)
    total = sum(weight.nbytes for weight in model.parameters())
    streamed = {(f"{name}.weight",) for name in methods} if online else set()
    # disable=None: no bar where there is no terminal.
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None if progress else True) as bar:
        at_once = {names: name for names, name in sources.items() if names not in streamed}
        for names, weight in read(at_once, stored, model, device, mmap):
            assign(model, names, weight)
            bar.update(weight.nbytes)

        def next_weight(name: str) -> Tensor:
            weight = one(stored[f"{name}.weight"], dtype, device)
            bar.update(weight.nbytes)
            return weight

        if streamed:
            quantize_groups(model, methods, next_weight)
    try:
        for name, scale in scales.items():
            set_cache_scale(scale, name, one(stored[name], torch.float32, device))
        apply.process_weights_after_loading(model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _for_stock(wanted: Request, path: Path, config: dict[str, Any]) -> QuantizationConfig | None:
    """As decide(); None, with a line in the log, for what transformers has to load itself."""
    stored = stored_config(path, config)
    method = stored.get("quant_method") if stored else None
    if stored and wanted is None and (method not in checkpoints.PARSERS or method == "mxfp4"):
        log.warning("%s: weights of quant_method %r are loaded by transformers and run as its layers do", path, method)
        return None
    return decide(wanted, path, config)


def _renamed(stored: dict[str, Stored], how: QuantizationConfig | None) -> dict[str, Stored]:
    """The tensors under the names that our layers have."""

    def own(name: str) -> str:
        owner, dot, leaf = name.rpartition(".")
        return owner + dot + how.rename.get(leaf, leaf) if how else name

    return {own(name): tensor for name, tensor in stored.items()}


def quantize_groups(
    model: nn.Module, methods: Mapping[str, LinearMethod], weight_of: Callable[[str], Tensor | None]
) -> None:
    """Quantize these layers, those of one input together, so that no more weights are in memory than these have."""
    for group in apply.groups(methods):
        apply.quantize_layers(model, [name for name, _ in group], methods, weight_of)


def ready(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def load_config(path: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint directory."""
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; expected one with config.json and *.safetensors")
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no config.json; is it a complete checkpoint?")
    config = read_json(file)
    if not isinstance(config.get("model_type"), str | None):
        raise ValueError(f"config.json: model_type is {config['model_type']!r:.40}, expected a text")
    check_sizes(config)
    return config


def config_dtype(config: dict[str, Any]) -> torch.dtype | None:
    """The dtype config.json names (transformers 5: `dtype`, older: `torch_dtype`), None if it names none."""
    name = config["dtype"] if config.get("dtype") is not None else config.get("torch_dtype")
    if name is None:
        return None
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"config.json: dtype {name!r:.40} is not a dtype of torch, such as 'bfloat16'")
    if not dtype.is_floating_point:
        raise ValueError(f"config.json: dtype {name!r} is not a floating-point dtype, such as 'bfloat16'")
    return dtype


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint by name, from the headers alone. An index says which file a name is read from."""
    index = path / INDEX
    single = path / "model.safetensors"
    if single.is_file():
        return header(single)
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in path.iterdir())) or "nothing"
        raise FileNotFoundError(f"{path} has neither {single.name} nor {index.name}; it has {found}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map (name of tensor -> file); download it again")
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        shard = shard_path(path, file_name)
        if not shard.is_file():
            raise FileNotFoundError(f"{path} lacks {file_name}, which {index.name} names; download it again")
        headers[file_name] = header(shard)
    absent = sorted(name for name, file_name in weight_map.items() if name not in headers[file_name])
    if absent:
        raise ValueError(f"{index}: {some(absent)} not in the file it names ({weight_map[absent[0]]})")
    return {name: headers[file_name][name] for name, file_name in weight_map.items()}


def header(file: Path) -> dict[str, Stored]:
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: Stored(file, part.get_dtype(), tuple(part.get_shape()), name) for name, part in slices.items()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete ({error}); download it again") from error


def stored_dtype(stored: dict[str, Stored]) -> torch.dtype:
    """The dtype of the first floating-point tensor; fp32 if there is none."""
    return next((FLOATS[tensor.dtype] for tensor in stored.values() if tensor.dtype in FLOATS), torch.float32)


def some(names: list[str]) -> str:
    """The first few names, and how many more."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def parameter_names(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter; a tied one has several."""
    names: dict[int, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return [tuple(group) for group in names.values()]


def match_names(model: nn.Module, stored: dict[str, Stored], path: Path) -> dict[tuple[str, ...], str]:
    """For the names of each parameter the stored name to read. Raises ValueError that lists all that does not fit."""
    parameters = parameter_names(model)
    expected = {name for names in parameters for name in names}
    modules = {name for name, _ in model.named_modules()}
    others = sorted(set(stored) - expected)
    skipped = [name for name in others if _is_skipped(name, modules)]
    unexpected = [name for name in others if name not in skipped]
    sources = {names: name for names in parameters for name in reversed(names) if name in stored}
    missing = [names[0] for names in parameters if names not in sources]
    misfits = [misfit for names, name in sources.items()
               if (misfit := _misfit(name, stored[name], model.get_parameter(names[0])))]  # fmt: skip
    found = {"missing ": missing, "unexpected ": unexpected, "": misfits}
    problems = [kind + some(names) for kind, names in found.items() if names]
    if problems:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}. "
                         "Are config.json and the weights of the same checkpoint?")
    if skipped:
        log.info("%s: skipped %s, which are no part of %s", path, some(skipped), type(model).__name__)
    return sources


def _is_skipped(name: str, modules: set[str]) -> bool:
    """Whether a stored tensor belongs to a layer beyond the model's, or to what the model does not have."""
    layer = re.match(r"(.*\blayers\.\d+)\.", name)
    return (layer is not None and layer[1] not in modules) or IGNORED.search(name) is not None


def _misfit(name: str, stored: Stored, parameter: nn.Parameter) -> str | None:
    shape, dtypes = tuple(parameter.shape), CODES.get(parameter.dtype, tuple(FLOATS))
    # Scales come as [], [1], [N] or [N, 1].
    if stored.shape != shape and (*stored.shape, 1) != shape:
        return f"{name} is {list(stored.shape)}, expected {list(shape)}"
    return None if stored.dtype in dtypes else f"{name} is {stored.dtype}, expected {' or '.join(dtypes)}"


def one(stored: Stored, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    with safetensors.safe_open(stored.file, framework="pt") as opened:
        weight: Tensor = opened.get_tensor(stored.name)
        return weight.to(device, dtype)


def read(
    sources: dict[tuple[str, ...], str], stored: dict[str, Stored], model: nn.Module, device: torch.device | str,
    mmap: bool,
) -> Iterator[tuple[tuple[str, ...], Tensor]]:  # fmt: skip
    """The weights, in the order in which they arrive, read by several threads; in shape and dtype as the model's."""
    by_file: dict[Path, list[tuple[str, ...]]] = {}
    for names, name in sources.items():
        by_file.setdefault(stored[name].file, []).append(names)

    def fitted(names: tuple[str, ...], weight: Tensor) -> Tensor:
        like = model.get_parameter(names[0])
        if weight.dtype == torch.float8_e8m0fnu:
            weight = weight.view(torch.uint8)
        return weight.to(device, like.dtype).reshape(like.shape)

    def part(file: Path, group: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], Tensor]]:
        if not mmap:
            tensors = safetensors.torch.load(file.read_bytes())
            return [(names, fitted(names, tensors[stored[sources[names]].name])) for names in group]
        with safetensors.safe_open(file, framework="pt") as opened:
            return [(names, fitted(names, opened.get_tensor(stored[sources[names]].name))) for names in group]

    with ThreadPoolExecutor(THREADS) as pool:
        jobs = []
        for file, group in by_file.items():
            # A mapped file is cheap to open again, so that several threads share it; one that is read is read once.
            step = TENSORS_A_JOB if mmap else len(group)
            jobs += [pool.submit(part, file, group[i : i + step]) for i in range(0, len(group), step)]
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
    """Buffers of a model built on meta: they are empty, or their module fills them when it is moved (Rotary)."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module._apply(lambda tensor: empty(tensor, device), recurse=False)  # type: ignore[no-untyped-call]
        elif not module._parameters:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def empty(like: Tensor, device: torch.device | str) -> Tensor:
    """Memory for such a tensor. (torch.empty_like of one on meta imports what torch's compiler knows of sizes.)"""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


def fill_randomly(model: nn.Module, device: torch.device | str) -> None:
    """Small weights, norms near 1. A parameter's values depend only on its name, shape, dtype and kind of device."""
    for names in parameter_names(model):
        like = model.get_parameter(names[0])
        generator = torch.Generator(device).manual_seed(zlib.crc32(names[0].encode()))
        mean = 1.0 if "norm" in names[0] and names[0].endswith("weight") else 0.0
        assign(model, names, empty(like, device).normal_(mean, 0.02, generator=generator))
