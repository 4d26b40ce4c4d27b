"""Products in Triton, over weights as they are. The kernels take the strides of both
factors; scales of tokens and outputs follow each other.
"""

import torch
from torch import Tensor

from stand_ins import ARCH, stands_for
from stand_ins.formats import e2m1_numbers, e8m0, native_fp8
from stand_ins.memory import check, contiguous_view

GEMM = "aiter.ops.triton.gemm.basic"


def _codes(x: Tensor, w: Tensor) -> None:
    check(x.dtype == w.dtype, "both operands of a dot have one dtype")
    check(x.dtype in (torch.int8, native_fp8()), f"no instructions for {x.dtype}")
    check(x.shape[1] == w.shape[1], "Incompatible dimensions!!!")


@stands_for(f"{GEMM}.gemm_a16w16", "aiter.ops.triton.gemm_a16w16")
def gemm_a16w16(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    y: Tensor | None = None,
    config: object = None,
    activation: str | None = None,
    skip_reduce: bool | None = False,
    kernel_type: str = "bandwidth_bound",
    backend: str | None = None,
) -> Tensor:
    """Summed in fp32, also where K is split, and rounded once."""
    check(y is None and config is None and activation is None and not skip_reduce, "not played")
    check(bias is None and backend is None, "not played")
    check(x.dtype in (torch.float16, torch.bfloat16), "its tiles are those of 16 bits")
    check(x.dtype == w.dtype, "both operands of a dot have one dtype")
    check(x.shape[1] == w.shape[1], "Incompatible matrix shapes.")
    return (x.double() @ w.double().t()).float().to(dtype or torch.bfloat16)


@stands_for(f"{GEMM}.gemm_a8w8", "aiter.ops.triton.gemm_a8w8")
def gemm_a8w8(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: object = None,
    skip_reduce: bool = False,
) -> Tensor:
    check(y is None and config is None and not skip_reduce, "not played")
    _codes(x, w)
    scales = contiguous_view(x_scale, x.shape[0], 1), contiguous_view(w_scale, w.shape[0])
    out = x.double() @ w.double().t() * scales[0].double() * scales[1].double()
    return (out if bias is None else out + contiguous_view(bias, w.shape[0]).double()).to(dtype)


@stands_for(f"{GEMM}.gemm_a8w8_blockscale", "aiter.ops.triton.gemm_a8w8_blockscale")
def gemm_a8w8_blockscale(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: object = None,
    skip_reduce: bool = False,
    kernel_type: str = "bandwidth_bound",
    backend: str | None = None,
) -> Tensor:
    """Scales [M, K/128] and [N/128, K/128], by their strides. The size of a block is the power of
    two above K over the number of scales, and has to be 128.
    """
    check(y is None and config is None and not skip_reduce and backend is None, "not played")
    _codes(x, w)
    k = x.shape[1]
    block = 1 << (-(-k // w_scale.shape[1]) - 1).bit_length()
    check(block == 128, "GROUP_K must equal BLOCK_SIZE_K")
    of_x = x_scale.double().repeat_interleave(128, 1)[:, :k]
    of_w = w_scale.double().repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, :k]
    return ((x.double() * of_x) @ (w.double() * of_w).t()).to(dtype)


@stands_for(f"{GEMM}.gemm_afp4wfp4", "aiter.ops.triton.gemm_afp4wfp4")
def gemm_afp4wfp4(
    x: Tensor,
    w: Tensor,
    x_scales: Tensor,
    w_scales: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    y: Tensor | None = None,
    config: object = None,
    skip_reduce: bool = False,
) -> Tensor:
    """e2m1 in bytes [M, K/2] and [N, K/2] under e8m0 scales [M, K/32] and [N, K/32]."""
    check(y is None and config is None and not skip_reduce, "not played")
    check(ARCH.get() == "gfx950", "MXFP4 is not available on your device")
    check(x.dtype == w.dtype == torch.uint8, "e2m1 is in uint8")
    first, second = (
        e2m1_numbers(codes).double() * e8m0(scale).double().repeat_interleave(32, 1)
        for codes, scale in ((x, x_scales), (w, w_scales))
    )
    return (first @ second.t()).to(dtype)


@stands_for("aiter.ops.triton._triton_kernels.common.splitk_reduce")
def _gemm_splitk_reduce_kernel() -> None:
    raise NotImplementedError("it says that this version reads scales up to the end of a row")
