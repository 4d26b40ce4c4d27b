"""Python floats that Dynamo made 0-d inputs: which of them vary, and how they become constants."""

import contextlib
import types
import weakref
from collections.abc import Iterator, MutableMapping, Sequence

from torch import SymFloat
from torch._dynamo import config
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.source import AttrSource, LocalSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._guards import ChainedSource
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._sympy.symbol import SymT, symbol_is_type

from atomc.torch_compat.core import FakeTensorMode
from atomc.torch_compat.tracing import RestartAnalysis, compiled_code, source_name

# Function -> input -> its first value as a constant. torch.compile(dynamic=True) remembers none.
_constants: MutableMapping[types.CodeType, dict[str, float]] = weakref.WeakKeyDictionary()


def varies(placeholder: Node, value: float) -> bool:
    """Whether a float input differs between calls: it is an argument of the traced function or an
    item of one, or had another value before.

    Under dynamic=True, Dynamo makes every float an input, the eps of each norm, too; otherwise,
    those of which it saw another value.
    """
    source = getattr(placeholder, "_dynamo_source", None)
    code = compiled_code()
    if source is None or code is None:
        return False
    link = source
    while isinstance(link, ChainedSource) and not isinstance(link, AttrSource):
        link = link.base
    if config.assume_static_by_default or (isinstance(link, LocalSource) and link.is_input):
        return True
    return _constants.setdefault(code, {}).setdefault(str(source_name(placeholder)), value) != value


class TraceAgain(RestartAnalysis):
    """Has Dynamo trace again with constants, which it guards, in the place of float inputs.

    symbols  their names in Dynamo's graph
    """

    def __init__(self, placeholders: Sequence[Node]):
        super().__init__()
        self.symbols = set(map(_symbol, placeholders))
        TensorifyState.force_specializations.update(self.symbols)
        if _end_of_compile not in callback_handler.end_callbacks:
            callback_handler.register_end_callback(_end_of_compile)


def _end_of_compile(_: CallbackArgs) -> None:
    """Forget which floats are constants: Dynamo would apply it to all functions that have an
    argument of this name.
    """
    TensorifyState.clear()


def make_constants(placeholders: Sequence[Node]) -> None:
    """Guard the values of these float inputs. Raises TraceAgain unless Dynamo did trace again, and
    they are still inputs: operands of regions.
    """
    again = [node for node in placeholders if not TensorifyState.should_specialize(_symbol(node))]
    if again:
        raise TraceAgain(again)
    for node in placeholders:
        guard_scalar(_number(node))


def _number(placeholder: Node) -> SymFloat:
    number: SymFloat = placeholder.meta["example_value"].item_memo
    return number


def _symbol(placeholder: Node) -> str:
    return str(_number(placeholder).node._expr)


@contextlib.contextmanager
def floats_stay_inputs(mode: FakeTensorMode | None) -> Iterator[None]:
    """A context in which AOTAutograd does not have Dynamo make constants of float inputs that its
    own pass did not convert to tensors.
    """
    env = mode.shape_env if mode is not None else None
    symbols = env.backed_var_to_val if env is not None else ()
    names = {str(symbol) for symbol in symbols if symbol_is_type(symbol, SymT.FLOAT)}
    added = names - TensorifyState.force_specializations
    TensorifyState.force_specializations.update(added)
    try:
        yield
    except TraceAgain as again:
        added -= again.symbols
        raise
    finally:
        TensorifyState.force_specializations.difference_update(added)
