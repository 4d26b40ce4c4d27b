"""RMSNorm and LayerNorm, alone."""

import torch
import torch.nn.functional as F
from torch import Tensor

from spellings import Spelling

T, D, GROUPS, EPS = 7, 33, 3, 1e-6
BF16 = (torch.bfloat16,)


def random(dtype: torch.dtype, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape).to(dtype) for shape in shapes)


def row(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows and a weight."""
    return random(dtype, (T, D), (D,))


def alone(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows."""
    return random(dtype, (T, D))


def gate(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows, the rows of a gate, and a weight."""
    return random(dtype, (T, D), (T, D), (D,))


def biased(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows, a weight, and a bias."""
    return random(dtype, (T, D), (D,), (D,))


def mean(x: Tensor, keepdim: bool = True) -> Tensor:
    return x.float().pow(2).mean(-1, keepdim=keepdim) + EPS


def weighted(x: Tensor, normed: Tensor, w: Tensor) -> Tensor:
    return w * normed.to(x.dtype)


def stock(x: Tensor, w: Tensor) -> Tensor:
    return weighted(x, x.float() * torch.rsqrt(mean(x)), w)


def residual_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x.float() + residual.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS)
    return normed.to(x.dtype) * w, total.to(x.dtype)


def by_sum(x: Tensor, w: Tensor) -> Tensor:
    variance = x.float().square().sum(-1, keepdim=True) / x.shape[-1]
    return weighted(x, x.float() * torch.rsqrt(variance + EPS), w)


def by_scaled_sum(x: Tensor, w: Tensor) -> Tensor:
    variance = (x.float() * x.float()).sum(-1, keepdim=True) * (1 / x.shape[-1])
    return weighted(x, x.float() * torch.rsqrt(variance + EPS), w)


def one_plus(x: Tensor, w: Tensor) -> Tensor:
    y = x.float() / torch.sqrt(mean(x))
    return (y * (1.0 + w.float())).type_as(x)


def fp32_product(x: Tensor, w: Tensor) -> Tensor:
    return (w.float() * (x.float() * torch.rsqrt(mean(x)))).to(x.dtype)


def gated(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    y = x.float() * F.silu(z.float())
    return weighted(x, y * torch.rsqrt(mean(y)), w)


def gated_after(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    return (stock(x, w) * F.silu(z.float())).to(x.dtype)


def grouped(x: Tensor, z: Tensor, w: Tensor) -> Tensor:
    y = (x.float() * F.silu(z.float())).view(T, GROUPS, D // GROUPS)
    return weighted(x, (y * torch.rsqrt(mean(y))).view(T, D), w)


def eps_outside(x: Tensor, w: Tensor) -> Tensor:
    root = torch.sqrt(x.float().pow(2).mean(-1, keepdim=True))
    return weighted(x, x.float() / (root + EPS), w)


def of_norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5 + EPS))


def of_clamped_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.norm(2, dim=-1, keepdim=True) * D**-0.5).clamp(min=EPS) * w


def in_16_bits(x: Tensor, w: Tensor) -> Tensor:
    return w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def standardized(x: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + EPS)


SPELLINGS = (
    Spelling("w * (x * rsqrt(mean + eps))", "Llama, Qwen3, most", "rms_norm", stock, row),
    Spelling(
        "F.rms_norm(x, shape, w)",
        "`nn.RMSNorm`",
        "rms_norm",
        lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        row,
    ),
    Spelling(
        "x / sqrt(mean + eps)",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() / torch.sqrt(mean(x)), w),
        row,
    ),
    Spelling("x / sqrt(mean + eps) * (1 + w)", "research code", "rms_norm", one_plus, row),
    Spelling(
        "x * (mean + eps) ** -0.5",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() * mean(x) ** -0.5, w),
        row,
    ),
    Spelling(
        "x / (mean + eps) ** 0.5",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() / mean(x) ** 0.5, w),
        row,
    ),
    Spelling(
        "x * reciprocal(sqrt(mean + eps))",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() * torch.reciprocal(torch.sqrt(mean(x))), w),
        row,
    ),
    Spelling(
        "x * (1 / rms)",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() * (1 / mean(x).sqrt()), w),
        row,
    ),
    Spelling("x * rsqrt(sum / n + eps)", "research code", "rms_norm", by_sum, row),
    Spelling("x * rsqrt(sum * (1 / n) + eps)", "research code", "rms_norm", by_scaled_sum, row),
    Spelling(
        "x * rsqrt(mean(-1) + eps).unsqueeze(-1)",
        "research code",
        "rms_norm",
        lambda x, w: weighted(x, x.float() * torch.rsqrt(mean(x, False)).unsqueeze(-1), w),
        row,
    ),
    Spelling(
        "x / sqrt(mean(-1)[..., None] + eps)",
        "research code",
        "rms_norm",
        lambda x, w: weighted(
            x, x.float() / torch.sqrt(x.float().pow(2).mean(-1)[..., None] + EPS), w
        ),
        row,
    ),
    Spelling(
        "x * rsqrt(mean + eps), x in 16 bits",
        "T5",
        "rms_norm",
        lambda x, w: weighted(x, x * torch.rsqrt(mean(x)), w),
        row,
    ),
    Spelling("w.float() * (x * rsqrt(mean + eps))", "Nemotron-H", "rms_norm", fp32_product, row),
    Spelling(
        "x * rsqrt(mean + eps), no weight",
        "NanoChat, Llama 4's q and k",
        "rms_norm",
        lambda x: (x.float() * torch.rsqrt(mean(x))).type_as(x),
        alone,
    ),
    Spelling(
        "x * rsqrt(mean + eps).to(x.dtype), no weight",
        "DeepSeek-V4",
        "rms_norm",
        lambda x: x * torch.rsqrt(mean(x)).to(x.dtype),
        alone,
    ),
    Spelling(
        "s = x + residual.float(), s.to(x.dtype) and w * (s * rsqrt(mean + eps)).to(x.dtype)",
        "vLLM",
        "add_rms_norm",
        residual_norm,
        gate,
    ),
    Spelling(
        "F.rms_norm(x, shape)",
        "nanochat",
        "rms_norm",
        lambda x: F.rms_norm(x, (D,)),
        alone,
    ),
    Spelling(
        "rms_norm(x) * silu(gate.float())",
        "Qwen3-Next, Qwen3.5",
        "rms_norm",
        gated_after,
        gate,
    ),
    Spelling(
        "rms_norm(x * silu(gate))",
        "Mamba-2, Bamba",
        "rms_norm",
        gated,
        gate,
        reason="expected `weight` in float32 .the dtype of `x`.; found bfloat16",
        table="`x` is in fp32, the weight and the result in 16 bits (a model in fp32 matches)",
        dtypes=BF16,
    ),
    Spelling(
        "rms_norm(x.view(groups))",
        "Zamba-2, Nemotron-H",
        "rms_norm",
        grouped,
        gate,
        reason=r"expected mul reading mul .* directly; found view\(shape=\(7, 33\)\).* in between",
        table="a view between the norm of each group and the weight of all",
    ),
    Spelling(
        "x / (sqrt(mean) + eps)",
        "research code",
        "rms_norm",
        eps_outside,
        row,
        reason="found eps outside of the root",
        table="eps is outside of the root",
    ),
    Spelling(
        "x / (x.norm() / sqrt(n) + eps)",
        "the paper's code",
        "rms_norm",
        of_norm,
        row,
        reason="found eps outside of the root",
        table="eps is outside of the root",
    ),
    Spelling(
        "x / (x.norm() / sqrt(n)).clamp(eps)",
        "lucidrains' PaLM",
        "rms_norm",
        of_clamped_norm,
        row,
        reason="found a norm that is clamped, without eps under a root",
        table="the norm is clamped, there is no eps under a root",
    ),
    Spelling(
        "F.normalize(x) * sqrt(n) * w",
        "x-transformers",
        "rms_norm",
        lambda x, w: F.normalize(x, dim=-1) * D**0.5 * w,
        row,
        reason="found a norm that is clamped, without eps under a root",
        table="the norm is clamped, there is no eps under a root",
    ),
    Spelling(
        "x / sqrt(mean + eps), all in 16 bits",
        "research code",
        "rms_norm",
        in_16_bits,
        row,
        reason="found x / sqrt in 16 bits, which the op computes in fp32",
        table="the op computes in fp32",
        dtypes=BF16,
    ),
    Spelling(
        "F.layer_norm(x, shape, w, b)",
        "`nn.LayerNorm`",
        "layer_norm",
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        biased,
    ),
    Spelling(
        "w.float() * (x - mean) * rsqrt((x - mean).pow(2).mean() + eps)",
        "Cohere",
        "layer_norm",
        lambda x, w: (w.float() * standardized(x.float())).to(x.dtype),
        row,
    ),
    Spelling(
        "w.float() * (x - mean) * rsqrt((x - mean).pow(2).mean() + eps) + b.float()",
        "research code",
        "layer_norm",
        lambda x, w, b: (w.float() * standardized(x.float()) + b.float()).to(x.dtype),
        biased,
    ),
    Spelling(
        "w * ((x - mean) * rsqrt((x - mean).pow(2).mean() + eps)).to(x.dtype)",
        "research code",
        "layer_norm",
        lambda x, w: w * standardized(x.float()).to(x.dtype),
        row,
        reason=r"expected mul reading mul .* directly; found cast.dtype=bfloat16.* in between",
        table="the op rounds once",
        dtypes=BF16,
    ),
)
