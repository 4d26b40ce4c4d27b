"""Gated DeltaNet (Yang et al. 2025), the linear attention of Qwen3-Next and Qwen3.5: its sizes,
what follows its projections, and the layer of a decoder. Each model has its own projections.

T tokens, D model width, H key heads of width K, N value heads of width V. The convolution runs over
C = 2 H K + N V channels: those of all queries, keys and values.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atomc import ops
from atomc.files.json_types import JSONMapping
from atomc.models.config import (
    AttentionConfig,
    DecoderConfig,
    head_fields,
    integer,
    layer_types,
    model_type,
    only,
)
from atomc.models.layers import OnePlusRMSNorm
from atomc.models.rotary import rope_parameters, rotated_columns

LAYER_TYPES = ("linear_attention", "full_attention")
# Of the columns of a head, if config.json does not say how many are rotated.
PARTIAL_ROTARY = 0.25


@dataclass(frozen=True)
class DeltaNetSizes:
    """Names as in config.json, without their prefix `linear_`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @classmethod
    def from_hf(cls, hf: JSONMapping) -> Self:
        """Raises ValueError for an invalid value."""
        key_heads = integer(hf, "linear_num_key_heads", 16)
        value_heads = integer(hf, "linear_num_value_heads", 32)
        if value_heads % key_heads:
            raise ValueError(
                f"{model_type(hf)}: linear_num_value_heads {value_heads} is not a multiple of "
                f"linear_num_key_heads {key_heads}"
            )
        kernel = integer(hf, "linear_conv_kernel_dim", 4)
        if kernel < 2:
            raise ValueError(
                f"{model_type(hf)}: linear_conv_kernel_dim {kernel} convolves nothing, expected at "
                "least 2"
            )
        return cls(
            key_heads,
            value_heads,
            integer(hf, "linear_key_head_dim", 128),
            integer(hf, "linear_value_head_dim", 128),
            kernel,
        )

    @property
    def keys(self) -> int:
        """Columns of all keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Columns of all values."""
        return self.num_value_heads * self.value_head_dim


def hybrid_layer_types(hf: JSONMapping) -> tuple[str, ...]:
    """One of LAYER_TYPES per layer; by default, every full_attention_interval-th is full."""
    count, interval = integer(hf, "num_hidden_layers"), integer(hf, "full_attention_interval", 4)
    default = [LAYER_TYPES[(i + 1) % interval == 0] for i in range(count)]
    return layer_types(hf, default, LAYER_TYPES)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(AttentionConfig):
    """A decoder of which some layers have a DeltaNet in the place of attention."""

    layer_types: tuple[str, ...]
    delta_net: DeltaNetSizes
    rotated_columns: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6

    @classmethod
    def from_hf(cls, hf: JSONMapping, **computed: object) -> Self:
        only(hf, "hidden_act", "silu")
        heads, rope = head_fields(hf, 256), rope_parameters(hf, PARTIAL_ROTARY)
        return cls.read(
            hf,
            **heads,
            layer_types=hybrid_layer_types(hf),
            delta_net=DeltaNetSizes.from_hf(hf),
            rotated_columns=rotated_columns(hf, rope, heads["head_dim"]),
            rope_parameters=rope,
            **computed,
        )


class Projected(NamedTuple):
    """What a layer projects from its input.

    qkv   [..., T, C], the channels of the convolution
    z     [..., T, N, V], the gate of the result
    beta  [..., T, N], the rate at which a token replaces what its key has stored
    a     [..., T, N], from which the decay is computed
    """

    qkv: Tensor
    z: Tensor
    beta: Tensor
    a: Tensor


class Recurrence(Protocol):
    """What a layer has between its projections and its norm; names as in Hugging Face."""

    conv1d: nn.Conv1d
    A_log: nn.Parameter
    dt_bias: nn.Parameter
    key_dim: int
    value_dim: int
    head_k_dim: int
    head_v_dim: int


def recur(
    layer: Recurrence, x: Projected, conv_state: Tensor | None, delta_state: Tensor | None
) -> Tensor:
    """The gated delta rule over convolved queries, keys and values -> [..., T, N, V]."""
    conv = layer.conv1d
    qkv = ops.causal_conv1d(x.qkv, conv.weight.squeeze(1), conv.bias, conv_state, activation="silu")
    q, k, v = torch.split(qkv, [layer.key_dim, layer.key_dim, layer.value_dim], -1)
    # In fp32: in fp16 exp(A_log) may be infinite.
    decay = -layer.A_log.float().exp() * F.softplus(x.a.float() + layer.dt_bias)
    return ops.gated_delta_rule(
        torch.unflatten(q, -1, (-1, layer.head_k_dim)),
        torch.unflatten(k, -1, (-1, layer.head_k_dim)),
        torch.unflatten(v, -1, (-1, layer.head_v_dim)),
        decay,
        x.beta,
        delta_state,
        scale=layer.head_k_dim**-0.5,
    )


class GatedRMSNorm(nn.Module):
    """RMSNorm with a weight, times silu(gate). x and gate [..., V] -> [..., V]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + self.eps)
        weighted = self.weight * normed.to(x.dtype)
        return (weighted * F.silu(gate.float())).to(x.dtype)


class DeltaNet(nn.Module, ABC):
    """The part that all of them have. A model adds its projections, and `project`."""

    def __init__(self, width: int, sizes: DeltaNetSizes, eps: float):
        super().__init__()
        self.key_dim, self.value_dim = sizes.keys, sizes.values
        self.head_k_dim, self.head_v_dim = sizes.key_head_dim, sizes.value_head_dim
        heads, channels = sizes.num_value_heads, 2 * sizes.keys + sizes.values
        kernel = sizes.conv_kernel_dim
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.conv1d = nn.Conv1d(channels, channels, kernel, groups=channels, bias=False)
        self.norm = GatedRMSNorm(sizes.value_head_dim, eps)
        self.out_proj = nn.Linear(sizes.values, width, bias=False)
        self.conv_state = ops.conv_state(channels, kernel)
        self.delta_state = ops.delta_state(heads, sizes.key_head_dim, sizes.value_head_dim)

    @abstractmethod
    def project(self, x_TD: Tensor) -> Projected: ...

    def forward(self, x_TD: Tensor) -> Tensor:
        projected = self.project(x_TD)
        out_TNV = recur(self, projected, self.conv_state, self.delta_state)
        out_TD: Tensor = self.out_proj(self.norm(out_TNV, projected.z).flatten(-2))
        return out_TD


class DeltaNetLayer(nn.Module):
    """A layer of a decoder with a DeltaNet in the place of attention (see decoder.Layer)."""

    def __init__(self, config: DecoderConfig, delta_net: DeltaNet, mlp: nn.Module):
        super().__init__()
        self.linear_attn = delta_net
        self.mlp = mlp
        self.input_layernorm = OnePlusRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = OnePlusRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_TD = x_TD + self.linear_attn(self.input_layernorm(x_TD))
        x_TD = x_TD + self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD
