"""Mixtures of experts by AITER's Triton kernels, with weights as they are: in 16 bits, for what its
compiled kernels refuse, and in int4.
"""

import importlib
from typing import Unpack

import torch
from torch import Tensor

from atomc import ops
from atomc.kernels.aiter.experts.experts import numbered
from atomc.kernels.aiter.library import Function, gapped, installed
from atomc.kernels.checks import first_refusal, named, unlike, unsupported
from atomc.ops.experts import Gate, gated
from atomc.ops.formats import FLOATS
from atomc.ops.op import Prepared

moe_align_block_size_triton = Function(
    "moe_align_block_size_triton", "aiter.ops.triton.moe.moe_align_block_size"
)
fused_moe = Function(
    "fused_moe", "aiter.ops.triton.moe.moe_op", takes=["use_int4_w4a16", "block_shape"]
)
# Rows of a tile, for choices up to so many an expert.
TILES = ((16, 16), (64, 32), (1 << 62, 64))
COLUMNS = 64  # of a tile of inputs


class Choices:
    """The choices, sorted by expert in blocks; those of other devices' experts give zeros."""

    def __init__(self, ids: Tensor, weights: Tensor, experts: int):
        self.ids = (numbered(ids, experts) % (experts + 1)).contiguous()  # 0: of another device
        self.weights = weights.to(torch.float32).contiguous()
        count = ids.numel()
        self.block = next(rows for most, rows in TILES if count <= most * experts)
        most = count + min(count, experts + 1) * (self.block - 1)
        self.order = self.ids.new_full((most,), count)
        self.experts = self.ids.new_empty((-(-most // self.block),))
        self.length = self.ids.new_empty((1,))
        moe_align_block_size_triton(
            self.ids, experts + 1, self.block, self.order, self.experts, self.length
        )
        self.experts = self.experts - 1  # -1 is skipped
        self.tile = {
            "BLOCK_SIZE_M": self.block,
            "BLOCK_SIZE_N": 64,
            "BLOCK_SIZE_K": COLUMNS,
            "GROUP_SIZE_M": 4,
        }

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        weighted: bool,
        scale: Tensor | None = None,
        zeros: Tensor | None = None,
        group: int = 0,
    ) -> Tensor:
        """x, a row for each token or for each choice, by its experts [E, N, K]: [T, k, N]."""
        tokens, k = self.ids.shape
        out = x.new_empty((tokens, k, weight.shape[1]))
        fused_moe(
            x,
            weight,
            out,
            None,
            scale,
            zeros,
            self.weights,
            self.ids,
            self.order,
            self.experts,
            self.length,
            weighted,
            k if len(x) == tokens else 1,
            triton_dtype(x.dtype),
            False,
            False,
            group > 0,
            block_shape=[0, group] if group else None,
            config=self.tile,
        )
        return out


def triton_dtype(dtype: torch.dtype) -> object:
    return getattr(importlib.import_module("triton.language"), str(dtype).removeprefix("torch."))


def summed(results: Tensor, dtype: torch.dtype) -> Tensor:
    return results.sum(1, dtype=torch.float32).to(dtype)


@ops.moe_experts.kernel(
    "aiter",
    refuses=first_refusal(
        installed(moe_align_block_size_triton, fused_moe),
        named("b13 b2", unsupported, "AITER's kernel"),
    ),
)
def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    weight_on_input: bool,
    **gate: Unpack[Gate],
) -> Tensor:
    if not x.shape[0]:
        return torch.empty_like(x)
    choices = Choices(ids, weights, len(w13))
    h = choices.product(x, w13, weighted=weight_on_input).flatten(0, 1)
    h = gated(h, **gate)
    return summed(choices.product(h, w2, weighted=not weight_on_input), x.dtype)


def _pairs(zeros: Tensor) -> Prepared:
    """[E, N, groups] uint8 -> [E, N/2, groups]: of two outputs a byte, the even one's low."""
    even, odd = zeros.detach()[:, ::2], zeros.detach()[:, 1::2]
    return Prepared((even + 16 * odd,))


@ops.moe_experts_w4a16.kernel(
    "aiter",
    refuses=first_refusal(
        installed(moe_align_block_size_triton, fused_moe),
        named("x", unlike, FLOATS),
        named("b13 b2", unsupported, "AITER's kernel"),
        named("w13 w2", gapped),
    ),
    prepare={"w13_zeros": _pairs, "w2_zeros": _pairs},
)
def moe_experts_w4a16(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_zeros: tuple[Tensor] | None,
    w2_zeros: tuple[Tensor] | None,
    group: int,
    **gate: Unpack[Gate],
) -> Tensor:
    if not x.shape[0]:
        return torch.empty_like(x)
    [zeros13] = w13_zeros or (None,)
    [zeros2] = w2_zeros or (None,)
    choices = Choices(ids, weights, len(w13))
    h = choices.product(x, w13.view(torch.uint8), False, w13_scale, zeros13, group)
    h = gated(h.flatten(0, 1), **gate)
    out = choices.product(h, w2.view(torch.uint8), True, w2_scale, zeros2, group)
    return summed(out, x.dtype)
