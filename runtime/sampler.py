"""From logits to tokens, on the device of the logits.

R rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc.runtime.draw import Draw


def sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [R] i64: row i of logits [R, V] drawn as draws[i] says, whatever the other rows are.

    Greedy rows are the exact argmax, the smallest id among equals.
    """
    tokens = logits.argmax(-1)
    # Rows without a filter are not sorted: sorting is the larger cost, and would also draw another token.
    for filtered in (False, True):
        rows = [i for i, draw in enumerate(draws) if not draw.greedy and draw.filtered == filtered]
        if rows:
            index = torch.tensor(rows, device=logits.device)
            tokens[index] = _drawn(logits[index], [draws[i] for i in rows], filtered)
    return tokens


def _drawn(logits: Tensor, draws: Sequence[Draw], filtered: bool) -> Tensor:
    """Inverse-transform sampling: the token at which the cumulated probability passes `uniform` of what is left."""
    V = logits.shape[-1]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    logits = logits.to(torch.float32)
    # Less the maximum before the division, or a small temperature overflows.
    scaled = (logits - logits.amax(-1, keepdim=True)) / column([d.temperature for d in draws], torch.float32)
    if filtered:
        scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    mass = scaled.softmax(-1).cumsum(-1, dtype=torch.float64)
    last = column([min(d.top_k or V, V) - 1 for d in draws], torch.int64)
    limit = column([d.top_p for d in draws], torch.float64) * mass.gather(-1, last)
    last = torch.minimum(last, torch.searchsorted(mass, limit))
    target = column([d.uniform for d in draws], torch.float64) * mass.gather(-1, last)
    # Right of equal masses: a token of probability 0 is never drawn.
    chosen = torch.minimum(last, torch.searchsorted(mass, target, right=True))
    return (ids.gather(-1, chosen) if filtered else chosen)[:, 0]
