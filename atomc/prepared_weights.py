"""What kernels prepare from weights before the first step, such as another layout: tensors that must follow the weights.

They belong to their parameters, as a pack does: every graph that wants the same shares them, and they go with them.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from atomc import weights
from atomc.op import Prepared
from atomc.torch_compat.names import outside_of_tracing
from atomc.weight_snapshot import Snapshot
from atomc.weights import PreparedWeight, location_of

Prepare = Callable[..., Prepared]


def unfit(weight: Any) -> str | None:
    """Why no copy of this can be kept, or None."""
    if not isinstance(weight, nn.Parameter):
        return "it is no parameter, and may be another tensor at each call"
    if weight.is_inference():
        return "it was made in inference mode, where torch counts no writes"
    return None


def prepared(
    parameters: Sequence[nn.Parameter], given: Sequence[Tensor | None], prepare: Prepare
) -> tuple[PreparedWeight, bool]:
    """What `prepare` makes of the given tensors, and whether it is new in the place of something outdated.

    parameters  those that the tensors are, or are packed from
    """
    with weights.lock, outside_of_tracing():
        key = (prepare, *map(id, parameters))
        known = location_of(parameters[0]).prepared.get(key)
        if known is not None and known.is_of(parameters):
            return known, False
        snapshot = Snapshot(parameters)
        made = prepare(*given)
        entry = PreparedWeight(list(map(weakref.ref, parameters)), snapshot, made.tensors, made.replaces)
        weights.keep(key, entry)
        return entry, known is not None
