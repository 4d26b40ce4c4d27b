"""The gates of a gated delta rule in Triton: one program takes a block of numbers of all rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from atomc import ops
from atomc.graph.sizes import known_equal, spell_shape
from atomc.kernels.checks import unlike_shapes
from atomc.kernels.triton.launch.launch import begin, indexed, item, overlap, unfit
from atomc.kernels.triton.rows.activation import softplus
from atomc.ops.op import Refusal
from atomc.platform import Platform

BLOCK = 256  # of 1,024 tokens and 32 heads 128 programs, which is fewer than multiprocessors


@triton.jit
def decay_of(a, A_log, dt_bias):
    """g, of numbers in fp32."""
    return -tl.exp(A_log) * softplus(a + dt_bias)


@triton.jit
def rate_of(b, RATE_SCALE: constexpr):
    """beta in fp32, rounded to the dtype of b as the reference rounds it."""
    rate = tl.sigmoid(b.to(tl.float32)).to(b.dtype)
    if RATE_SCALE != 1.0:
        rate = (rate.to(tl.float32) * RATE_SCALE).to(b.dtype)
    return rate.to(tl.float32)


@triton.jit(do_not_specialize=["numel"])
def _delta_gates(
    a,
    b,
    A_log_ptr,
    dt_bias_ptr,
    g_ptr,
    beta_ptr,
    numel,
    N: constexpr,
    RATE_SCALE: constexpr,
    BLOCK: constexpr,
    PDL: constexpr,
):
    begin(PDL)
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < numel
    row, head = (offset // N).to(tl.int64), offset % N
    a = tl.load(item(a, row, head), inside, 0.0).to(tl.float32)
    b = tl.load(item(b, row, head), inside, 0.0)
    A_log = tl.load(A_log_ptr + head, inside, 0.0).to(tl.float32)
    dt_bias = tl.load(dt_bias_ptr + head, inside, 0.0).to(tl.float32)
    tl.store(g_ptr + offset, decay_of(a, A_log, dt_bias), inside)
    tl.store(beta_ptr + offset, rate_of(b, RATE_SCALE).to(beta_ptr.dtype.element_ty), inside)


def refuse_delta_gates(
    platform: Platform, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor
) -> Refusal | None:
    if reason := unfit(platform, a=a, b=b, A_log=A_log, dt_bias=dt_bias) or unlike_shapes(a, b=b):
        return reason
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if a.dim() < 2 or x.dim() != 1 or not known_equal(x.shape[0], a.shape[-1]):
            return Refusal(
                "shape",
                f"{name} is {spell_shape(x.shape)} and a {spell_shape(a.shape)}: expected a number "
                "of each head, and rows of them",
            )
    return None


@ops.delta_gates.kernel("triton", refuses=refuse_delta_gates)
def delta_gates(
    a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rate_scale: float
) -> tuple[Tensor, Tensor]:
    heads = a.shape[-1]
    g = a.new_empty(a.shape, dtype=torch.float32)
    beta = b.new_empty(b.shape)
    if numel := a.numel():
        _delta_gates[(triton.cdiv(numel, BLOCK),)](
            *(indexed(x.reshape(-1, heads)) for x in (a, b)),
            A_log,
            dt_bias,
            g,
            beta,
            numel,
            N=heads,
            RATE_SCALE=rate_scale,
            BLOCK=BLOCK,
            **overlap(a.device),
        )
    return g, beta
