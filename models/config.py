"""Reads fields of config.json. Raises ValueError for a missing, mistyped or unsupported field.

`hf` is config.json as a dict, with names and values of Hugging Face.
"""

from collections.abc import Mapping, Sequence

from atomc.files.json_types import JSONLike

NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LARGEST = 3.4e38  # the largest fp32 number: norms and rotary positions are computed in fp32


def model_type(hf: Mapping[str, JSONLike]) -> str:
    return str(hf.get("model_type") or "model")


def text_config(hf: Mapping[str, JSONLike]) -> Mapping[str, JSONLike]:
    """The fields of the text model, which a model with images has in `text_config`."""
    nested = hf.get("text_config")
    if nested is None:
        return hf
    if not isinstance(nested, dict):
        raise ValueError(f"{model_type(hf)}: text_config {nested!r:.40} is not an object")
    return {"tie_word_embeddings": hf.get("tie_word_embeddings"), **nested}


def integer(hf: Mapping[str, JSONLike], name: str, default: int | None = None) -> int:
    """A positive integer; null counts as missing."""
    value = hf.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{model_type(hf)}: config.json lacks {name!r}, a positive integer")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is not a positive integer")
    return value


def number(hf: Mapping[str, JSONLike], name: str, default: float | None = None) -> float:
    """A positive number of fp32; null counts as missing."""
    value = hf.get(name)
    if value is None:
        if default is None:
            raise ValueError(f"{model_type(hf)}: config.json lacks {name!r}, a positive number")
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= LARGEST:
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is not a positive number of fp32")
    return float(value)


def count(hf: Mapping[str, JSONLike], name: str, default: int) -> int:
    """An integer of at least 0; null counts as missing."""
    return 0 if hf.get(name) == 0 else integer(hf, name, default)


def flag(hf: Mapping[str, JSONLike], name: str, default: bool = False) -> bool:
    """true or false; null counts as missing."""
    value = hf.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is neither true nor false")
    return default if value is None else value


def only(hf: Mapping[str, JSONLike], name: str, *supported: object) -> None:
    """Raise ValueError if the field has a value that is not supported; a missing field or null is
    allowed.
    """
    value = hf.get(name)
    if value is not None and value not in supported:
        raise ValueError(
            f"{model_type(hf)}: {name} {value!r:.60} is not supported, only "
            f"{' or '.join(map(repr, supported))}"
        )


def head_counts(hf: Mapping[str, JSONLike]) -> tuple[int, int]:
    """(num_attention_heads, num_key_value_heads); the second defaults to the first."""
    heads = integer(hf, "num_attention_heads")
    kv_heads = integer(hf, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"{model_type(hf)}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads


def expert_counts(hf: Mapping[str, JSONLike]) -> tuple[int, int]:
    """The number of experts, and how many of them each token goes through (num_experts_per_tok)."""
    name = next((name for name in NUM_EXPERTS if hf.get(name) is not None), NUM_EXPERTS[0])
    experts, chosen = integer(hf, name), integer(hf, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(
            f"{model_type(hf)}: num_experts_per_tok {chosen} is more than {name} {experts}"
        )
    return experts, chosen


def expert_groups(hf: Mapping[str, JSONLike]) -> tuple[int, int]:
    """n_group and topk_group: experts are chosen from this many of so many groups."""
    groups, topk_groups = integer(hf, "n_group", 1), integer(hf, "topk_group", 1)
    experts, chosen = expert_counts(hf)
    if experts % groups or topk_groups > groups or chosen > topk_groups * (experts // groups):
        raise ValueError(
            f"{model_type(hf)}: {chosen} of {experts} experts cannot be chosen from topk_group "
            f"{topk_groups} of n_group {groups} groups"
        )
    return groups, topk_groups


def head_width(hf: Mapping[str, JSONLike], default: int | None = None) -> int:
    """head_dim, else the default, else hidden_size / num_attention_heads. Must be even: rotary
    positions pair columns.
    """
    width, heads = integer(hf, "hidden_size"), integer(hf, "num_attention_heads")
    if hf.get("head_dim") is None and default is None and width % heads:
        raise ValueError(
            f"{model_type(hf)}: hidden_size {width} is not a multiple of num_attention_heads "
            f"{heads}, "
            "and config.json has no head_dim"
        )
    head_dim = integer(hf, "head_dim", default or width // heads)
    if head_dim % 2:
        raise ValueError(
            f"{model_type(hf)}: head_dim {head_dim} is odd, rotary positions need pairs of columns"
        )
    return head_dim


def layer_types(hf: Mapping[str, JSONLike], default: Sequence[str]) -> tuple[str, ...]:
    """ "full_attention" or "sliding_attention" per layer; without the field: default."""
    num_layers, given = integer(hf, "num_hidden_layers"), hf.get("layer_types") or list(default)
    known = ("full_attention", "sliding_attention")
    types = [kind for kind in given if kind in known] if isinstance(given, list) else []
    if not isinstance(given, list) or not len(given) == len(types) == num_layers:
        raise ValueError(
            f"{model_type(hf)}: layer_types {given!r:.100} are not {num_layers} of "
            "'full_attention' or 'sliding_attention'"
        )
    return tuple(types)
