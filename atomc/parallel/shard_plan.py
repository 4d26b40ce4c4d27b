"""The plan of a model: how each of its modules and parameters is divided over the ranks.

The words are those of transformers' plans (base_model_tp_plan). The class of a model of atomc has
SHARD: the last part of a name -> the word.

    colwise                 a linear layer by its outputs; so is a bare parameter by its first
                            dimension
    rowwise                 a linear layer by its inputs; the outputs of the ranks are summed
    packed_colwise          as colwise, each segment (gate and up; queries, keys and values) by
                            itself
    packed_rowwise          a weight [E, H, 2I]: its last dimension, each segment by itself
    colwise_gather_output   as colwise, and each rank gets the outputs of all
    rowwise_split_input     as rowwise, of an input that each rank has whole
    embedding_rowwise       an embedding by its vocabulary; the rows of the ranks are summed
    moe_tp_experts          experts, each by its width; the results of the ranks are summed
    grouped_gemm            stacked experts by expert
    ep_dispatch_experts     experts by expert; the results of the ranks are summed
    all_reduce              the results of a module are summed
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")
SUMMED = "all_reduce"
# Of a linear layer, an embedding or experts.
LAYERS = frozenset({"colwise", "rowwise", "packed_colwise", "packed_rowwise", "embedding_rowwise"})
LAYERS |= {*GATHERED, *SPLIT_INPUT, *EXPERTS, "grouped_gemm", SUMMED}
# What these name is whole on each rank, as its input and its output are.
WHOLE = frozenset({"embedding_colwise", "replicated_with_grad_allreduce", "replicate"})
# A router too: its ids are those of all experts, and the op that dispatches tokens divides them.
WHOLE |= {"mla_kv_a_proj", "local_params", "ep_router"}

ShardPlan = Mapping[str, str]


def plan_of(model: nn.Module, *, ep: bool = False) -> ShardPlan:
    """Name of a module or parameter -> how it is divided.

    ep  experts by expert, not each by its width

    Raises ValueError for a model without a plan, and for one with a word that is not supported.
    """
    hf_model: Any = getattr(model, "hf_model", model)
    if hasattr(hf_model, "tp_plan"):
        prefix = "" if hf_model is model else "hf_model."
        patterns = {prefix + name: how for name, how in _plan_of_transformers(hf_model, ep).items()}
        words = _match_pattern(model, patterns)
    else:
        words = _match_last_part(model, getattr(model, "SHARD", {}))
    if ep:
        words = _divide_by_expert(model, words)
    unknown = sorted({how for how in words.values() if how not in LAYERS | WHOLE})
    if unknown:
        raise ValueError(
            f"{type(hf_model).__name__}: its plan for tensor parallelism has "
            f"{', '.join(unknown)}, supported are {', '.join(sorted(LAYERS | WHOLE))}"
        )
    words = {name: how for name, how in words.items() if how not in WHOLE}
    if not any(how in ("rowwise", *SPLIT_INPUT, *EXPERTS) for how in words.values()):
        raise ValueError(
            f"{type(hf_model).__name__} does not define how it is divided over devices: it has "
            "neither a base_model_tp_plan nor SHARD"
        )
    return words


def _plan_of_transformers(hf_model: Any, ep: bool) -> ShardPlan:
    """The plan of a transformers class, whose names have * for numbers; with ep, that of its
    experts has precedence.
    """
    plan: ShardPlan = hf_model.tp_plan or {}
    if not ep:
        return plan
    # transformers 5.17 has no property for it.
    ep_plan = getattr(hf_model, "ep_plan", None) or getattr(hf_model, "_ep_plan", None) or {}
    return {**plan, **ep_plan}


def _names(model: nn.Module) -> list[str]:
    """Of all modules and parameters; a tied parameter has several names."""
    modules = [name for name, _ in model.named_modules() if name]
    return modules + [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _match_last_part(model: nn.Module, plan: ShardPlan) -> dict[str, str]:
    leaves = {name: name.rpartition(".")[2] for name in _names(model)}
    return {name: plan[leaf] for name, leaf in leaves.items() if leaf in plan}


def _match_pattern(model: nn.Module, plan: ShardPlan) -> dict[str, str]:
    """For a plan whose names have * for numbers."""
    patterns = {name: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in _names(model)}
    return {name: plan[pattern] for name, pattern in patterns.items() if pattern in plan}


def _divide_by_expert(model: nn.Module, plan: ShardPlan) -> dict[str, str]:
    """The plan with all experts divided by expert."""
    experts = {name for name, how in plan.items() if how in EXPERTS}
    if not experts:
        raise ValueError(f"{type(model).__name__} has no experts to divide over ranks (ep)")

    return without_parts(plan, experts) | dict.fromkeys(experts, "ep_dispatch_experts")


def without_parts(plan: ShardPlan, owners: Collection[str]) -> dict[str, str]:
    """The plan for all but the parts of these modules."""
    parts = tuple(f"{owner}." for owner in owners)
    return {name: how for name, how in plan.items() if not name.startswith(parts)}
