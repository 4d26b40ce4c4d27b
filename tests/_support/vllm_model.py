"""A decoder as vLLM 0.24 builds one with custom_ops "none": tokens [T], norms of vllm.ir, merged
projections, attention as an op that writes its output, whose layer is an argument.

Written from what vLLM computes, without vLLM: names of ops and the spelling of each computation are
those that Dynamo sees there.
"""

from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

WIDTH, HEADS, KV_HEADS, HEAD, HIDDEN, VOCAB, LENGTH = 64, 4, 2, 16, 96, 128, 256
# The attention layers of vLLM's forward context, by name: what they have seen.
SEEN: dict[str, int] = {}


class LayerName(OpaqueBase):
    """The name of a layer as an input of the graph, so that layers share what is compiled."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self):
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)
_LIBRARY = torch.library.Library("vllm", "FRAGMENT")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    layer_name: LayerName,
    output_scale: Tensor | None = None,
    kv_cache_dummy_dep: Tensor | None = None,
) -> None:
    SEEN[layer_name.value] = SEEN.get(layer_name.value, 0) + 1
    assert kv_cache_dummy_dep is not None, "the cache is written before it is read"
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    output.copy_(found[0].transpose(0, 1))


def _cache_update(key: Tensor, value: Tensor, layer_name: LayerName) -> Tensor:
    return key.new_empty(0)


for _name, _function, _mutated, _fake in (
    ("unified_attention_with_output", _attention, ["output"], lambda *args, **kwargs: None),
    ("unified_kv_cache_update", _cache_update, [], lambda key, value, layer: key.new_empty(0)),
):
    _LIBRARY.define(_name + torch.library.infer_schema(_function, mutates_args=_mutated))
    _LIBRARY.impl(_name, _function, "CPU")
    _LIBRARY._register_fake(_name, _fake)


class IrOp:
    """An op of vllm.ir with its implementations, called without a wrapper of torch: as with any
    backend but Inductor.
    """

    def __init__(self, native) -> None:
        self.schema = torch.library.infer_schema(native, mutates_args=[])
        self.impls = {"native": (native, lambda *args: True)}
        self.priority = ["native"]

    def register_impl(self, provider, *, supports_args):
        def register(function):
            assert provider not in self.impls
            assert torch.library.infer_schema(function, mutates_args=[]) == self.schema
            asked = signature(supports_args).parameters.values()
            given = signature(self.impls["native"][0]).parameters.values()
            assert [(p.name, p.default) for p in asked] == [(p.name, p.default) for p in given]
            self.impls[provider] = function, supports_args
            return function

        return register

    def __call__(self, *args):
        for function, supports in (self.impls[name] for name in self.priority):
            if supports(*args):
                return function(*args)
        raise AssertionError("the last one takes all arguments")


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    dtype, x = x.dtype, x.to(torch.float32)
    part = x if variance_size is None else x[..., :variance_size]
    x = x * torch.rsqrt(part.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (x if weight is None else x.to(weight.dtype) * weight).to(dtype)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    total = x.to(torch.float32) + x_residual.to(torch.float32)
    return rms_norm(total, weight, epsilon, variance_size).to(x.dtype), total.to(x.dtype)


class Ops:
    """vllm.ir.ops"""

    def __init__(self) -> None:
        self.rms_norm, self.fused_add_rms_norm = IrOp(rms_norm), IrOp(fused_add_rms_norm)


class RMSNorm(nn.Module):
    def __init__(self, width: int, ops: Ops) -> None:
        super().__init__()
        self.ops, self.weight = ops, nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor | None = None):
        weight = self.weight.data
        if residual is None:
            return self.ops.rms_norm(x, weight, 1e-6, None)
        return self.ops.fused_add_rms_norm(x, residual, weight, 1e-6, None)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shape = x.shape
    x = x.view(len(x), -1, HEAD)
    rot, rest = x[..., :HEAD], x[..., HEAD:]
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    x1, x2 = torch.chunk(rot, 2, dim=-1)
    rot = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    return torch.cat((rot, rest), dim=-1).reshape(shape)


class Attention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        frequencies = 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.arange(LENGTH)[:, None] * frequencies
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1))

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.qkv_proj.weight)
        q, k, v = qkv.split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=-1)
        cos, sin = self.cos_sin_cache.to(x.dtype).index_select(0, positions).chunk(2, dim=-1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        output = torch.empty(len(x), HEADS * HEAD, dtype=x.dtype, device=x.device)
        q, output = q.view(-1, HEADS, HEAD), output.view(-1, HEADS, HEAD)
        k, v = k.view(-1, KV_HEADS, HEAD), v.view(-1, KV_HEADS, HEAD)
        name = LayerName(self.layer_name)
        written = torch.ops.vllm.unified_kv_cache_update(k, v, name)
        torch.ops.vllm.unified_attention_with_output(
            q, k, v, output, name, kv_cache_dummy_dep=written
        )
        return F.linear(output.view(-1, HEADS * HEAD), self.o_proj.weight)


class Layer(nn.Module):
    def __init__(self, name: str, ops: Ops) -> None:
        super().__init__()
        self.self_attn = Attention(f"{name}.self_attn.attn")
        self.gate_up_proj = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.input_layernorm = RMSNorm(WIDTH, ops)
        self.post_attention_layernorm = RMSNorm(WIDTH, ops)

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor | None):
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        x = F.linear(x, self.gate_up_proj.weight)
        half = x.shape[-1] // 2
        x = F.silu(x[..., :half]) * x[..., half:]
        return F.linear(x, self.down_proj.weight), residual


class Model(nn.Module):
    """Hidden states of the tokens, as the part of a model that vLLM compiles."""

    def __init__(self, ops: Ops, layers: int = 2) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(f"model.layers.{i}", ops) for i in range(layers))
        self.norm = RMSNorm(WIDTH, ops)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            x, residual = layer(positions, x, residual)
        return self.norm(x, residual)[0]
