"""Heads of attention layers whose projections are divided: keys and values have fewer heads than
queries, maybe fewer than there are ranks.
"""

from torch import nn

from atomc.parallel.layers import is_linear
from atomc.parallel.process_group import TensorParallel
from atomc.parallel.shard_slice import ShardSlice

# Projections that give keys, by their names; the first two share theirs with groups of queries.
GROUPED = ("k_proj", "v_proj")
KEYS = ("k_proj", "kv_b_proj", "qkv_proj", "query_key_value")


def kv_cut(attention: nn.Module, place: TensorParallel, name: str) -> ShardSlice | None:
    """The rows of k_proj and v_proj that a rank holds: whole heads. With fewer heads than ranks,
    several ranks hold the same one. None if the number of heads is unknown.

    Raises ValueError if heads do not divide.
    """
    heads = num_kv_heads(attention)
    if heads is None:
        return None
    if heads % place.size == 0:
        return ShardSlice(0, place.size, place.rank)
    if place.size % heads == 0:
        return ShardSlice(0, heads, place.rank * heads // place.size)
    raise ValueError(
        f"{name}: {heads} heads of keys and values do not divide by {place.size}, nor the other "
        "way round"
    )


def num_kv_heads(attention: nn.Module) -> int | None:
    handle = attention._buffers.get("kv")
    if handle is not None and handle.dim() == 3:
        return handle.shape[1]
    keys, width = getattr(attention, "k_proj", None), getattr(attention, "head_dim", None)
    if isinstance(keys, nn.Module) and is_linear(keys) and isinstance(width, int) and width > 0:
        return int(getattr(keys, "out_features", 0)) // width
    return None


def resize_heads(attention: nn.Module, cut: ShardSlice) -> None:
    """Give an attention layer the state handle of this rank's keys and values, and latent attention
    their number, which no width of a projection to keys gives.

    cut  of the heads
    """
    handle = attention._buffers.get("kv")
    if handle is not None and handle.dim() == 3:
        heads = cut.size_of(handle.shape[1])
        smaller = handle.new_empty(0, heads, handle.shape[2])
        attention.register_buffer("kv", smaller, persistent=False)
    number = vars(attention).get("num_heads")
    if "kv_b_proj" in attention._modules and isinstance(number, int):
        vars(attention)["num_heads"] = cut.size_of(number)


def resize_groups(attention: nn.Module, parts: int, size: int) -> None:
    """Update how many heads of queries share one of keys, when the first divide into `size` parts
    and the second into `parts`.
    """
    groups = getattr(attention, "num_key_value_groups", None)
    if isinstance(groups, int):
        vars(attention)["num_key_value_groups"] = max(1, groups * parts // size)
