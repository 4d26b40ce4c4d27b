"""A transformers model with the forward of our models."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from atomc.stock.implementations import Implementations

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The prefix of parameter names that names in a checkpoint do not have.
PREFIX = "hf_model."


class StockModel(nn.Module):
    """hf_model with the forward of our models. Parameter names have the prefix `hf_model.`.

    own, ours  the implementations of hf_model before it was wrapped, and those with which it calls
               ops
    indexed    it has indexers, whose layers read a mask of four dimensions, but no number of it
    """

    def __init__(
        self,
        hf_model: "PreTrainedModel",
        implementations: Implementations,
        *,
        indexed: bool = False,
    ):
        super().__init__()
        self.indexed = indexed
        self.own, self.ours = implementations, Implementations.of(hf_model)
        self.hf_model = hf_model
        self.config = hf_model.config

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor | None = None
    ) -> Tensor:
        """input_ids and positions [T] i64 -> logits [T, V], or [R, V] of logits_rows [R] i64."""
        flat = input_ids.dim() == 1
        unread = {"attention_mask": positions.new_zeros(1, 1, 1, 1)} if self.indexed else {}
        out = self.hf_model(
            input_ids=input_ids[None] if flat else input_ids,
            position_ids=positions[None] if flat else positions,
            use_cache=False,
            logits_to_keep=0 if logits_rows is None else logits_rows,
            **unread,
        )
        logits: Tensor = out.logits[0] if flat else out.logits
        return logits
