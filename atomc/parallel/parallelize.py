"""Tensor parallelism of a model in one's own program."""

from torch import nn
from torch.distributed import ProcessGroup

from atomc.parallel.group import TensorParallel
from atomc.parallel.sharding import Sharding, cut_parameters


def parallelize(
    model: nn.Module, tp: ProcessGroup | TensorParallel, *, ep: bool = False
) -> nn.Module:
    """Divide a model for inference over the processes of a group, in place, and return it.

    tp  the group of torch.distributed. All its processes call this with the same model
    ep  experts by expert, not each by its width

    Each process keeps its part of the parameters, and sums results with the others where the
    model's plan says so: base_model_tp_plan of transformers, or SHARD of a model of atomc. Heads of
    keys and values that are fewer than processes are held by several. Afterwards all processes call
    the model with the same inputs, and get the same outputs.

    Raises ValueError for a model without a plan, for sizes that do not divide, and for a model that
    is already divided.
    """
    place = tp if isinstance(tp, TensorParallel) else TensorParallel.of(tp)
    refuse_divided(model)
    if place.size == 1:
        return model
    sharding = Sharding.of(model, place, ep=ep)
    cut_parameters(model, sharding.cuts())
    sharding.resize()
    sharding.connect()
    return model


def refuse_divided(model: nn.Module) -> None:
    """Raise ValueError if the parameters of a model are parts of others already."""
    from torch.distributed.tensor import DTensor

    from atomc.parallel.collectives import SumOverRanks

    name = next((name for name, x in model.named_parameters() if isinstance(x, DTensor)), None)
    if name is not None:
        raise ValueError(
            f"{name} is a DTensor: the model is already divided (tp_plan of transformers or "
            "parallelize_module). Compile it as it is, or load it whole for atomc.parallelize"
        )
    for name, module in model.named_modules():
        if any(isinstance(hook, SumOverRanks) for hook in module._forward_hooks.values()):
            raise ValueError(f"{name} is already divided: atomc.parallelize was called before")
