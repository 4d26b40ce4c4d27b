"""A token from each row of logits by inverse-transform sampling, after temperature, top_k, top_p
and min_p.

R rows, V vocabulary. Probabilities are counted in whole numbers: their sums are exact in any order,
so that a row's token depends neither on the other rows nor on how a device adds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atomc.runtime.sampling.pack_to_device import pack_to_device
from atomc.runtime.sampling.sampling_params import SamplingParams

# A row is searched in two levels: the block in which the cumulated probability passes the number,
# then the token.
BLOCK = 512
# Numbers in a tensor, on a CPU: so large that calls cost little, so small that memory is used again
# and stays in a cache.
AT_ONCE = 2**20
# Logits divided by this are all the same; a temperature that is infinite in fp32 would make -inf /
# inf of a masked token.
HOTTEST = 1e30


def inverse_transform(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Token ids [R] i64 of logits [R, V], and the largest logit of each row [R]; params and
    numbers, in [0, 1), are one for each row.

    Where the largest logit is not finite (NaN if any logit of the row is), the token means nothing,
    but is in range.

    The token is the one, in order of ids, at which the cumulated probability passes the number's
    share of what the filters leave. Tokens as likely as the last one that a filter leaves stay,
    too. Greedy rows are the exact argmax, the smallest id among equals.
    """
    random = [i for i, of in enumerate(params) if of.temperature > 0]
    if logits.device.type == "cuda" and random:
        return _on_gpu(logits, params, numbers)
    # On a CPU argmax takes ten times as long.
    largest, tokens = logits.max(-1)
    if not random:
        return tokens, largest
    largest = largest.float()
    finite = largest.isfinite().tolist()
    random = [i for i in random if finite[i]]
    at_once = max(AT_ONCE // logits.shape[-1], 1)
    for start in range(0, len(random), at_once):
        rows = random[start : start + at_once]
        tokens[rows] = _drawn(logits[rows], [params[i] for i in rows], numbers[rows])
    return tokens, largest


def _on_gpu(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """The same in one launch."""
    from atomc.kernels.triton import inverse_transform as kernel

    V = logits.shape[-1]
    rows = [
        (min(of.temperature, HOTTEST), min(of.top_k or V, V), of.top_p, of.min_p, number)
        for of, number in zip(params, numbers.tolist(), strict=True)
    ]
    packed = pack_to_device(logits.device, rows)
    filtered = any(of.top_p < 1.0 or 0 < of.top_k < V for of in params)
    return kernel.inverse_transform(logits, packed[..., 0], filtered=filtered)


def _drawn(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> Tensor:
    """No row is greedy, and the largest logit of each is finite. Waits for the device if a row has
    top_p.
    """
    R, V = logits.shape
    num_blocks = -(-V // BLOCK)
    rows = [
        (min(of.temperature, HOTTEST), of.min_p, number)
        for of, number in zip(params, numbers, strict=True)
    ]
    temperature, min_p, number = pack_to_device(logits.device, rows)
    weights = logits.new_zeros((R, num_blocks * BLOCK), dtype=torch.float32)
    scaled = weights[:, :V]
    scaled.copy_(logits)
    # Less the maximum before the division, or a small temperature overflows.
    scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature.float())
    # exp(-64) counts as 0; exp takes 80 times as long where its results underflow.
    scaled.clamp_(min=-64.0).exp_()
    counts = _whole(weights, V)
    if any(of.filtered for of in params):
        least = torch.maximum(_least_counts(counts[:, :V], params), _whole(min_p.float(), V))
        # In a third of the time of masked_fill_.
        counts.mul_(counts >= least)

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


def _least_counts(counts: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest of counts [R, V] that top_k and then top_p leave in each row, [R, 1]."""
    V = counts.shape[-1]
    least = counts.new_zeros((len(params), 1))
    top_k = [i for i, of in enumerate(params) if 0 < of.top_k < V]
    if top_k:
        row, k = pack_to_device(counts.device, [(i, params[i].top_k) for i in top_k]).long()
        largest = counts[row[:, 0]].topk(max(params[i].top_k for i in top_k)).values
        least[row[:, 0]] = largest.gather(-1, k - 1)
    top_p = [i for i, of in enumerate(params) if of.top_p < 1.0]
    if top_p:
        index, p = pack_to_device(counts.device, [(i, params[i].top_p) for i in top_p])
        rows = index[:, 0].long()
        kept = counts[rows]
        if top_k:
            kept.mul_(kept >= least[rows])
        total = kept.sum(-1, keepdim=True)
        limit = torch.minimum((p * total).ceil().long(), total)
        # All that are no larger than this make less than 1 - top_p together: only the others are
        # sorted.
        negligible = ((total - limit) // V).clamp_(min=1) - 1
        num_sorted = int((kept > negligible).sum(-1).max())
        largest = kept.topk(num_sorted).values
        last = torch.searchsorted(largest.cumsum(-1), limit).clamp_(max=num_sorted - 1)
        least[rows] = largest.gather(-1, last)
    return least
