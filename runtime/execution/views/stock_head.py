"""Finds the head of a transformers class whose logits may be computed some columns at a time.

A class may compute something of what its head returns. Of a part of the columns that is right if
each logit is computed of one output of the head, as scaled and capped logits are, and wrong if it
depends on others, on their number or on its place, as with a mask of ids. This is found by what
the class computes of random numbers, without its layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

from atomc.parallel.vocab import VocabParallelHead
from atomc.runtime.execution.views.headless_model import replaced
from atomc.stock.model import StockModel

ROWS = 2


def separable_head(model: StockModel) -> VocabParallelHead | None:
    """The head that is divided by vocabulary, of a class whose logits of some ids need no other
    outputs of it; None for others. The same on all ranks.
    """
    head = model.hf_model.get_output_embeddings()
    if type(head) is not VocabParallelHead:
        return None
    size, rows = head.out_features, len(head.weight)
    generator = torch.Generator().manual_seed(0)
    # Larger than most logits, so that a cap shows.
    outputs = 50 * torch.randn(1, ROWS, size, generator=generator)
    outputs = outputs.to(head.weight.device, head.weight.dtype)
    try:
        expected = _logits(model, head, outputs)
        parts = [_logits(model, head, part) for part in torch.split(outputs, rows, -1)]
        same = torch.cat(parts, -1).equal(expected)
    except Exception:  # code of others, which may need all outputs
        return None
    return head if same else None


def _logits(model: StockModel, head: nn.Linear, outputs: Tensor) -> Tensor:
    """What the class returns when its head returns `outputs` [1, ROWS, V]."""
    hf_model: Any = model.hf_model
    [name] = (name for name, child in hf_model._modules.items() if child is head)
    twin = replaced(model, f"hf_model.{name}", _Returns(outputs))
    states = outputs.new_zeros(1, ROWS, head.in_features)
    twin = replaced(twin, f"hf_model.{hf_model.base_model_prefix}", _LastStates(states))
    ids = torch.zeros(ROWS, dtype=torch.int64, device=outputs.device)
    with torch.no_grad():
        logits: Tensor = twin(ids, torch.arange(ROWS, device=outputs.device), ids)
    return logits


class _Returns(nn.Module):
    def __init__(self, result: Tensor):
        super().__init__()
        self.result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


class _LastStates(_Returns):
    """In the place of the layers: the result is the last hidden states [1, T, D]."""

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.result)
