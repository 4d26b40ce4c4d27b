"""Reads fields of config.json. Raises ValueError for a missing, mistyped or unsupported field.

`hf` is config.json as a dict, with names and values of Hugging Face.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Self

from atomc.files.json_types import JSONMapping

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LARGEST = 3.4e38  # the largest fp32 number: norms and rotary positions are computed in fp32


def model_type(hf: JSONMapping) -> str:
    return str(hf.get("model_type") or "model")


def text_config(hf: JSONMapping) -> JSONMapping:
    """The fields of the text model, which a model with images has in `text_config`."""
    nested = hf.get("text_config")
    if nested is None:
        return hf
    if not isinstance(nested, dict):
        raise ValueError(f"{model_type(hf)}: text_config {nested!r:.40} is not an object")
    return {"tie_word_embeddings": hf.get("tie_word_embeddings"), **nested}


def integer(hf: JSONMapping, name: str, default: int | None = None) -> int:
    """A positive integer; null counts as missing."""
    value = hf.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{model_type(hf)}: config.json lacks {name!r}, a positive integer")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is not a positive integer")
    return value


def number(hf: JSONMapping, name: str, default: float | None = None) -> float:
    """A positive number of fp32; null counts as missing."""
    value = hf.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{model_type(hf)}: config.json lacks {name!r}, a positive number")
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is not a positive number of fp32")
    return float(value)


def count(hf: JSONMapping, name: str, default: int) -> int:
    """An integer of at least 0; null counts as missing."""
    return 0 if hf.get(name) == 0 else integer(hf, name, default)


def flag(hf: JSONMapping, name: str, default: bool = False) -> bool:
    """true or false; null counts as missing."""
    value = hf.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is neither true nor false")
    return default if value is None else value


# Type of a field -> what reads it.
READERS: Mapping[object, Callable[..., object]] = {int: integer, float: number, bool: flag}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields of every decoder, named as in config.json. A model's Config adds its own; defaults
    are those of a config.json without the field.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: JSONMapping
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, hf: JSONMapping, **computed: object) -> Self:
        """A config with these computed fields; each other field is read by its type.

        Raises ValueError for a missing or mistyped field.
        """
        stored = {
            field.name: READERS[field.type](
                hf, field.name, *([] if field.default is MISSING else [field.default])
            )
            for field in fields(cls)
            if field.name not in computed
        }
        create: Callable[..., Self] = cls
        return create(**stored, **computed)

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        """Raises ValueError for a missing field or an unsupported value."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(DecoderConfig):
    """A decoder with grouped-query attention."""

    num_key_value_heads: int
    head_dim: int


def only(hf: JSONMapping, name: str, *supported: object) -> None:
    """Raise ValueError for an unsupported value; a missing field or null is allowed."""
    value = hf.get(name)
    if value is not None and value not in supported:
        raise ValueError(
            f"{model_type(hf)}: {name} {value!r:.60} is not supported, only "
            f"{' or '.join(map(repr, supported))}"
        )


def head_counts(hf: JSONMapping) -> tuple[int, int]:
    """(num_attention_heads, num_key_value_heads); the second defaults to the first."""
    heads = integer(hf, "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"{model_type(hf)}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads


def head_fields(hf: JSONMapping, default: int | None = None) -> dict[str, int]:
    """The heads of an AttentionConfig. default: as in head_width."""
    _, kv_heads = head_counts(hf)
    return {"num_key_value_heads": kv_heads, "head_dim": head_width(hf, default)}


def expert_counts(hf: JSONMapping) -> tuple[int, int]:
    """The number of experts, and how many of them each token goes through (num_experts_per_tok)."""
    name = next((name for name in NUM_EXPERTS if hf.get(name) is not None), NUM_EXPERTS[0])
    experts, per_token = integer(hf, name), integer(hf, "num_experts_per_tok")
    if per_token > experts:
        raise ValueError(
            f"{model_type(hf)}: num_experts_per_tok {per_token} is more than {name} {experts}"
        )
    return experts, per_token


def expert_fields(hf: JSONMapping) -> dict[str, int]:
    """expert_counts as fields of a Config."""
    experts, per_token = expert_counts(hf)
    return {"num_experts": experts, "num_experts_per_tok": per_token}


def expert_groups(hf: JSONMapping) -> tuple[int, int]:
    """n_group and topk_group: experts are chosen from this many of so many groups."""
    groups, topk_groups = integer(hf, "n_group", 1), integer(hf, "topk_group", 1)
    experts, per_token = expert_counts(hf)
    if experts % groups or topk_groups > groups or per_token > topk_groups * (experts // groups):
        raise ValueError(
            f"{model_type(hf)}: {per_token} of {experts} experts cannot be chosen from topk_group "
            f"{topk_groups} of n_group {groups} groups"
        )
    return groups, topk_groups


def head_width(hf: JSONMapping, default: int | None = None) -> int:
    """head_dim, else the default, else hidden_size / num_attention_heads. Must be even: rotary
    positions pair columns.
    """
    width, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    if hf.get("head_dim") is None and default is None and width % heads:
        raise ValueError(
            f"{model_type(hf)}: hidden_size {width} is not a multiple of num_attention_heads "
            f"{heads}, and config.json has no head_dim"
        )
    head_dim = integer(hf, "head_dim", default or width // heads)
    if head_dim % 2:
        raise ValueError(
            f"{model_type(hf)}: head_dim {head_dim} is odd, rotary positions need pairs of columns"
        )
    return head_dim


def layer_types(
    hf: JSONMapping,
    default: Sequence[str],
    kinds: Sequence[str] = ("full_attention", "sliding_attention"),
    name: str = "layer_types",
) -> tuple[str, ...]:
    """One of the kinds per layer; without the field: default."""
    num_layers, stored = integer(hf, "num_hidden_layers"), hf.get(name) or list(default)
    types = [kind for kind in stored if kind in kinds] if isinstance(stored, list) else []
    if not isinstance(stored, list) or not len(stored) == len(types) == num_layers:
        raise ValueError(
            f"{model_type(hf)}: {name} {stored!r:.100} are not {num_layers} of "
            f"{' or '.join(map(repr, kinds))}"
        )
    return tuple(map(str, types))
