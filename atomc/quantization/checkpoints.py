"""Parses the `quantization_config` of each kind of checkpoint.

A parser takes the config as in config.json. It raises ValueError for a setting that is not
supported, naming the field, its value and the supported values.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from atomc.files.json_types import JSONLike
from atomc.ops.formats import NVFP4_GROUP
from atomc.quantization.linear import Format
from atomc.quantization.nvfp4 import Nvfp4
from atomc.quantization.packing import (
    AWQ,
    GPTQ,
    GPTQ_V2,
    MODELOPT_NVFP4,
    MXFP4_PACK_QUANTIZED,
    NVFP4_PACK_QUANTIZED,
    PACK_QUANTIZED,
)
from atomc.quantization.scheme import Fp8, Fp8Block, Int4, Int8, Mxfp4, Scheme

Config = Mapping[str, JSONLike]
T = TypeVar("T")
LM_HEAD = ("lm_head",)
# A target of rules: the experts of a mixture, which the target "Linear" covers, too.
EXPERTS = "Experts"
UPGRADED = (
    "activations have a dynamic scale per row instead of per tensor as in the config: more "
    "accurate, and one pass "
    "less"
)
SIXTEEN_BITS = (
    "activations keep 16 bits instead of NVFP4 as in the config: more accurate, and products do "
    "not use the FP4 tensor cores that some GPUs have"
)


Rules = tuple[tuple[tuple[str, ...], Scheme, Format | None], ...]


@dataclass(frozen=True)
class Parsed:
    """As in QuantizationConfig; a rule is (targets, scheme, format)."""

    rules: Rules
    ignore: tuple[str, ...] = LM_HEAD
    rename: Mapping[str, str] = field(default_factory=dict)
    kv_cache_dtype: str | None = None
    notes: tuple[str, ...] = ()


def _linears(scheme: Scheme, form: Format | None = None) -> Rules:
    return ((("Linear",), scheme, form),)


def only(method: str, config: Config, name: str, *supported: T, default: T | None = None) -> T:
    """The field's value, or `default`. Raises ValueError for an unsupported value."""
    stored = config.get(name)
    value = default if stored is None else stored
    for choice in supported:
        if value == choice:
            return choice
    raise ValueError(
        f"{method}: {name} {value!r} is not supported, only {' or '.join(map(repr, supported))}"
    )


def _require(where: str, config: Config, **fields: JSONLike) -> None:
    """Raise ValueError for a field that is missing, or has another value than this one."""
    for name, value in fields.items():
        only(where, config, name, value)


def _allow(where: str, config: Config, **fields: JSONLike) -> None:
    """Raise ValueError for a field that has another value than this one, its default."""
    for name, value in fields.items():
        only(where, config, name, value, default=value)


def names(config: Config, *fields: str) -> tuple[str, ...]:
    """The names in these fields; null counts as missing."""
    return tuple(str(name) for field in fields for name in _items(config, field))


def _items(config: Config, name: str) -> list[JSONLike]:
    """The items of a list; [] if it is missing or null."""
    value = config.get(name) or ()
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r:.60}, expected a list")
    return list(value)


def _object(config: Config, name: str) -> Config | None:
    """A nested object; None if it is missing or null."""
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r:.60}, expected an object")
    return value


# fp8 of Hugging Face, DeepSeek and AutoFP8


def fp8(config: Config) -> Parsed:
    activation = only("fp8", config, "activation_scheme", "dynamic", "static", default="dynamic")
    block = None if config.get("weight_block_size") is None else _items(config, "weight_block_size")
    only("fp8", config, "scale_fmt", "float", "ue8m0", default="float")
    only("fp8", config, "fmt", "e4m3", "float8_e4m3fn", default="e4m3")
    only("fp8", config, "expert_dtype", "fp8", default="fp8")
    scheme: Scheme
    if block is None:
        scheme = Fp8("tensor", "static" if activation == "static" else "token")
    elif block != [128, 128]:
        raise ValueError(
            f"fp8: weight_block_size {block} is not supported, only [128, 128] or none"
        )
    elif activation != "dynamic":
        raise ValueError(
            "fp8: activation_scheme 'static' with weight_block_size is not supported, only "
            "'dynamic'"
        )
    else:
        scheme = Fp8Block()
    return Parsed(
        _linears(scheme),
        LM_HEAD + names(config, "modules_to_not_convert", "ignored_layers", "ignore"),
        {
            "weight_scale_inv": "weight_scale",
            "activation_scale": "input_scale",
            "gate_up_proj_scale_inv": "gate_up_proj_scale",
            "gate_up_proj_activation_scale": "gate_up_proj_input_scale",
            "down_proj_scale_inv": "down_proj_scale",
            "down_proj_activation_scale": "down_proj_input_scale",
        },
        "fp8" if config.get("kv_cache_scheme") == "static" else None,
        (UPGRADED,) if block is None and activation == "dynamic" else (),
    )


