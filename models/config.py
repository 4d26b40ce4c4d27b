"""Reads fields of config.json. Raises ValueError for a missing, mistyped or unsupported field.

`hf` is config.json as a dict, with names and values of Hugging Face.
"""

from collections.abc import Mapping

from atomc.json_types import JSONLike

LARGEST = 3.4e38  # the largest fp32 number: norms and rotary positions are computed in fp32


def model_type(hf: Mapping[str, JSONLike]) -> str:
    return str(hf.get("model_type") or "model")


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


def flag(hf: Mapping[str, JSONLike], name: str) -> bool:
    """true or false; a missing field or null is false."""
    value = hf.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"{model_type(hf)}: {name} {value!r:.40} is neither true nor false")
    return bool(value)


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
