"""A model that also returns the hidden states of some of its layers, with the same weights."""

from collections.abc import Sequence

from torch import Tensor, nn

from atomc.runtime.execution.views.headless_model import replaced


class WithHiddenStates(nn.Module):
    """module(input_ids, positions, logits_rows, *images) -> logits [R, V], and the results [T, D]
    of the submodules with these names, in the order in which they run.

    Shares the parameters of `module`, which is not changed. Raises AttributeError for a name that
    is no submodule.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self.module = module
        for name in names:
            recorder = _Recorder(self.module.get_submodule(name), self.states)
            self.module = replaced(self.module, name, recorder)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, *images: Tensor
    ) -> tuple[Tensor, ...]:
        logits: Tensor = self.module(input_ids, positions, logits_rows, *images)
        states = tuple(self.states)
        self.states.clear()
        return logits, *states


class _Recorder(nn.Module):
    """Calls a module and appends the result to a list."""

    def __init__(self, module: nn.Module, states: list[Tensor]) -> None:
        super().__init__()
        self.module, self.states = module, states

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        out: Tensor = self.module(x, *others)
        self.states.append(out)
        return out
