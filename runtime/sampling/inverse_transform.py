"""Inverse-transform sampling: one token per row of logits, after temperature and filters.

R rows, V vocabulary. Probabilities are integers, whose sums are exact in any order: a row's token
depends neither on the other rows nor on the order of additions on a device.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atomc import kernels
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.sampling.pack_to_device import pack_to_device

# A row is searched in two levels: first the block in which the cumulative probability exceeds the
# random number, then the token.
BLOCK = 512
# Elements per tensor on a CPU: large enough to amortize the calls, small enough to stay in the
# processor's cache.
ELEMENTS_AT_ONCE = 2**20
# Makes all logits equal. A temperature that overflows to inf in fp32 would give NaN for a masked
# token (-inf / inf).
MAX_TEMPERATURE = 1e30


def inverse_transform(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Token ids [R] i64 sampled from logits [R, V], and the largest logit of each row [R].

    params    of each row; () if all are greedy
    numbers   [R], uniform in [0, 1); not read if all rows are greedy

    The token is the first one, in order of ids, at which the cumulative probability of the
    remaining tokens exceeds numbers[i] times their total. A filter keeps all tokens that tie with
    the last one it keeps. Greedy rows are the exact argmax, the smallest id among equals.

    If the largest logit is not finite (NaN if any logit of the row is), the token is meaningless
    but in range.
    """
    random = [i for i, of in enumerate(params) if of.temperature > 0]
    if logits.device.type == "cuda" and random:
        return _draw_on_gpu(logits, params, numbers)
    # On a CPU, argmax takes ten times as long as max.
    largest, tokens = logits.max(-1)
    if not random:
        return tokens, largest
    largest = largest.float()
    finite = largest.isfinite().tolist()
    random = [i for i in random if finite[i]]
    at_once = max(ELEMENTS_AT_ONCE // logits.shape[-1], 1)
    for start in range(0, len(random), at_once):
        rows = random[start : start + at_once]
        tokens[rows] = _sample_rows(logits[rows], [params[i] for i in rows], numbers[rows])
    return tokens, largest


def _draw_on_gpu(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """As inverse_transform, in one kernel."""
    kernel = kernels.load_module("atomc.kernels.triton.inverse_transform")

    V = logits.shape[-1]
    rows = np.array([of.distribution for of in params], np.float64)
    temperature, top_k, top_p, _ = rows.T
    np.minimum(temperature, MAX_TEMPERATURE, out=temperature)
    top_k[(top_k == 0) | (top_k > V)] = V
    filtered = bool(((top_k < V) | (top_p < 1.0)).any())
    packed = pack_to_device(logits.device, np.column_stack((rows, numbers)))
    drawn: tuple[Tensor, Tensor] = kernel.inverse_transform(
        logits, packed[..., 0], filtered=filtered
    )
    return drawn


def _sample_rows(
    logits: Tensor, params: Sequence[SamplingParams], numbers: npt.NDArray[np.float64]
) -> Tensor:
    """As inverse_transform, for rows that are not greedy and whose largest logit is finite. Waits
    for the device if a row has top_p.
    """
    R, V = logits.shape
    num_blocks = -(-V // BLOCK)
    rows = [
        (min(of.temperature, MAX_TEMPERATURE), of.min_p, number)
        for of, number in zip(params, numbers, strict=True)
    ]
    temperature, min_p, number = pack_to_device(logits.device, rows)
    weights = logits.new_zeros((R, num_blocks * BLOCK), dtype=torch.float32)
    scaled = weights[:, :V]
    scaled.copy_(logits)
    # Subtract the maximum before the division, which overflows for small temperatures.
    scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature.float())
    # exp(-64) counts as 0; exp takes 80 times as long where its results underflow.
    scaled.clamp_(min=-64.0).exp_()
    counts = _integer_weights(weights, V)
    if any(of.filtered for of in params):
        least = torch.maximum(
            _smallest_kept(counts[:, :V], params), _integer_weights(min_p.float(), V)
        )
        # Takes a third of the time of masked_fill_.
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


def _integer_weights(weights: Tensor, V: int) -> Tensor:
    """Weights in [0, 1] as i64, scaled so that the sum of V of them does not overflow."""
    return weights.mul(2.0 ** (62 - V.bit_length())).long()


def _smallest_kept(counts: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The smallest of counts [R, V] that top_k, then top_p keep in each row, [R, 1]."""
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
        filtered = counts[rows]
        if top_k:
            filtered.mul_(filtered >= least[rows])
        total = filtered.sum(-1, keepdim=True)
        limit = torch.minimum((p * total).ceil().long(), total)
        # Values up to this one sum to less than 1 - top_p: only larger ones are sorted.
        negligible = ((total - limit) // V).clamp_(min=1) - 1
        num_sorted = int((filtered > negligible).sum(-1).max())
        largest = filtered.topk(num_sorted).values
        last = torch.searchsorted(largest.cumsum(-1), limit).clamp_(max=num_sorted - 1)
        least[rows] = largest.gather(-1, last)
    return least
