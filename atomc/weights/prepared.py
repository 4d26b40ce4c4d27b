"""Prepared weights: what kernels compute from weights before the first step, as another layout.

Parameters own them, as they own packed weights: all graphs share one copy, which is freed with the
parameters. They are computed again when the parameters change.
"""

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from atomc.ops.op import Attribute, Prepared
from atomc.torch_compat.core import Input, outside_of_tracing
from atomc.weights import registry as weights
from atomc.weights.registry import PreparedWeight, location_of
from atomc.weights.snapshot import Snapshot

Prepare = Callable[..., Prepared]
Attributes = tuple[tuple[str, Attribute], ...]


def unpreparable(weight: Input) -> str | None:
    """Why no prepared copy of this can be kept, or None."""
    if not isinstance(weight, nn.Parameter):
        return "it is not a parameter, and may be a different tensor at each call"
    if weight.is_inference():
        return "it was created in inference mode, where torch does not count writes"
    return None


def prepared_weight(
    parameters: Sequence[nn.Parameter],
    tensors: Sequence[Tensor | None],
    prepare: Prepare,
    attributes: Attributes = (),
) -> tuple[PreparedWeight, bool]:
    """(the result of `prepare` on the given tensors, whether it replaces an outdated one).

    parameters  the parameters that the tensors are, or are packed from
    attributes  (name, value) of those that it takes as well
    """
    with weights.lock, outside_of_tracing():
        key = (prepare, attributes, *map(id, parameters))
        existing = location_of(parameters[0]).prepared.get(key)
        if existing is not None and existing.is_current_for(parameters):
            return existing, False
        weights.check_not_freed(parameters)
        snapshot = Snapshot(parameters)
        result = prepare(*tensors, **dict(attributes))
        entry = PreparedWeight(
            prepare, list(map(weakref.ref, parameters)), snapshot, result.tensors
        )
        weights.register_prepared(key, entry)
        return entry, existing is not None
