"""Products by head in Triton, [B, M, K] x [B, N, K] -> [B, M, N], that quantize their left side; a
transposed side has M before B.
"""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import e2m1_bytes, e2m1_numbers, e8m0, largest, native_fp8
from stand_ins.memory import check

_PREQUANT = "batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant"


@stands_for(f"aiter.ops.triton.gemm.batched.{_PREQUANT}", f"aiter.ops.triton.{_PREQUANT}")
def batched_gemm_a8w8_a_per_token_group_prequant_w_per_batched_tensor_quant(
    X: Tensor,
    WQ: Tensor,
    w_scale: Tensor,
    group_size: int = 128,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    splitK: int | None = None,
    YQ: Tensor | None = None,
    transpose_bm: bool = False,
    transpose_bm_in: bool = False,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Codes of each group of a row of X under one scale, times those of WQ under w_scale [1]."""
    if bias is not None or splitK is not None or YQ is not None or config is not None:
        raise NotImplementedError("arguments that no lowering gives")
    x = X.transpose(0, 1) if transpose_bm_in else X
    assert x.shape[0] == WQ.shape[0], "Incompatible Batch dimensions!!!"
    assert x.shape[2] == WQ.shape[2], "Incompatible K dimensions!!!"
    assert group_size & (group_size - 1) == 0, "group_size mush be power of 2"
    assert dtype in (torch.bfloat16, torch.float16)
    check(WQ.dtype == native_fp8(), "codes of another machine")
    total = torch.zeros(*x.shape[:2], WQ.shape[1])
    top = largest(WQ.dtype)
    for start in range(0, x.shape[2], group_size):
        part = x[..., start : start + group_size].float()
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) * (1 / top)
        codes = (part * (1 / scale)).clamp(-top, top).to(WQ.dtype).float()
        weight = WQ[..., start : start + group_size].float()
        total += codes @ weight.transpose(1, 2) * scale
    y = (total * w_scale.float()).to(dtype)
    return (y.transpose(0, 1) if transpose_bm else y).contiguous()


@stands_for("aiter.ops.triton.gemm.batched.batched_gemm_a16wfp4")
def batched_gemm_a16wfp4(
    x: Tensor,
    w: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: dict[str, int] | None = None,
    transpose_bm: bool = False,
    prequant: bool = True,
    y_scale: Tensor | None = None,
) -> Tensor:
    """e2m1 codes of 32 numbers of a row of x under a power of two, which is that of the largest one
    after rounding it to a mantissa of 1, 1.25, 1.5 or 1.75, over four; w and w_scales are bytes.
    """
    assert prequant, "prequant = False is not yet supported"
    assert ARCH.get() == "gfx950", "MXFP4 is not available on your device"
    if config is not None or y_scale is not None:
        raise NotImplementedError("arguments that no lowering gives")
    assert x.shape[0] == w.shape[0] and w.dtype == w_scales.dtype == torch.uint8
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax)  # mantissa in [0.5, 1)
    power = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype) - 2
    scale = torch.where(amax == 0, 1.0, torch.exp2(power.float().clamp(min=-127)))[..., None]
    rounded = e2m1_numbers(e2m1_bytes((groups / scale).flatten(-2)))
    values = (rounded.unflatten(-1, (-1, 32)) * scale).flatten(-2)
    weight = e2m1_numbers(w).unflatten(-1, (-1, 32)) * e8m0(w_scales)[..., None]
    made = (values @ weight.flatten(-2).transpose(1, 2)).to(dtype)
    made = made.transpose(0, 1) if transpose_bm else made
    if y is None:
        return made.contiguous()
    assert y.shape == made.shape, "Output dimension error"
    y.copy_(made)
    return y
