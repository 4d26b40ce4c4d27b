"""Latent attention as a program writes it, its weights absorbed into the queries, and the pass that
gives it a paged cache.

Compiled for the runtime, attention over a handle is bound by passes/bind_state.py; of latent
attention, whose keys are a latent and a rotated part for all heads, this does the same.
"""

from typing import Any

import torch
from rewriting import TIDY
from torch import Tensor, nn
from torch.fx import GraphModule

from atomc import ops
from atomc.graph.canonical import call, value
from atomc.graph.edit import infer
from atomc.ops.formats import FP8
from atomc.ops.inputs import StepInput
from atomc.ops.state import StateSpec
from atomc.passes.bind_state import RuntimeInputs
from atomc.rewriting.graph_pass import Context, Pass
from atomc.rewriting.rewrite import Fired

aten = torch.ops.aten


def bind_latent(gm: GraphModule, context: Context) -> list[Fired]:
    """attention(q, cat(latent, k_pe), latent, handle) becomes a write into the latent cache and a
    paged read.
    """
    graph = gm.graph
    fired: list[Fired] = []
    inputs = RuntimeInputs(graph)
    for node in [node for node in graph.nodes if node.target is ops.attention.overload]:
        q, k, v, handle = node.args[:4]
        latent, k_pe = call(k).operands
        assert latent is v and call(v).op == "view", "values are the latent, as one head"
        width, fp8 = value(k).shape[-1], value(handle).dtype in FP8
        spec = StateSpec.of(
            "latent", "latent", ((width,),), value(handle).dtype if fp8 else value(k).dtype
        )
        cache, *scales = inputs.state(len(fired), spec).values()
        slots, tables = (
            inputs.step(StepInput(field, 0), value(q).shape[0])
            for field in ("slots", "block_tables")
        )
        starts, lengths = (
            inputs.step(StepInput(field), value(q).shape[0])
            for field in ("query_start", "seq_lens")
        )
        sequences = starts, lengths, tables
        with graph.inserting_before(node):
            token = graph.call_function(
                ops.mla_kv_write.overload, (call(v).operands[0], k_pe, cache, slots, *scales)
            )
            keys = graph.call_function(aten.unsqueeze.default, (cache, 2))
            values = graph.call_function(aten.slice.Tensor, (keys, 3, 0, value(v).shape[-1]))
            read = graph.call_function(
                ops.paged_attention.overload,
                (q, keys, values, *sequences, token, None, *scales, *scales),
                {"scale": node.kwargs["scale"]},
            )
            for made in (token, keys, values, read):
                made.meta.update(
                    {
                        key: node.meta[key]
                        for key in ("nn_module_stack", "stack_trace")
                        if key in node.meta
                    }
                )
                infer(made)
        node.replace_all_uses_with(read)
        graph.erase_node(node)
        fired.append(Fired("bind_latent", node, {}, {node}, [token, read]))
    return fired + ([] if not fired else TIDY.run(gm, context))


BIND_LATENT = Pass("bind_latent", bind_latent)


def latent_handle(width: int, fp8: bool = False) -> Tensor:
    """The state handle of a layer whose latent and rotated key are so wide."""
    return ops.kv_state(1, width).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)


class Absorbed(nn.Module):
    """The attention of a stock DeepSeek-V3 layer over tokens [T, D], the keys' half of kv_b_proj
    absorbed into its queries.

    scheme  None, "fp8" or "mxfp4": of that product
    """

    def __init__(self, attention: Any, scheme: str | None, fp8_cache: bool = False):
        super().__init__()
        self.stock, self.scheme = attention, scheme
        heads = attention.kv_b_proj.weight.unflatten(0, (attention.num_heads, -1))
        weight = heads[:, : attention.qk_nope_head_dim].transpose(1, 2).contiguous()  # [H, L, P]
        self.values = nn.Parameter(
            heads[:, attention.qk_nope_head_dim :].contiguous(), requires_grad=False
        )
        if scheme == "fp8":
            scale = weight.abs().max().float().reshape(1) / 448
            codes = ops.quant_fp8_static(weight, scale)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        elif scheme == "mxfp4":
            codes, scale = ops.quant_mxfp4(weight)
            self.weight_scale = nn.Parameter(scale, requires_grad=False)
        else:
            codes = weight
        self.weight = nn.Parameter(codes, requires_grad=False)
        width = attention.kv_lora_rank + attention.qk_rope_head_dim
        self.kv: Tensor
        self.register_buffer("kv", latent_handle(width, fp8_cache), persistent=False)

    def to_latent(self, q: Tensor) -> Tensor:
        if self.scheme == "fp8":
            codes, scales = ops.quant_fp8_group(q)
            return ops.scaled_bmm_fp8(
                codes, self.weight, scales, self.weight_scale, out_dtype=q.dtype
            )
        if self.scheme == "mxfp4":
            codes, scales = ops.quant_mxfp4(q)
            return ops.bmm_mxfp4(codes, self.weight, scales, self.weight_scale, out_dtype=q.dtype)
        return torch.einsum("thp,hlp->thl", q, self.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            apply_rotary_pos_emb_interleave,
        )

        s: Any = self.stock
        q = s.q_b_proj(s.q_a_layernorm(s.q_a_proj(x))).unflatten(-1, (-1, s.qk_head_dim))
        q_nope, q_pe = q.split([s.qk_nope_head_dim, s.qk_rope_head_dim], -1)
        latent, k_pe = s.kv_a_proj_with_mqa(x).split([s.kv_lora_rank, s.qk_rope_head_dim], -1)
        latent = s.kv_a_layernorm(latent).unsqueeze(-2)
        q_pe, k_pe = apply_rotary_pos_emb_interleave(q_pe, k_pe.unsqueeze(-2), cos, sin)
        q = torch.cat((self.to_latent(q_nope), q_pe), -1)
        out = ops.attention(q, torch.cat((latent, k_pe), -1), latent, self.kv, scale=s.scaling)
        return x + s.o_proj(torch.einsum("thl,hvl->thv", out, self.values).flatten(-2))
