"""The quantization of a checkpoint's layers: one table of rules for all formats.

The source is the command line, else a quantization file in the checkpoint's folder, else
config.json.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from atomc.errors import suggestion
from atomc.files.json_file import read_json
from atomc.files.json_types import JSONLike, json_kind
from atomc.quantization import checkpoints
from atomc.quantization.checkpoints import EXPERTS
from atomc.quantization.experts import ExpertsMethod
from atomc.quantization.experts_spec import spec_of
from atomc.quantization.field_types import check_types
from atomc.quantization.linear import LinearMethod
from atomc.quantization.scheme import ONLINE, Scheme
from atomc.quantization.stored_experts import PROJECTIONS

# Files in the folder of the weights, in order of precedence -> the method of a file without
# `quant_method`.
FILES = {
    "quantization_config.json": None,
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# Names of merged layers in vLLM and others -> the layers that they consist of.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a config matches the module of this name.

    "re:..." is a regular expression that matches from the start; a pattern with * or ? is a glob;
    any other is a sequence of whole components of the name: "lm_head", "model.layers.3",
    "mlp.down_proj". A merged layer's name matches its parts.
    """
    parent, _, leaf = name.rpartition(".")
    fused = [merged for merged, parts in FUSED.items() if leaf in parts and merged in pattern]
    return any(
        _matches(pattern, alias)
        for alias in (name, *(f"{parent}.{merged}".strip(".") for merged in fused))
    )


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    if any(sign in pattern for sign in "*?"):
        return fnmatch.fnmatchcase(name, pattern)
    return f".{pattern.strip('.')}." in f".{name}."


@dataclass(frozen=True)
class Rule:
    """The method for modules that match a target: a pattern or a class name."""

    targets: tuple[str, ...]
    method: LinearMethod


