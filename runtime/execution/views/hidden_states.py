"""A model that also returns the hidden states of some of its layers, with the same weights."""

import copy
from collections.abc import Sequence

from torch import Tensor, nn


class WithHiddenStates(nn.Module):
    """module(input_ids, positions, logits_rows, *images) -> logits [R, V], and the results [T, D]
    of the submodules with these names, in the order in which they run.

    Shares the parameters of `module`, which is not changed. Raises AttributeError for a name that
    is no submodule.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.module = module
        for name in names:
            self.module = _recorded(self.module, name, self.found)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, *images: Tensor
    ) -> tuple[Tensor, ...]:
        logits: Tensor = self.module(input_ids, positions, logits_rows, *images)
        states = tuple(self.found)
        self.found.clear()
        return logits, *states


class _Recorder(nn.Module):
    """Calls a module and appends the result to a list."""

    def __init__(self, module: nn.Module, found: list[Tensor]) -> None:
        super().__init__()
        self.module, self.found = module, found

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        out: Tensor = self.module(x, *others)
        self.found.append(out)
        return out


def _recorded(module: nn.Module, path: str, found: list[Tensor]) -> nn.Module:
    """Shallow copies of the modules on the path, with a recorder around the last one."""
    name, _, rest = path.partition(".")
    child = module.get_submodule(name)
    twin = copy.copy(module)
    made = _recorded(child, rest, found) if rest else _Recorder(child, found)
    twin._modules = {**module._modules, name: made}
    return twin
