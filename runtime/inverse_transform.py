"""A token from each row of logits by inverse-transform sampling, after temperature, top_k, top_p and min_p.

R rows, V vocabulary. Probabilities are counted in whole numbers: their sums are exact in any order, so that a row's
token depends neither on the other rows nor on how a device adds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from atomc.runtime.columns import columns
from atomc.runtime.draw import Draw

# A row is searched in two levels: the block in which the cumulated probability passes the number, then the token.
BLOCK = 512


def inverse_transform(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [R] i64 of logits [R, V], a row for each of draws, none of them greedy.

    The token is the one, in order of ids, at which the cumulated probability passes draw.uniform of what the filters
    leave. Tokens as likely as the last one that a filter leaves stay, too. Waits for the device if a row has top_p.
    """
    R, V = logits.shape
    num_blocks = -(-V // BLOCK)
    temperature, min_p, number = columns(logits.device, [(d.params.temperature, d.params.min_p, d.uniform) for d in draws])
    weights = logits.new_zeros((R, num_blocks * BLOCK), dtype=torch.float32)
    scaled = weights[:, :V]
    scaled.copy_(logits)
    # Less the maximum before the division, or a small temperature overflows.
    scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature.float()).exp_()
    counts = _whole(weights, V)
    least = torch.maximum(_least_counts(counts[:, :V], draws), _whole(min_p.float(), V))
    counts = torch.where(counts >= least, counts, 0).view(R, num_blocks, BLOCK)

    in_block = counts.sum(-1)
    passed = in_block.cumsum(-1)
    total = passed[:, -1:]
    target = torch.minimum((number * total).long(), total - 1)
    block = torch.searchsorted(passed, target, right=True).clamp_(max=num_blocks - 1)
    target -= passed.gather(-1, block) - in_block.gather(-1, block)
    inside = counts.gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0].cumsum(-1)
    return (block * BLOCK + torch.searchsorted(inside, target, right=True))[:, 0].clamp_(max=V - 1)


def _whole(weights: Tensor, V: int) -> Tensor:
    """Weights from 0 to 1 as i64 so small that V of them add up."""
    return (weights * 2.0 ** (62 - V.bit_length())).long()


def _least_counts(counts: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The smallest of counts [R, V] that top_k and then top_p leave in each row, [R, 1]."""
    V = counts.shape[-1]
    least = counts.new_zeros((len(draws), 1))
    top_k = [i for i, draw in enumerate(draws) if 0 < draw.params.top_k < V]
    if top_k:
        row, k = columns(counts.device, [(i, draws[i].params.top_k) for i in top_k]).long()
        largest = counts[row[:, 0]].topk(max(draws[i].params.top_k for i in top_k)).values
        least[row[:, 0]] = largest.gather(-1, k - 1)
    top_p = [i for i, draw in enumerate(draws) if draw.params.top_p < 1.0]
    if top_p:
        index, p = columns(counts.device, [(i, draws[i].params.top_p) for i in top_p])
        rows = index[:, 0].long()
        kept = counts[rows]
        kept = torch.where(kept >= least[rows], kept, 0)
        total = kept.sum(-1, keepdim=True)
        limit = torch.minimum((p * total).ceil().long(), total)
        # All that are no larger than this make less than 1 - top_p together: only the others are sorted.
        negligible = ((total - limit) // V).clamp_(min=1) - 1
        num_sorted = int((kept > negligible).sum(-1).max())
        largest = kept.topk(num_sorted).values
        last = torch.searchsorted(largest.cumsum(-1), limit).clamp_(max=num_sorted - 1)
        least[rows] = largest.gather(-1, last)
    return least
