"""Rotary position embeddings (Su et al. 2021): frequencies from a config, cos and sin tables for
positions, and the rotation.

T tokens, N heads, H head width. Scalings (linear, llama3, yarn) change only the H/2 frequencies and
a factor on the tables. The operations are those of Hugging Face, so that results are equal bit for
bit.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atomc.files.json_types import JSONLike, JSONMapping
from atomc.models.config import integer, model_type, number

# As rope_parameters returns them.
Rope = JSONMapping

NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
# Positive if given.
NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
ZERO_IS_NONE = ("mscale", "mscale_all_dim")


def rope_parameters(hf: JSONMapping, partial: float | None = None) -> Rope:
    """The rope settings as in transformers 5, also from `rope_theta` and `rope_scaling`.

    partial  partial_rotary_factor of a config without the field, for a model that may rotate only
             the first columns of a head (apply_partial_rope); None: the model rotates all

    Raises ValueError for an unsupported rope_type, and for a missing or invalid number.
    """
    stored = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = _supported(hf, stored, partial)
    rope_type = str(rope["rope_type"])
    rope["model_type"] = model_type(hf)  # for the errors
    rope["rope_theta"] = number(rope, "rope_theta", number(hf, "rope_theta", 10000.0))
    for name in NEEDED[rope_type]:
        if rope.get(name) is None:
            raise ValueError(
                f"{model_type(hf)}: rope_type {rope_type!r} needs the number {name!r}, "
                f"rope_parameters has {stored}"
            )
    for name in NUMBERS:
        if rope.get(name) is not None and not (name in ZERO_IS_NONE and rope[name] == 0):
            rope[name] = number(rope, name, 1.0)
    if rope_type in ("llama3", "yarn"):
        longest = integer(hf, "max_position_embeddings")
        # A top-level value wins, as in transformers.
        original = integer(
            hf,
            "original_max_position_embeddings",
            integer(rope, "original_max_position_embeddings", longest),
        )
        rope["original_max_position_embeddings"] = original
        rope.setdefault("factor", None)
        rope["factor"] = number(rope, "factor", longest / original)
    _check_pairs(rope, rope_type)
    del rope["model_type"]
    return rope


def _supported(hf: JSONMapping, stored: JSONLike, partial: float | None) -> dict[str, JSONLike]:
    """The given settings with their rope_type. Raises ValueError for unsupported settings."""
    if not isinstance(stored, dict):
        raise ValueError(
            f"{model_type(hf)}: rope_parameters {stored!r:.40} is not an object such as "
            "{'rope_type': 'default', 'rope_theta': 10000.0}"
        )
    if any(isinstance(value, dict) for value in stored.values()):
        raise ValueError(
            f"{model_type(hf)}: rope_parameters per layer type ({', '.join(stored)}) are not "
            "supported"
        )
    rope_type = stored.get("rope_type", stored.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in NEEDED:
        raise ValueError(
            f"{model_type(hf)}: rope_type {rope_type!r} is not supported, only {', '.join(NEEDED)}"
        )
    factor = (
        stored.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or partial or 1.0
    )
    if factor != 1.0 and (partial is None or not isinstance(factor, float) or not 0 < factor < 1):
        supported = "1.0" if partial is None else "a number above 0 and up to 1.0"
        raise ValueError(
            f"{model_type(hf)}: partial_rotary_factor {factor!r} is not supported, only {supported}"
        )
    return {**stored, "rope_type": rope_type, "partial_rotary_factor": factor}


def rotated_columns(hf: JSONMapping, rope: Rope, head_dim: int) -> int:
    """The number of columns of a head that are rotated. Must be even: positions pair columns."""
    columns = int(head_dim * number(rope, "partial_rotary_factor"))
    if columns % 2 or not columns:
        raise ValueError(
            f"{model_type(hf)}: partial_rotary_factor {rope['partial_rotary_factor']} rotates "
            f"{columns} of {head_dim} columns, rotary positions need pairs of columns"
        )
    return columns


def _check_pairs(rope: Rope, rope_type: str) -> None:
    """Raise ValueError for numbers between which frequencies cannot be interpolated."""
    what = f"{model_type(rope)}: rope_type {rope_type!r}"
    if rope_type == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        if low >= high:
            raise ValueError(f"{what}: low_freq_factor {low} is not below high_freq_factor {high}")
    theta = number(rope, "rope_theta")
    if rope_type == "yarn" and theta <= 1:
        raise ValueError(f"{what}: rope_theta {theta} is not above 1")


def _default(rope: Rope, head_dim: int) -> Tensor:
    columns = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu")
    return 1.0 / (number(rope, "rope_theta") ** (columns / head_dim))


def _linear(rope: Rope, head_dim: int) -> Tensor:
    return _default(rope, head_dim) / number(rope, "factor")


def _llama3(rope: Rope, head_dim: int) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high frequencies are unchanged, and
    those in between interpolated.
    """
    inv_freq = _default(rope, head_dim)
    factor, low, high = (
        number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    length = integer(rope, "original_max_position_embeddings")
    wave = 2 * math.pi / inv_freq
    stretched = torch.where(wave > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wave - low) / (high - low)
    between = (1 - smooth) * stretched / factor + smooth * stretched
    is_between = ~(wave < length / high) & ~(wave > length / low)
    return torch.where(is_between, between, stretched)


def yarn_mscale(factor: float, weight: float) -> float:
    """The temperature of YaRN for positions that are stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _optional(rope: Rope, name: str) -> float | None:
    return number(rope, name) if rope.get(name) else None


def _scaling(rope: Rope) -> float:
    """The factor on the tables: YaRN's temperature, else 1."""
    if rope["rope_type"] != "yarn":
        return 1.0
    names = ("attention_factor", "mscale", "mscale_all_dim")
    scaling, numerator, denominator = (_optional(rope, name) for name in names)
    factor = number(rope, "factor")
    if scaling is None and numerator and denominator:
        scaling = yarn_mscale(factor, numerator) / yarn_mscale(factor, denominator)
    return yarn_mscale(factor, 1.0) if scaling is None else scaling


def _yarn(rope: Rope, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023): NTK-by-parts interpolation."""
    base, factor = number(rope, "rope_theta"), number(rope, "factor")
    length = integer(rope, "original_max_position_embeddings")

    def column(rotations: float) -> float:
        """The column of the wave with this many rotations over the original length (equation 17 of
        the paper, solved for the column).
        """
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = column(_optional(rope, "beta_fast") or 32)
    high = column(_optional(rope, "beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp(
        (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1
    )

    columns = torch.arange(0, head_dim, 2, device="cpu").to(torch.float32)
    waves = base ** (columns / head_dim)
    extrapolated = 1 - ramp
    return 1.0 / (factor * waves) * (1 - extrapolated) + 1.0 / waves * extrapolated


FREQUENCIES: dict[str, Callable[[Rope, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class Rotary(nn.Module):
    """The cos and sin tables of the given positions.

    On meta the frequencies are not computed: their number is only plausible once the weights of the
    checkpoint have the same head width.
    """

    inv_freq: Tensor

    def __init__(self, rope: Rope, head_dim: int):
        super().__init__()
        self.rope, self.head_dim, self.scaling = rope, head_dim, _scaling(rope)
        self.inv_freq = nn.Buffer(self.frequencies(torch.get_default_device()), persistent=False)

    def frequencies(self, device: torch.device) -> Tensor:
        """[H/2] fp32; without values on meta."""
        if device.type == "meta":
            return torch.empty((self.head_dim + 1) // 2, dtype=torch.float32, device=device)
        return FREQUENCIES[str(self.rope["rope_type"])](self.rope, self.head_dim).to(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Move to the model's device, but keep fp32: bf16 has wrong angles at large positions."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = self.frequencies(self.inv_freq.device)
        return self

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [..., T] -> cos and sin [..., T, 1, H] in x.dtype."""
        return self.tables(positions[..., None].float() * self.inv_freq, x.dtype)

    def tables(self, freqs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """freqs [..., T, H/2] -> cos and sin [..., T, 1, H]."""
        angles = torch.cat((freqs, freqs), dim=-1)
        cos = angles.cos() * self.scaling
        sin = angles.sin() * self.scaling
        return cos.to(dtype).unsqueeze(-2), sin.to(dtype).unsqueeze(-2)


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rope(q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q and k [..., T, heads, H] rotated by cos and sin [..., T, 1, H]."""
    q_rotated = (q_TNH * cos) + (rotate_half(q_TNH) * sin)
    k_rotated = (k_TKH * cos) + (rotate_half(k_TKH) * sin)
    return q_rotated, k_rotated


def apply_partial_rope(
    q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As apply_rope, of the first columns of a head: the R of cos and sin [..., T, 1, R]."""
    rotated = cos.shape[-1]
    q_rotated, k_rotated = apply_rope(q_TNH[..., :rotated], k_TKH[..., :rotated], cos, sin)
    q_whole = torch.cat((q_rotated, q_TNH[..., rotated:]), dim=-1)
    k_whole = torch.cat((k_rotated, k_TKH[..., rotated:]), dim=-1)
    return q_whole, k_whole


def apply_interleaved_rope(
    q_TNH: Tensor, k_TKH: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """As apply_rope, of columns stored in pairs (DeepSeek): columns 2i and 2i + 1 are turned by
    angle i, and become columns i and i + H/2.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    return turned(q_TNH), turned(k_TKH)
