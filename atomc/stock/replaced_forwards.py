"""Layers with state of transformers' classes that are entered at their forward: a function that
calls ops computes what the layer does.

A class is recognized by what it computes: a small layer of it is compared with that function on
random numbers.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Arguments of a forward with which a layer runs as its class has it: a cache of transformers,
# several sequences in one row.
OWN = ("cache", "cache_params", "past_key_values", "cu_seq_lens_q", "seq_idx")
MASK = "attention_mask"  # [B, T], 0 for padding
# Of the largest number in fp32: sums in another order.
TOLERANCE = 1e-4
Handles = Mapping[str, nn.Buffer]  # of state, by the names of a layer's attributes


def _complete_nothing(layer: Any) -> None:
    """Nothing is missing."""


@dataclass(frozen=True)
class LayerKind:
    """A kind of layers.

    has         whether a module is such a layer
    compute     what the layer makes of x [B, T, D] -> [B, T, D]
    ops         that `compute` calls, for sentences
    handles     of a layer
    parameters  the names of those that `compute` reads
    sizes       of the compared layer, by each name that a config has for it; with hidden_size
    tokens      of the comparison: more than a chunk has
    complete    gives the compared layer what its model would
    masks       the class begins with zeros for padding; other kinds run as their class with a mask
    """

    has: Callable[[nn.Module], bool]
    compute: Callable[[Any, Tensor], Tensor]
    ops: str
    handles: Callable[[Any], Handles]
    parameters: Callable[[Any], Iterable[str]]
    sizes: Mapping[str, int]
    tokens: int
    complete: Callable[[Any], None] = _complete_nothing
    masks: bool = False

    def layers(self, model: nn.Module) -> list[Any]:
        return [module for module in model.modules() if self.has(module)]

    def enter(self, model: Any) -> int:
        """Have the layers call ops while the model's attention implementation is "atom", in place.
        Returns how many it has.

        Raises ValueError for one that computes something else than `compute`.
        """
        layers = self.layers(model)
        if reasons := self._refusals(model, layers):
            raise ValueError(min(reasons.values()))
        for layer in layers:
            for name, handle in self.handles(layer).items():
                setattr(layer, name, handle.to(model.device, model.dtype))
            self._enter(layer, model.config.get_text_config())
        return len(layers)

    def enter_while_compiled(self, model: nn.Module) -> list[str]:
        """Have the layers call ops while torch.compile traces them, in place. Returns why some of
        them do not.
        """
        layers = [layer for layer in self.layers(model) if "forward" not in vars(layer)]
        if not layers or not hasattr(getattr(model, "config", None), "get_text_config"):
            return []  # our own layers call ops by themselves
        reasons = self._refusals(model, layers)
        for layer in layers:
            if type(layer) not in reasons:
                self._enter(layer, None)
        return sorted(reasons.values())

    def leave(self, model: nn.Module) -> None:
        """Undo enter_while_compiled."""
        for layer in self.layers(model):
            if vars(layer).get("entered_while", layer) is None:
                for name in ("forward", "entered_while", "entered_as"):
                    del layer.__dict__[name]

    def _enter(self, layer: nn.Module, config: "PretrainedConfig | None") -> None:
        """config: of the attention with which it calls ops; None: while it is compiled."""
        layer.__dict__["entered_while"] = config
        layer.__dict__["entered_as"] = self
        layer.__dict__["forward"] = MethodType(_forward, layer)

    def _refusals(self, model: Any, layers: Iterable[Any]) -> dict[type, str]:
        """Why the layers of a class are not entered."""
        config, name = model.config.get_text_config(), type(model).__name__
        first = {type(layer): layer.layer_idx for layer in reversed(list(layers))}
        return {
            cls: f"{name}: {cls.__name__} {reason}"
            for cls, layer_idx in first.items()
            if (reason := self._why_unlike(cls, config, layer_idx))
        }

    def _why_unlike(self, cls: type[Any], config: "PretrainedConfig", layer_idx: int) -> str:
        """Why a class does not compute what `compute` does; "" if it does."""
        sizes = copy.deepcopy(config)
        for name, value in self.sizes.items():
            if hasattr(sizes, name):
                setattr(sizes, name, value)
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.device("cpu"), torch.no_grad():
                small = cls(sizes, layer_idx).float().eval()
                self.complete(small)
                if reason := self._why_not_compared(small):
                    return reason
                for tensor in (*small.parameters(), *small.buffers()):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
                shape = (1, self.tokens, self.sizes["hidden_size"])
                x = torch.randn(shape, generator=generator)
                expected, ours = cls.forward(small, x), self.compute(small, x)
        except Exception as error:  # code of others
            return f"cannot be compared with {self.ops}: {type(error).__name__}: {error}"
        if expected.shape != ours.shape:
            return f"returns {list(expected.shape)}, and the layer by {self.ops} {list(ours.shape)}"
        apart = float((expected - ours).abs().max() / expected.abs().max())
        if not apart <= TOLERANCE:
            return (
                f"computes something else than {self.ops}: results differ by {apart:.1e} of the "
                f"largest number, and rounding explains {TOLERANCE:.0e}"
            )
        return ""

    def _why_not_compared(self, small: Any) -> str:
        """What a comparison would not name."""
        operands = set(self.parameters(small))
        if others := sorted(dict(small.named_parameters()).keys() - operands):
            return f"has {', '.join(others)}, which {self.ops} has no operand for"
        activation = getattr(small, "activation", "silu")
        if activation not in ("silu", "swish"):
            return f"has the activation {activation!r} behind its convolution, supported is 'silu'"
        return ""


def _forward(layer: Any, hidden_states: Tensor, *rest: object, **named: Any) -> Tensor:
    """That of the class, with its arguments. It runs itself where the layer does not call ops."""
    kind: LayerKind = layer.entered_as
    mask = named.get(MASK)
    unsupported = bool(rest) or any(named.get(name) is not None for name in OWN)
    if unsupported or not _calls_ops(layer) or (mask is not None and not kind.masks):
        of_class: Callable[..., Tensor] = type(layer).forward
        return of_class(layer, hidden_states, *rest, **named)
    if mask is not None:
        hidden_states = (hidden_states * mask[..., None]).to(hidden_states.dtype)
    return kind.compute(layer, hidden_states)


def _calls_ops(layer: Any) -> bool:
    if layer.entered_while is None:
        return torch.compiler.is_compiling()
    return bool(layer.entered_while._attn_implementation == "atom")
