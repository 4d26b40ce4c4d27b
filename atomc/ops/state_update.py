"""Ops with state per sequence: how the op that updates it takes their place in the runtime, and
what that costs.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atomc.ops.op import Op
from atomc.ops.op_cost import CostRule, OpCall, Work
from atomc.ops.op_traits import Arguments, StateBinding, StepFields
from atomc.ops.state import StateSpec

# The parameters of an updating op that are fields of a step.
STEP = ("query_start", "seq_lens", "state_slots")


def updated_by(
    update: Op,
    tokens: Callable[[Arguments], int | torch.SymInt],
    spec: Callable[[str, Arguments, torch.dtype | None], StateSpec],
) -> StateBinding:
    """The binding of an op with a handle `state`. update: has its other parameters, the tensor of
    the state, and STEP.
    """

    def form(arguments: Arguments, state: Mapping[str, Tensor], step: StepFields) -> Tensor:
        operands = {**arguments, **state, **{name: getattr(step, name) for name in STEP}}
        bound = update.signature.bind(**{x: operands.get(x) for x in update.signature.parameters})
        result: Tensor = update.overload(*bound.args, **bound.kwargs)
        return result

    return StateBinding(handle="state", tokens=tokens, spec=spec, form=form)


def replacing_state(work: CostRule) -> CostRule:
    """The cost of this work, for which each sequence also reads and replaces its states."""

    def rule(call: OpCall) -> Work:
        moved, operations = work(call)
        states = [call[name] for name in call.mutates]
        of_one = sum(math.prod(state.shape[1:]) * state.dtype.itemsize for state in states)
        return moved + 2 * call["state_slots"].shape[0] * of_one, operations

    return rule
