"""Gated delta nets of a rank: some of the key heads, each with its value heads, and their state.

A plan of transformers gathers the results of each projection and leaves the heads whole: it is not
read for these layers.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from atomc.parallel.process_group import TensorParallel
from atomc.parallel.shard_slice import ShardSlice
from atomc.stock.delta_net import spelling_of

# Projections to queries, keys and values of all heads, one after the other. In all others, what
# belongs to a head is together.
IN_SEGMENTS = frozenset({"in_proj_qkv", "conv1d"})
# Attributes with numbers of heads and of their columns.
SIZES = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")
OF_CONVOLUTION = ("in_channels", "out_channels", "groups")


def words_of(net: nn.Module) -> Mapping[str, str]:
    """Name of a projection or parameter of a gated delta net -> how it is divided, in the words of
    a plan. Its norm is whole.
    """
    *projections, _norm, last = spelling_of(net) or ()
    convolution = (f"conv1d.{leaf}" for leaf, _ in net.get_submodule("conv1d").named_parameters())
    names = [*projections, "A_log", "dt_bias", *convolution]
    words = {name: "packed_colwise" if _has_segments(name) else "colwise" for name in names}
    return words | {last: "rowwise"}


def cut_of(net: Any, name: str, place: TensorParallel) -> ShardSlice:
    """How a projection or parameter of words_of is cut."""
    segments = (net.key_dim, net.key_dim, net.value_dim) if _has_segments(name) else (1,)
    return ShardSlice(0, place.size, place.rank, segments)


def check(net: Any, place: TensorParallel, name: str) -> None:
    """Raise ValueError if the heads of a gated delta net do not divide.

    name  of the layer
    """
    heads = net.key_dim // net.head_k_dim
    if heads % place.size:
        works = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(
            f"{name}: {heads:,} key heads do not divide by {place.size}; what divides them is "
            f"{', '.join(works)}"
        )


def resize(net: nn.Module, size: int) -> None:
    """Give a gated delta net the sizes and state handles of its part."""
    for module, names in ((net, SIZES), (net.get_submodule("conv1d"), OF_CONVOLUTION)):
        for name in names:
            if isinstance(number := vars(module).get(name), int):
                setattr(module, name, number // size)
    convolved, recurrent = (net._buffers.get(name) for name in ("conv_state", "delta_state"))
    if convolved is not None:
        _, taps, channels = convolved.shape
        smaller = convolved.new_empty(0, taps, channels // size)
        net.register_buffer("conv_state", smaller, persistent=False)
    if recurrent is not None:
        _, heads, *head = recurrent.shape
        smaller = recurrent.new_empty(0, heads // size, *head)
        net.register_buffer("delta_state", smaller, persistent=False)


def _has_segments(name: str) -> bool:
    return name.partition(".")[0] in IN_SEGMENTS