# compressed-tensors


def compressed_tensors(config: Config) -> Parsed:
    method = "compressed-tensors"
    only(method, config, "quantization_status", "compressed", "frozen", default="compressed")
    sparsity = (_object(config, "sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ValueError(
            f"{method}: sparsity_config.format {sparsity!r} is not supported, only 'dense'"
        )
    groups = _object(config, "config_groups") or {}
    if not groups:
        raise ValueError(
            f"{method}: config_groups is empty, so no layer is quantized; remove "
            "quantization_config"
        )
    rules, notes = [], []
    for name in groups:
        where = f"{method}: config_groups.{name}"
        group = _object(groups, name) or {}
        scheme, form, note = _compressed_group(
            where, group, group.get("format") or config.get("format")
        )
        rules.append((names(group, "targets") or ("Linear",), scheme, form))
        notes += note
    kv_cache_dtype = _kv_cache_dtype(method, config.get("kv_cache_scheme"))
    ignore = names(config, "ignore")
    return Parsed(tuple(rules), ignore, {}, kv_cache_dtype, tuple(dict.fromkeys(notes)))


def _kv_cache_dtype(method: str, scheme: JSONLike) -> str | None:
    """ "fp8" for the only supported kv_cache_scheme, None without one."""
    if scheme is None:
        return None
    if not isinstance(scheme, Mapping):
        raise ValueError(f"{method}: kv_cache_scheme is {scheme!r}, expected an object")
    bits, kind = scheme.get("num_bits"), scheme.get("type")
    if (bits, kind, scheme.get("strategy", "tensor")) != (8, "float", "tensor"):
        raise ValueError(
            f"{method}: kv_cache_scheme of {bits} bits, type {kind!r}, strategy "
            f"{scheme.get('strategy')!r} is not supported, only 8, 'float', 'tensor'"
        )
    return "fp8"


# (scheme, format, notes) of a group
_Group = tuple[Scheme, Format | None, list[str]]


def _compressed_group(where: str, group: Config, form: JSONLike) -> _Group:
    weights, inputs = _object(group, "weights"), _object(group, "input_activations")
    if weights is None:
        raise ValueError(f"{where} has no weights")
    if group.get("output_activations"):
        raise ValueError(f"{where}.output_activations are not supported, only null")
    readers: dict[str, Callable[[str, Config, Config | None], _Group]] = {
        "pack-quantized": _pack_quantized,
        "int-quantized": _int_quantized,
        "float-quantized": _float_quantized,
        "naive-quantized": _float_quantized if weights.get("type") == "float" else _int_quantized,
        "mxfp4-pack-quantized": _mxfp4_pack_quantized,
        "nvfp4-pack-quantized": _nvfp4_pack_quantized,
    }
    if not isinstance(form, str) or form not in readers:
        raise ValueError(f"{where}.format {form!r} is not supported, only {', '.join(readers)}")
    return readers[form](where, weights, inputs)


def _pack_quantized(where: str, weights: Config, inputs: Config | None) -> _Group:
    at = f"{where}.weights"
    if inputs is not None:
        raise ValueError(
            f"{where}.input_activations are not supported with 'pack-quantized', only null"
        )
    _require(at, weights, num_bits=4, strategy="group")
    _allow(at, weights, type="int", dynamic=False)
    # "weight" and "static" store the weights in the order of the inputs; only the order of
    # quantization differs.
    only(at, weights, "actorder", False, "weight", "static", default=False)
    group = only(at, weights, "group_size", *Int4.GROUPS)
    return Int4(group, not weights.get("symmetric", True)), PACK_QUANTIZED, []


def _int_quantized(where: str, weights: Config, inputs: Config | None) -> _Group:
    at, x = f"{where}.weights", f"{where}.input_activations"
    _require(at, weights, num_bits=8, strategy="channel")
    _allow(at, weights, type="int", dynamic=False, symmetric=True, actorder=False)
    if inputs is None:
        raise ValueError(
            f"{x} is missing: int8 weights with 16-bit activations are not supported, only "
            "with int8 ones"
        )
    _require(x, inputs, num_bits=8, dynamic=True)
    _allow(x, inputs, type="int", symmetric=True)
    strategy = only(x, inputs, "strategy", "token", "tensor")
    return Int8(), None, [UPGRADED] if strategy == "tensor" else []


def _float_quantized(where: str, weights: Config, inputs: Config | None) -> _Group:
    at, x = f"{where}.weights", f"{where}.input_activations"
    _require(at, weights, num_bits=8, type="float")
    _allow(at, weights, dynamic=False, symmetric=True)
    strategy = only(at, weights, "strategy", "tensor", "channel", "block")
    if inputs is None:
        raise ValueError(
            f"{x} is missing: fp8 weights with 16-bit activations are not supported, only with "
            "fp8 ones"
        )
    _require(x, inputs, num_bits=8, type="float")
    _allow(x, inputs, symmetric=True)
    if strategy == "block":
        if _items(weights, "block_structure") != [128, 128]:
            raise ValueError(
                f"{at}.block_structure {weights.get('block_structure')} is not supported, only "
                "[128, 128]"
            )
        _require(x, inputs, strategy="group", group_size=128, dynamic=True)
        return Fp8Block(), None, []
    if not only(x, inputs, "dynamic", True, False, default=False):
        _require(x, inputs, strategy="tensor")
        return Fp8(strategy, "static"), None, []
    inputs_strategy = only(x, inputs, "strategy", "token", "tensor")
    return Fp8(strategy, "token"), None, [UPGRADED] if inputs_strategy == "tensor" else []


def _mxfp4_pack_quantized(where: str, weights: Config, inputs: Config | None) -> _Group:
    at, x = f"{where}.weights", f"{where}.input_activations"
    _require(at, weights, num_bits=4, type="float", group_size=32)
    if inputs is None:
        return Mxfp4("16-bit"), MXFP4_PACK_QUANTIZED, []
    _require(x, inputs, num_bits=4, type="float", group_size=32, dynamic=True)
    return Mxfp4("mxfp4"), MXFP4_PACK_QUANTIZED, []


def _nvfp4_pack_quantized(where: str, weights: Config, inputs: Config | None) -> _Group:
    at, x = f"{where}.weights", f"{where}.input_activations"
    _require(at, weights, num_bits=4, type="float", group_size=NVFP4_GROUP)
    _allow(at, weights, strategy="tensor_group", symmetric=True, dynamic=False)
    if inputs is None:
        return Nvfp4(), NVFP4_PACK_QUANTIZED, []
    _require(x, inputs, num_bits=4, type="float", group_size=NVFP4_GROUP)
    return Nvfp4(), NVFP4_PACK_QUANTIZED, [SIXTEEN_BITS]


# ModelOpt of NVIDIA


def modelopt(config: Config) -> Parsed:
    """A quantization_config, or hf_quant_config.json, whose fields are in `quantization`."""
    inside = _object(config, "quantization")
    fields: Config = config if inside is None else inside
    method = "modelopt" if inside is None else "modelopt: quantization"
    algorithm = only(method, fields, "quant_algo", "NVFP4", "W4A16_NVFP4", "FP8")
    kv = fields.get("kv_cache_scheme")
    if kv is None or isinstance(kv, str):
        field = "kv_cache_quant_algo" if kv is None else "kv_cache_scheme"
        kv_cache_dtype = {None: None, "FP8": "fp8"}[only(method, fields, field, None, "FP8")]
    else:
        kv_cache_dtype = _kv_cache_dtype(method, kv)
    ignore = names(fields, "exclude_modules", "ignore")
    if algorithm == "FP8":
        return Parsed(_linears(Fp8("tensor", "static")), ignore, kv_cache_dtype=kv_cache_dtype)
    only(method, fields, "group_size", NVFP4_GROUP, default=NVFP4_GROUP)
    return Parsed(
        _linears(Nvfp4(), MODELOPT_NVFP4),
        ignore,
        kv_cache_dtype=kv_cache_dtype,
        notes=(SIXTEEN_BITS,) if algorithm == "NVFP4" else (),
    )


# GPTQ and AWQ


def _group_size(method: str, config: Config, *fields: str) -> int:
    size = next((config[name] for name in fields if config.get(name) is not None), None)
    return only(method, {"group_size": size}, "group_size", *Int4.GROUPS)


def gptq(config: Config) -> Parsed:
    only("gptq", config, "bits", 4)
    form = only("gptq", config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    if config.get("desc_act"):
        raise ValueError(
            "gptq: desc_act True (activation order) is not supported, only False: the weights of a "
            "group are not adjacent"
        )
    if config.get("dynamic"):
        raise ValueError(
            "gptq: dynamic (settings per module) is not supported, only one setting for all modules"
        )
    only("gptq", config, "lm_head", False, default=False)
    # Zero points are always stored; sym decides whether they are used.
    scheme = Int4(_group_size("gptq", config, "group_size"), not config.get("sym", True))
    return Parsed(
        _linears(scheme, GPTQ if form == "gptq" else GPTQ_V2),
        LM_HEAD + names(config, "modules_to_not_convert"),
    )


def awq(config: Config) -> Parsed:
    bits = {"bits": config.get("bits", config.get("w_bit"))}
    only("awq", bits, "bits", 4)
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    only("awq", {"version": version}, "version", "gemm")
    scheme = Int4(
        _group_size("awq", config, "group_size", "q_group_size"),
        bool(config.get("zero_point", True)),
    )
    return Parsed(_linears(scheme, AWQ), LM_HEAD + names(config, "modules_to_not_convert"))


# MXFP4 of GPT-OSS and of Quark


def mxfp4(config: Config) -> Parsed:
    """The experts of GPT-OSS, stacked; linear layers are not quantized."""
    return Parsed(
        (((EXPERTS,), Mxfp4("16-bit"), None),),
        names(config, "modules_to_not_convert"),
        {
            "gate_up_proj_blocks": "gate_up_proj",
            "gate_up_proj_scales": "gate_up_proj_scale",
            "down_proj_blocks": "down_proj",
            "down_proj_scales": "down_proj_scale",
        },
    )


def quark(config: Config) -> Parsed:
    method = "quark"
    for name in ("layer_quant_config", "layer_type_quant_config"):
        if config.get(name):
            raise ValueError(
                f"quark: {name} is not supported, only one setting for all layers "
                "(global_quant_config)"
            )
    setting = _object(config, "global_quant_config") or {}
    weight, inputs = _object(setting, "weight"), _object(setting, "input_tensors")
    if weight is None:
        raise ValueError("quark: global_quant_config.weight is missing, so no layer is quantized")
    if setting.get("output_tensors") or setting.get("bias"):
        raise ValueError(
            "quark: global_quant_config with output_tensors or bias is not supported, only null"
        )
    for at, part in (("weight", weight), ("input_tensors", inputs)):
        if part is not None:
            where = f"{method}: global_quant_config.{at}"
            _require(where, part, dtype="fp4", qscheme="per_group", group_size=32)
            _require(where, part, scale_format="e8m0")
    if inputs is not None:
        only("quark: global_quant_config.input_tensors", inputs, "is_dynamic", True)
    kv = config.get("kv_cache_quant_config")
    return Parsed(
        _linears(Mxfp4("16-bit" if inputs is None else "mxfp4")),
        names(config, "exclude"),
        kv_cache_dtype="fp8" if kv else None,
    )


PARSERS: dict[str, Callable[[Config], Parsed]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "mxfp4": mxfp4,
    "quark": quark,
    "modelopt": modelopt,
}
