"""Layers with state of transformers' classes that are entered at their forward: while the model's
attention implementation is "atom", a function that calls ops computes what the layer does.
"""

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Arguments of a forward with which a layer runs as its class has it: a cache of transformers, a
# mask of padding, several sequences in one row.
OWN = ("cache_params", "past_key_values", "attention_mask", "cu_seq_lens_q", "seq_idx")
# Of the largest number in fp32: sums in another order.
TOLERANCE = 1e-4
# Computes the layer for x [B, T, D].
Compute = Callable[[Any, Tensor], Tensor]


def enter(layer: nn.Module, config: "PretrainedConfig", compute: Compute) -> None:
    """Have `compute` run in place of the layer's forward."""
    layer.__dict__["entered_while"] = config
    layer.__dict__["entered_by"] = compute
    layer.__dict__["forward"] = MethodType(_forward, layer)


def _forward(layer: Any, hidden_states: Tensor, *rest: object, **named: Any) -> Tensor:
    own = bool(rest) or any(named.get(name) is not None for name in OWN)
    if own or layer.entered_while._attn_implementation != "atom":
        of_class: Callable[..., Tensor] = type(layer).forward
        return of_class(layer, hidden_states, *rest, **named)
    computed: Tensor = layer.entered_by(layer, hidden_states)
    return computed


def why_unlike(small: nn.Module, width: int, tokens: int, compute: Compute, ops: str) -> str:
    """Why a class does not compute what `compute` does; "" if it does.

    small  a layer of the class, with D = width, whose parameters are overwritten
    ops    that `compute` calls, for the sentence
    """
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.device("cpu"), torch.no_grad():
            for tensor in (*small.parameters(), *small.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            x = torch.randn(1, tokens, width, generator=generator)
            own, ours = type(small).forward(small, x), compute(small, x)
    except Exception as error:  # code of others
        return f"cannot be compared with {ops}: {type(error).__name__}: {error}"
    if own.shape != ours.shape:
        return f"returns {list(own.shape)}, and the layer by {ops} {list(ours.shape)}"
    apart = float((own - ours).abs().max() / own.abs().max())
    if not apart <= TOLERANCE:
        return (
            f"computes something else than {ops}: results differ by {apart:.1e} of the largest "
            f"number, and rounding explains {TOLERANCE:.0e}"
        )
    return ""


def unknown_parameters(layer: nn.Module, known: frozenset[str], ops: str) -> str:
    """Why the layer has more parameters than these; "" if it has not."""
    others = sorted(dict(layer.named_parameters()).keys() - known)
    return f"has {', '.join(others)}, which {ops} has no operand for" if others else ""
