"""A model that also returns the hidden states of some of its layers, with the same weights."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from atomc.parallel.stages import OtherStage, StandIn, frame_of
from atomc.runtime.execution.views.headless_model import replaced


def eagle3_layers(model: nn.Module) -> tuple[int, int, int]:
    """The decoder layers whose inputs EAGLE-3 (Li et al. 2025) reads unless a checkpoint names
    others: an early one, the middle one, and a late one. Raises ValueError as `layer_inputs`.
    """
    count = frame_of(model).num_layers
    return 2, count // 2, count - 3


def layer_inputs(model: nn.Module, layers: Sequence[int]) -> tuple[str, ...]:
    """The submodules whose results are the inputs of these decoder layers, for WithHiddenStates:
    what output_hidden_states of transformers has at these indices, with the residual stream added.

    Raises ValueError for a model whose layers are not known, and for a number that is below 1 or
    not of a layer.
    """
    frame = frame_of(model)
    if wrong := [layer for layer in layers if not 0 < layer < frame.num_layers]:
        raise ValueError(
            f"hidden states of layers {', '.join(map(str, wrong))}: the model has "
            f"{frame.num_layers} layers, expected numbers from 1 to {frame.num_layers - 1}"
        )
    return tuple([f"{frame.layers}.{layer - 1}" for layer in layers])


class WithHiddenStates(nn.Module):
    """module(input_ids, positions, logits_rows, *images) -> logits [R, V], and the results [T, D]
    of the submodules with these names, in the order in which they run.

    Shares the parameters of `module`, which is not changed. Raises AttributeError for a name that
    is no submodule, and ValueError for one that is in another stage of a pipeline.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self.module = module
        for name in names:
            layer = self.module.get_submodule(name)
            if isinstance(layer, OtherStage):
                raise ValueError(
                    f"hidden states of {name}, which another stage has: not supported with pp"
                )
            self.module = replaced(self.module, name, _Recorder(layer, self.states))

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, *images: Tensor
    ) -> tuple[Tensor, ...]:
        logits: Tensor = self.module(input_ids, positions, logits_rows, *images)
        states = tuple(self.states)
        self.states.clear()
        return logits, *states


class _Recorder(StandIn):
    """Calls a module and appends the result to a list: the first one of several."""

    def __init__(self, module: nn.Module, states: list[Tensor]) -> None:
        super().__init__(module)
        self.module, self.states = module, states

    def forward(self, *args: Any, **named: Any) -> Any:
        out = self.module(*args, **named)
        states: Tensor = out[0] if isinstance(out, tuple) else out
        self.states.append(states.flatten(0, -2))
        return out
