"""What the experts of a rank receive.

T tokens of a rank, k experts of each, H width of the model, I width of an expert; L experts of a
rank; M rows that a rank receives; C rows per expert in the batched format.
"""

from dataclasses import dataclass, replace
from enum import Enum

from torch import Tensor


class ActivationFormat(Enum):
    """STANDARD: rows [M, H], with ids and weights [M, k]. BATCHED: rows by expert, [L, C, H], of
    which expert e has expert_num_tokens[e], the first ones.
    """

    STANDARD = "standard"
    BATCHED = "batched"


class Sent:
    """What a PrepareFinalize remembers between prepare and finalize; each has a subclass."""


@dataclass(frozen=True)
class Dispatched:
    """The result of prepare.

    x                  [M, H] or [L, C, H]: values, or codes of a quantized scheme
    x_scale            [M, S] or [L, C, S] fp32: S scales per row; None without codes
    ids, weights       standard: [M, k] of the rows of x, ids of all ranks' experts, and -1 where a
                       row has no expert. batched: [T, k], as prepare received them
    expert_num_tokens  batched: [L] int32
    """

    x: Tensor
    x_scale: Tensor | None
    ids: Tensor
    weights: Tensor
    expert_num_tokens: Tensor | None = None
    sent: Sent | None = None

    @property
    def rows(self) -> int:
        """M or C."""
        return self.x.shape[-2]

    def chunk(self, start: int, stop: int) -> "Dispatched":
        """Rows start to stop of the standard format."""
        return replace(
            self,
            x=self.x[start:stop],
            x_scale=None if self.x_scale is None else self.x_scale[start:stop],
            ids=self.ids[start:stop],
            weights=self.weights[start:stop],
        )
