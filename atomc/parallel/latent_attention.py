"""Multi-head latent attention of classes whose plan leaves it whole (DeepSeek-V3, A.X K1, Youtu):
the words by which it is divided by heads, which are those of DeepSeek-V2's plan.

The projections to the latents and their norms are whole, and so is the cache of the latents, which
all heads share.
"""

import logging
from collections.abc import Mapping

from torch import nn

from atomc.parallel.layers import is_linear
from atomc.parallel.shard_plan import ShardPlan

log = logging.getLogger("atomc")

# What gives the queries of all heads; the second from a latent.
QUERIES = ("q_proj", "q_b_proj")
LATENT = ("kv_a_proj_with_mqa", "kv_a_layernorm")
KEYS_AND_VALUES, OUT = "kv_b_proj", "o_proj"
DIVIDED = dict.fromkeys((*QUERIES, KEYS_AND_VALUES), "colwise") | {OUT: "rowwise"}
WHOLE = frozenset({*LATENT, "q_a_proj", "q_a_layernorm"})


def words_of(modules: Mapping[str, nn.Module], plan: ShardPlan) -> dict[str, str]:
    """Name of a projection -> how it is divided, of latent attention that no plan divides.

    modules  by their names in the model

    Layers that have more parameters than latent attention stay whole, with a line in the log: they
    may belong to heads.
    """
    owners = {name.rpartition(".")[0] for name in plan}
    words: dict[str, str] = {}
    undivided: dict[str, list[str]] = {}
    for name, module in modules.items():
        if name in owners or not is_latent_attention(module):
            continue
        if others := ", ".join(_others(module)):
            undivided.setdefault(others, []).append(name)
            continue
        parts = (part for part in DIVIDED if module._modules.get(part) is not None)
        words |= {f"{name}.{part}": DIVIDED[part] for part in parts}
    for others, names in undivided.items():
        log.warning(
            "%s stays whole on each rank: beside latent attention it has %s, which may belong to "
            "heads (%d such layers)",
            names[0],
            others,
            len(names),
        )
    return words


def is_latent_attention(module: nn.Module) -> bool:
    parts = {name for name, part in module._modules.items() if part is not None}
    if not parts >= {*LATENT, KEYS_AND_VALUES, OUT} or len(parts & {*QUERIES}) != 1:
        return False
    return all(is_linear(module.get_submodule(name)) for name in parts & DIVIDED.keys())


def _others(module: nn.Module) -> list[str]:
    """The first parts of names of parameters that latent attention does not have."""
    expected = WHOLE | DIVIDED.keys()
    names = (name.partition(".")[0] for name, _ in module.named_parameters())
    return sorted({name for name in names if name not in expected})
