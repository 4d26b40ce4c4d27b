"""Reads LoRA adapters as peft saves them: adapter_config.json and adapter_model.safetensors."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from safetensors import SafetensorError, safe_open

from atomc.files.json_file import read_json
from atomc.loading.limits import check_headers
from atomc.weights.lora import LoraPair

CONFIG, WEIGHTS, PICKLED = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
MAX_TENSORS = 2**15  # two for each linear layer
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")

# Fields of the config that change the computation, with the values that do not, and the reason.
_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "DoRA scales the columns of the model's own weights"),
    "bias": (("none", None), "biases of the model would differ by request"),
    "lora_bias": ((False, None), "biases of adapters are not supported"),
    "modules_to_save": ((None, []), "whole layers would differ by request"),
    "fan_in_fan_out": ((False, None), "weights of linear layers are not transposed here"),
    "alpha_pattern": ((None, {}), "all layers have one lora_alpha"),
    "layer_replication": ((None, []), "the model's layers are those of its checkpoint"),
    "trainable_token_indices": ((None, []), "embeddings would differ by request"),
    "target_parameters": ((None, []), "only linear layers have adapters"),
    # The others subtract what they begin with from the model's weights: PiSSA, OLoRA, CorDA, LoftQ.
    "init_lora_weights": (
        (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
        "it belongs to other weights of the model",
    ),
    "alora_invocation_tokens": ((None, []), "an adapter is used from the first token on"),
}


class AdapterConfig(NamedTuple):
    """What adapter_config.json says. targets: last names of modules; () if they are not listed."""

    folder: Path
    rank: int
    alpha: float
    rslora: bool
    targets: tuple[str, ...]

    def scale(self, rank: int) -> float:
        """The factor of B @ A for a layer of this rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


def read_config(folder: str) -> AdapterConfig:
    """Raises ValueError for a folder without an adapter, and for one that is not supported. No
    message has the path: clients of a server may read it.
    """
    path = Path(folder).expanduser()
    if not (path / CONFIG).is_file():
        raise ValueError(f"its folder has no {CONFIG}: expected one that peft saved")
    if not (path / WEIGHTS).is_file():
        weights = (
            f"{PICKLED}, a pickle, which can run code" if (path / PICKLED).exists() else "none"
        )
        raise ValueError(
            f"its folder has no {WEIGHTS} (weights there: {weights}): save the adapter with "
            "save_pretrained(safe_serialization=True)"
        )
    try:
        config = read_json(path / CONFIG)
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG} cannot be read, expected an object in JSON") from error
    return _checked(path, config)


def _checked(path: Path, config: Mapping[str, Any]) -> AdapterConfig:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{CONFIG}: peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    for name, (fine, why) in _UNSUPPORTED.items():
        if config.get(name) not in fine:
            raise ValueError(
                f"{CONFIG}: {name} is {config[name]!r}, which is not supported ({why}); merge the "
                "adapter with peft's merge_and_unload"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not _is_rank(rank):
        raise ValueError(f"{CONFIG}: r is {rank!r:.40}, expected a positive number")
    if not _is_finite(alpha):
        raise ValueError(f"{CONFIG}: lora_alpha is {alpha!r:.40}, expected a number")
    pattern, targets = config.get("rank_pattern") or {}, config.get("target_modules")
    if not isinstance(pattern, dict) or not all(map(_is_rank, pattern.values())):
        raise ValueError(
            f"{CONFIG}: rank_pattern is {pattern!r:.200}, expected an object of names of layers "
            "with positive numbers"
        )
    ranks = [rank, *pattern.values()]
    names = targets if isinstance(targets, list) else []
    last = dict.fromkeys(str(name).rpartition(".")[2] for name in names)
    return AdapterConfig(
        path, max(ranks), float(alpha), bool(config.get("use_rslora")), tuple(last)
    )


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: object) -> TypeGuard[float]:
    """Whether a value of JSON is a number that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_pairs(config: AdapterConfig) -> dict[str, LoraPair]:
    """The adapter's products by module path. Raises ValueError for a file that is damaged, and for
    tensors that are not LoRA pairs.
    """
    pairs: dict[str, dict[str, Any]] = {}
    try:
        check_headers([config.folder / WEIGHTS], MAX_TENSORS)
        with safe_open(config.folder / WEIGHTS, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  it is not a dict
                match = _KEY.fullmatch(key)
                if match is None:
                    raise ValueError(
                        f"{WEIGHTS}: tensor {key!r} is not supported, expected names such as "
                        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
                    )
                pairs.setdefault(match[1], {})[match[2]] = tensors.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} is damaged, or cannot be read") from error
    return {path: _pair(path, pair, config) for path, pair in pairs.items()}


def _pair(path: str, pair: Mapping[str, Any], config: AdapterConfig) -> LoraPair:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None:
        raise ValueError(f"{WEIGHTS}: {path} has no lora_{'A' if a is None else 'B'}")
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise ValueError(
            f"{WEIGHTS}: {path} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected "
            "[r, K] and [N, r], with a rank r of at least 1"
        )
    if not (a.is_floating_point() and b.is_floating_point()):
        raise ValueError(
            f"{WEIGHTS}: {path} has lora_A in {a.dtype} and lora_B in {b.dtype}, expected floating "
            "point"
        )
    return LoraPair(a, b, config.scale(a.shape[0]))
