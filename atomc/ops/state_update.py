"""Ops with state: how ops on its tensors take their place in the runtime, and what an update of
state per sequence costs.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from atomc.ops.op import Op
from atomc.ops.op_cost import CostRule, OpCall, Work
from atomc.ops.op_traits import Arguments, StateBinding, StepFields
from atomc.ops.state import StateSpec

# The parameters of an updating op that are fields of a step.
STEP = ("query_start", "seq_lens", "state_slots")


def call_on_state(
    op: Op,
    arguments: Arguments,
    state: Mapping[str, Tensor],
    step: StepFields,
    **others: Tensor | None,
) -> Tensor:
    """A call of this op with those of the arguments, the tensors of the state and of the step, and
    the others, that it takes; None for an absent one without a default.
    """
    operands, values = {**arguments, **state, **others}, {}
    for name, parameter in op.signature.parameters.items():
        if name in StepFields.__annotations__ and name not in others:
            values[name] = getattr(step, name)
        elif name in operands or parameter.default is parameter.empty:
            values[name] = operands.get(name)
    bound = op.signature.bind(**values)
    result: Tensor = op.overload(*bound.args, **bound.kwargs)
    return result


def updated_by(
    update: Op,
    tokens: Callable[[Arguments], int | torch.SymInt],
    spec: Callable[[str, Arguments, torch.dtype | None], StateSpec],
) -> StateBinding:
    """The binding of an op with a handle `state`. update: has its other parameters, the tensor of
    the state, and STEP.
    """
    form = partial(call_on_state, update)
    return StateBinding(handle="state", tokens=tokens, spec=spec, form=form)


def replacing_state(work: CostRule) -> CostRule:
    """The cost of this work, for which each sequence also reads and replaces its states."""

    def rule(call: OpCall) -> Work:
        moved, operations = work(call)
        states = [call[name] for name in call.mutates]
        of_one = sum(math.prod(state.shape[1:]) * state.dtype.itemsize for state in states)
        return moved + 2 * call["state_slots"].shape[0] * of_one, operations

    return rule