def _any_matches(patterns: Sequence[str], classes: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a pattern is one of these classes, or matches one of these names."""
    return any(
        pattern in classes or any(matches(pattern, name) for name in names) for pattern in patterns
    )


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint is quantized, or how a model will be quantized.

    method  the checkpoint's quant_method, or a name in ONLINE
    online  the weights are stored unquantized, and quantized during loading
    rules   the first rule that covers a layer applies
    ignore  patterns of layers that are not quantized
    rename  suffix of a stored name -> suffix of our name
    kv_cache_dtype  "fp8" if the checkpoint requests it
    notes   deviations from the config, one sentence each
    """

    method: str
    online: bool
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    kv_cache_dtype: str | None = None
    notes: tuple[str, ...] = ()

    def get_quant_method(self, layer: nn.Linear, prefix: str) -> LinearMethod | None:
        """The method of the linear layer of this name; None if it is not quantized. Raises
        ValueError if it cannot be.
        """
        method = self._method((type(layer).__name__,), (prefix,))
        if method is not None:
            reason = method.scheme.refuses(layer.out_features, layer.in_features)
            self._check(prefix, method.scheme, reason)
        return method

    def get_experts_method(self, experts: nn.Module, prefix: str) -> ExpertsMethod | None:
        """The method of the stacked experts of this name; None if they are not quantized. Patterns
        may name the module, or projections of an expert as linear layers: "experts.0.gate_proj".

        Raises ValueError if they cannot be quantized, and for patterns of some projections.
        """
        method = self.rule_of_experts(type(experts).__name__, prefix)
        if method is None:
            return None
        try:
            reason = method.refuses(spec_of(experts))
        except ValueError as error:
            reason = str(error)
        self._check(prefix, method.scheme, reason)
        return method

    def rule_of_experts(self, class_name: str, prefix: str) -> ExpertsMethod | None:
        """As get_experts_method, without a look at the experts of this class and name."""
        classes = ("Linear", EXPERTS, class_name)
        by_part = {
            part: self._method(classes, (prefix, f"{prefix}.{part}", f"{prefix}.0.{part}"))
            for parts in PROJECTIONS.values()
            for part in parts
        }
        methods = list(by_part.values())
        if any(method != methods[0] for method in methods):
            ignored = ", ".join(part for part, method in by_part.items() if method is None)
            raise ValueError(
                f"{self.method}: {prefix} has projections of different schemes"
                f"{f' (ignored are {ignored})' if ignored else ''}: experts are quantized as a "
                "whole, or not at all"
            )
        if methods[0] is None:
            return None
        return ExpertsMethod(methods[0].scheme, methods[0].format, methods[0].notes)

    def _method(self, classes: Sequence[str], names: Sequence[str]) -> LinearMethod | None:
        """The method of the first rule for a layer of these classes and names, unless ignored."""
        if _any_matches(self.ignore, classes, names):
            return None
        covering = (rule for rule in self.rules if _any_matches(rule.targets, classes, names))
        return next((rule.method for rule in covering), None)

    def _check(self, prefix: str, scheme: Scheme, reason: str | None) -> None:
        if reason:
            raise ValueError(
                f"{self.method}: {prefix} cannot be {scheme.description}: {reason}; "
                "add it to `ignore` or choose another scheme"
            )


def online(name: str, ignore: Sequence[str] = ()) -> QuantizationConfig:
    """The config to quantize during loading. Raises ValueError for an unknown scheme."""
    if name not in ONLINE:
        raise ValueError(
            f"quantization {name!r} is not one of the schemes {', '.join(ONLINE)}"
            f"{suggestion(name, ONLINE)}"
        )
    for pattern in ignore:
        check_pattern(pattern)
    return QuantizationConfig(
        name, True, (Rule(("Linear",), LinearMethod(ONLINE[name])),), ("lm_head", *ignore)
    )


def check_pattern(pattern: str) -> None:
    """Raise ValueError for an invalid regular expression."""
    if pattern.startswith("re:"):
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(
                f"ignore pattern {pattern!r} is not a regular expression: {error}"
            ) from error


def parse(config: Mapping[str, JSONLike]) -> QuantizationConfig:
    """The config of a `quantization_config`. Raises ValueError for unsupported settings."""
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in checkpoints.PARSERS:
        raise ValueError(
            f"quantized weights of quant_method {method!r} are not supported, only "
            f"{', '.join(checkpoints.PARSERS)}"
        )
    parsed = checkpoints.PARSERS[method](config)
    rules = tuple(
        Rule(targets, LinearMethod(scheme, format, parsed.notes))
        for targets, scheme, format in parsed.rules
    )
    for pattern in (*parsed.ignore, *(target for rule in rules for target in rule.targets)):
        check_pattern(pattern)
    return QuantizationConfig(
        method, False, rules, parsed.ignore, parsed.rename, parsed.kv_cache_dtype, parsed.notes
    )


def stored_config(path: Path, config: Mapping[str, JSONLike]) -> Mapping[str, JSONLike] | None:
    """The quantization_config of a checkpoint with this config.json; None: not quantized."""
    for name, method in FILES.items():
        if (path / name).is_file():
            settings = read_json(path / name)
            check_types(settings, name)
            return settings if method is None else {"quant_method": method} | settings
    inside = config.get("quantization_config") or config.get("compression_config")
    if inside is not None and not isinstance(inside, Mapping):
        raise ValueError(
            f"config.json: quantization_config is {json_kind(inside)}, expected an object"
        )
    check_types(inside or {}, "config.json: quantization_config")
    return inside


def unquantized_config(config: Mapping[str, JSONLike]) -> dict[str, JSONLike]:
    """A config.json of the same model whose weights are not quantized."""
    names = ("quantization_config", "compression_config")
    return {name: value for name, value in config.items() if name not in names}


Request = str | Mapping[str, JSONLike] | None


def requested(wanted: Request) -> QuantizationConfig | None:
    """The config for `quantization=`: a name, {"scheme", "ignore"}, or a quantization_config."""
    if wanted is None:
        return None
    if isinstance(wanted, str):
        return online(wanted)
    if "quant_method" in wanted:
        return parse(wanted)
    unknown = sorted(set(wanted) - {"scheme", "ignore"})
    if unknown or "scheme" not in wanted:
        raise ValueError(
            f"quantization {dict(wanted)} is neither {{'scheme': name, 'ignore': [patterns]}} "
            "nor a "
            "quantization_config with its quant_method"
        )
    return online(str(wanted["scheme"]), checkpoints.names(wanted, "ignore"))


def decide(
    wanted: Request, path: Path, config: Mapping[str, JSONLike]
) -> QuantizationConfig | None:
    """How to load the checkpoint: as requested, by a file in its folder, or by config.json.

    Raises ValueError for a request to quantize a checkpoint that is already quantized.
    """
    stored = stored_config(path, config)
    if isinstance(wanted, str) and stored is not None and wanted == stored.get("quant_method"):
        wanted = None
    requested_config = requested(wanted)
    if requested_config is not None and requested_config.online and stored is not None:
        raise ValueError(
            f"{path} is already quantized ({stored.get('quant_method')}), so it cannot be "
            "quantized to "
            f"{requested_config.method}: omit `quantization`, or use the original checkpoint"
        )
    if requested_config is not None or stored is None:
        return requested_config
    try:
        return parse(stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
