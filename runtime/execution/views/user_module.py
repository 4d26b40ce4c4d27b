"""A module that LLM was given: its owner calls it, trains it and updates its weights meanwhile."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

from atomc.errors import RunError
from atomc.runtime.execution.views.evaluation_mode import evaluation_mode
from atomc.stock.adapter import StockModel
from atomc.weights.snapshot import num_writes

# How the runtime calls a module; docs/compile.md has an example.
CALLED_AS = (
    "forward(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V], where the T tokens "
    "have no batch dimension, and each attention layer passes a handle (ops.kv_state) to "
    "ops.attention: docs/compile.md has an example"
)


def check_forward(module: nn.Module) -> None:
    """Raises ValueError for a module of the user's that the runtime cannot call."""
    name = type(module).__name__
    if next(module.parameters(), None) is None:
        raise ValueError(f"{name} has no parameters; expected a language model with {CALLED_AS}")
    signature = inspect.signature(module.forward)
    try:
        signature.bind(None, None, None)
    except TypeError as error:
        raise ValueError(
            f"{name} has forward{signature}, which cannot be called with three tensors ({error}); "
            f"expected {CALLED_AS}"
        ) from None


def check_logits(module: nn.Module, logits: Tensor) -> None:
    """Raises ValueError unless these can be the logits [1, V] of a step of 2 tokens."""
    if logits.dim() != 2 or len(logits) != 1:
        raise ValueError(
            f"{type(module).__name__} returns a tensor {list(logits.shape)} in a step of 2 tokens "
            f"and 1 row of logits; expected {CALLED_AS}. Return the logits of the rows "
            "that logits_rows names, such as head(x[logits_rows])"
        )


class UserModule:
    """module: that is compiled; borrowed: it around a module of transformers. `remember` once it
    is compiled.
    """

    def __init__(self, module: nn.Module, borrowed: StockModel | None) -> None:
        self._module, self._borrowed = module, borrowed

    @contextmanager
    def traced(self) -> Iterator[None]:
        """In this context, where it is traced, it is in evaluation mode, and a module of
        transformers calls ops; elsewhere it computes as its class does, for its owner.
        """
        if self._borrowed is not None:
            self._borrowed.ours.set_in(self._borrowed.hf_model)
        try:
            with evaluation_mode(self._module):
                yield
        finally:
            if self._borrowed is not None:
                self._borrowed.own.set_in(self._borrowed.hf_model)

    def remember(self) -> None:
        self._parameters = list(self._module.parameters())
        self._writes = self._num_writes()

    def written(self) -> bool:
        """Whether parameters or buffers were written since the last call, by in-place operations.
        Raises RunError if the module has other parameters than `remember` found.
        """
        compiled_ids = set(map(id, self._parameters))
        for name, parameter in self._module.named_parameters():
            if id(parameter) not in compiled_ids:
                raise RunError(
                    f"{name} is another parameter than the one that was compiled "
                    "(load_state_dict(assign=True), an adapter): compile again"
                )
        before, self._writes = self._writes, self._num_writes()
        return before != self._writes

    def _num_writes(self) -> list[int]:
        """Of all, because no program reads the parameters of a vision encoder."""
        return list(map(num_writes, chain(self._module.parameters(), self._module.buffers())))
