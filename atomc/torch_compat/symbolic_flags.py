"""`F.scaled_dot_product_attention(..., is_causal=T > 1)` of a dynamic size T, in Dynamo.

torch's function takes no symbolic truth value, so Dynamo ends the graph there in each layer. As for
`if T > 1`, the value is decided by the sizes of the call, with a guard where their ranges do not.
"""

from typing import Any

import torch.nn.functional as F
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, TorchInGraphFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import SymNodeVariable

_IS_CAUSAL = 5  # the number of the argument


def decide_symbolic_flags() -> None:
    """Have Dynamo decide `is_causal`, unless a newer torch handles the function itself."""
    handlers = TorchInGraphFunctionVariable._get_handlers()
    handlers.setdefault(F.scaled_dot_product_attention, _with_constant_flag)


def _with_constant_flag(
    function: TorchInGraphFunctionVariable,
    tx: InstructionTranslatorBase,
    *args: VariableTracker,
    **kwargs: VariableTracker,
) -> VariableTracker | None:
    """The call with a constant as is_causal; None where it is one."""
    flags: list[Any] = [kwargs.get("is_causal"), *args[_IS_CAUSAL : _IS_CAUSAL + 1]]
    symbolic = next((flag for flag in flags if isinstance(flag, SymNodeVariable)), None)
    if symbolic is None:
        return None
    constant = ConstantVariable.create(bool(symbolic.evaluate_expr(tx.output)))
    decided = [constant if arg is symbolic else arg for arg in args]
    named = {name: constant if arg is symbolic else arg for name, arg in kwargs.items()}
    return function.call_function(tx, decided, named)
