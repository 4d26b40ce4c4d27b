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
# Numbers in a tensor, on a CPU: so large that calls cost little, so small that memory is used again and stays in a cache.
AT_ONCE = 2**20


def inverse_transform(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [R] i64 of logits [R, V], a row for each of draws.

    The token is the one, in order of ids, at which the cumulated probability passes draw.uniform of what the filters
    leave. Tokens as likely as the last one that a filter leaves stay, too. Greedy rows are the exact argmax, the
    smallest id among equals.
    """
    random = [i for i, draw in enumerate(draws) if draw.params.temperature > 0]
    if not random:
        return logits.argmax(-1)
    if logits.device.type == "cuda":
        return _on_gpu(logits, draws)
    tokens = logits.argmax(-1) if len(random) < len(draws) else logits.new_empty(len(draws), dtype=torch.int64)
    at_once = max(AT_ONCE // logits.shape[-1], 1)
    for start in range(0, len(random), at_once):
        rows = random[start : start + at_once]
        tokens[rows] = _drawn(logits[rows], [draws[i] for i in rows])
    return tokens


def _on_gpu(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The same in one launch."""
    from atomc.kernels.triton import inverse_transform as kernel

    V = logits.shape[-1]
    packed = columns(logits.device, [
        (d.params.temperature, min(d.params.top_k or V, V), d.params.top_p, d.params.min_p, d.uniform) for d in draws
    ])  # fmt: skip
    filtered = any(0 < draw.params.top_k < V or draw.params.top_p < 1.0 for draw in draws)
    return kernel.inverse_transform(logits, packed[..., 0], filtered=filtered)


def _drawn(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """None of the draws is greedy. Waits for the device if a row has top_p."""
    R, V = logits.shape
    num_blocks = -(-V // BLOCK)
    temperature, min_p, number = columns(logits.device, [(d.params.temperature, d.params.min_p, d.uniform) for d in draws])
    weights = logits.new_zeros((R, num_blocks * BLOCK), dtype=torch.float32)
    scaled = weights[:, :V]
    scaled.copy_(logits)
    # Less the maximum before the division, or a small temperature overflows.
    scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature.float())
    # exp(-64) counts as 0; exp takes 80 times as long where its results underflow.
    scaled.clamp_(min=-64.0).exp_()
    counts = _whole(weights, V)
    if any(draw.params.filtered for draw in draws):
        least = torch.maximum(_least_counts(counts[:, :V], draws), _whole(min_p.float(), V))
        counts.masked_fill_(counts < least, 0)

    counts = counts.view(R, num_blocks, BLOCK)
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
    return weights.mul(2.0 ** (62 - V.bit_length())).long()


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
        kept.masked_fill_(kept < least[rows], 0)
        total = kept.sum(-1, keepdim=True)
        limit = torch.minimum((p * total).ceil().long(), total)
        # All that are no larger than this make less than 1 - top_p together: only the others are sorted.
        negligible = ((total - limit) // V).clamp_(min=1) - 1
        num_sorted = int((kept > negligible).sum(-1).max())
        largest = kept.topk(num_sorted).values
        last = torch.searchsorted(largest.cumsum(-1), limit).clamp_(max=num_sorted - 1)
        least[rows] = largest.gather(-1, last)
    return least
