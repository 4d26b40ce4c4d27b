"""Tensor parallelism of a model in one's own program."""

from torch import nn
from torch.distributed import ProcessGroup

from atomc.parallel.process_group import TensorParallel
from atomc.parallel.sharding import Sharding, refuse_divided


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

    Raises ValueError for a model without a plan, for sizes that do not divide, for fewer heads of
    keys than processes if layers share keys (Gemma 3n and 4), and for a model that is already
    divided.
    """
    place = tp if isinstance(tp, TensorParallel) else TensorParallel.of(tp)
    refuse_divided(model)
    if place.size == 1:
        return model
    sharding = Sharding.of(model, place, ep=ep)
    _refuse_shared_keys(sharding)
    sharding.cut()
    sharding.connect()
    return model


def _refuse_shared_keys(sharding: Sharding) -> None:
    """Raise ValueError for a layer that reads the keys of another, if ranks outnumber these: how
    many heads of queries share one of keys would be updated only where the keys are made.
    """
    few = [cut.parts for cut in sharding.keys.values() if cut.parts < sharding.place.size]
    queries = [
        name.removesuffix(".q_proj") for name in sharding.linears if name.endswith(".q_proj")
    ]
    shared = (
        name
        for name in queries
        if name not in sharding.keys
        and hasattr(sharding.model.get_submodule(name), "num_key_value_groups")
    )
    owner = next(shared, None)
    if few and owner is not None:
        raise ValueError(
            f"{owner} reads the keys and values of another layer, of {min(few)} heads, and there "
            f"are {sharding.place.size} ranks: use at most {min(few)}"
        )
