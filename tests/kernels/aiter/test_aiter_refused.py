"""Calls that AITER's functions compute otherwise or abort on: each is refused, and over the stand-ins
the kernel fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import KERNELS, SHUFFLED
from aiter_cases import cases as kernel_cases_of
from argument_changes import placed
from compare import compare
from expert_cases import COLUMNS, GROUPS, WHOLE
from kernel_cases.attention import attended, paged
from kernel_cases.draw import EPS, Draw, cache_scales
from kernel_cases.experts import fp8, fp8_block, int4, mxfp4, route
from kernel_cases.indexer import index_written, ranked_codes
from kernel_cases.linear import LINEAR_FP32
from kernel_cases.mla import (
    half_multiplied,
    latent_attended,
    latent_multiplied,
    latent_paged,
    latent_rope_written,
    latent_written,
    multiplied_and_written,
    split_and_joined,
)
from kernel_cases.quant import normed_pair
from kernel_cases.rope import roped
from kernel_cases.rows import reducing
from kernel_cases.scaled_linear import int8_operands, mxfp4_operands, scaled_blocks, scaled_fp8
from kernel_cases.state import narrow_values, norm_rope_written, rope_written, written
from row_cases import by_column, halves
from stand_ins.collectives import PEERS, PROCESSES
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from atomc.kernels.aiter import library
from atomc.kernels.aiter.attention import shuffled_cache
from atomc.kernels.aiter.collective.collective import get_tp_group
from atomc.kernels.aiter.rows import norm_rope_kv_write
from atomc.ops.op import REGISTRY, Refusal, refusal
from atomc.platform import Platform

HERE = replace(Platform.named("gfx950"), here=True)
LATENT = {"latent": 512, "rotated": 64, "heads": 4}
# Of stand-ins and of comparisons, some by torch in a stand-in.
FAILURES = (AssertionError, RuntimeError, LookupError, ValueError, NotImplementedError)
Make = Callable[..., dict[str, Any]]


def rows(draw: Draw, *shape: int, residual: bool = False, **rest: Any) -> dict[str, Any]:
    given = {"x": draw.normal(*shape), "weight": draw.normal(shape[-1]), "eps": EPS, **rest}
    return given | ({"residual": draw.normal(*shape)} if residual else {})


def x_of(draw: Draw, *shape: int, dtype: torch.dtype | None = None, **rest: Any) -> dict[str, Any]:
    return {"x": draw.normal(*shape, dtype=dtype), **rest}


def in_dtype(make: Make, draw: Draw, dtype: torch.dtype, *names: str) -> dict[str, Any]:
    given = make(draw)
    return given | {name: given[name].to(dtype) for name in names}


def of_tokens_that_share_angles(make: Make, *names: str) -> Make:
    """Tables with one row for all tokens."""

    def one_row(draw: Draw) -> dict[str, Any]:
        given = make(draw)
        return given | {name: given[name][:1] for name in names}

    return one_row


def of_blocks(make: Make, size: int) -> Make:
    """A cache whose blocks have so many tokens."""

    def resized(draw: Draw) -> dict[str, Any]:
        given = make(draw)
        for name in given.keys() & {"k_cache", "v_cache", "kv_cache"}:
            blocks, own = given[name].shape[:2]
            tokens = given[name].flatten(0, 1)
            given[name] = (
                tokens[: blocks * own // size * size].unflatten(0, (-1, size)).contiguous()
            )
        return given

    return resized


def of_two_batches(make: Make, *names: str) -> Make:
    """With tokens in two batches."""

    def batched(draw: Draw) -> dict[str, Any]:
        given = make(draw)
        return given | {name: given[name].unflatten(0, (2, -1)) for name in names}

    return batched


def overlapping(x: Tensor) -> Tensor:
    """x [2, 2] with the stride between columns that columns of two have, and rows further apart."""
    memory = x.new_zeros(8).as_strided((2, 2), (5, 2))
    return memory.copy_(x)


def behind_tokens(make: Make, *names: str) -> Make:
    """With a batch of one behind the tokens."""

    def batched(draw: Draw) -> dict[str, Any]:
        given = make(draw)
        return given | {name: given[name].unsqueeze(1) for name in names}

    return batched


def one_scale(draw: Draw, name: str) -> dict[str, Any]:
    """fp8 whose other scales are those of rows."""
    given = scaled_fp8(draw, 3, 512, out=128)
    return given | {name: given[name].flatten()[:1]}


def two_norms(draw: Draw, x: int, y: int, **rest: Any) -> dict[str, Any]:
    weights = {"x_weight": draw.normal(x), "y_weight": draw.normal(y), "eps": EPS}
    return {"x": draw.normal(3, x), "y": draw.normal(3, y), **weights, **rest}


def halves_of(draw: Draw, width: int, **rest: Any) -> dict[str, Any]:
    return halves(draw, 3, width, **rest)


def without_heads(draw: Draw) -> dict[str, Any]:
    given = roped(draw, heads=1)
    return given | {name: given[name].squeeze(1) for name in ("x", "cos", "sin")}


CASES: dict[str, tuple[str, Make]] = {
    **{
        f"fp8, one number as {name}, {file}": (
            f"{file}.scaled_linear_fp8",
            partial(one_scale, name=name),
        )
        for file in ("scaled_linear", "scaled_linear_rows", "linear_triton")
        for name in ("x_scale", "weight_scale")
    },
    **{
        f"{' and '.join(names)} in {dtype} multiplied to fp32": (
            "linear_triton.linear_fp32",
            lambda draw, names=names, dtype=dtype: in_dtype(
                LINEAR_FP32["odd sizes"], draw, dtype, *names
            ),
        )
        for dtype, *names in ((torch.float32, "x", "weight"), (torch.float16, "weight"))
    },
    **{
        f"two norms of {x} and {y} columns": (
            "norm_pair.rms_norm_pair",
            partial(two_norms, x=x, y=y),
        )
        for x, y in ((77, 64), (64, 77), (8200, 64), (64, 8200))
    },
    "two norms of other rows": (
        "norm_pair.rms_norm_pair",
        partial(normed_pair, kind="other rows"),
    ),
    "codes of 78 columns beside a norm": (
        "norm_pair.rms_norm_pair_quant",
        partial(two_norms, x=78, y=64, scheme="fp8_per_token", quantize_y=False),
    ),
    "two quantized norms": (
        "norm_pair.rms_norm_pair_quant",
        partial(two_norms, x=128, y=128, scheme="fp8_per_token"),
    ),
    "codes under a given scale beside a norm": (
        "norm_pair.rms_norm_pair_quant",
        lambda draw: (
            two_norms(draw, 128, 64, scheme="fp8_static", quantize_y=False)
            | {"x_scale": torch.tensor([0.5])}
        ),
    ),
    "fp8 by blocks, out in fp32": (
        "scaled_linear_blocks.scaled_linear_fp8_block",
        lambda draw: by_column(scaled_blocks(draw, 3, 256, out=64)) | {"out_dtype": torch.float32},
    ),
    "fp8 by blocks, a weight by column": (
        "scaled_linear.scaled_linear_fp8_block",
        lambda draw: (
            (given := scaled_blocks(draw, 3, 128, out=128))
            | {"weight": given["weight"].t().contiguous().t()}
        ),
    ),
    "MXFP4 by 16 bits": (
        "scaled_linear.linear_mxfp4",
        lambda draw: mxfp4_operands(draw, 3, 256, out=48),
    ),
    "MXFP4 by 16 bits in Triton": (
        "linear_triton.linear_mxfp4",
        lambda draw: mxfp4_operands(draw, 3, 256, out=48),
    ),
    "a sum of whole numbers": (
        "collective.all_reduce",
        reducing(lambda draw: {"x": draw.below(9, 3, 8)}),
    ),
    **{
        f"a sum of rows of {shape[1]}": (
            "collective.allreduce_add_rms_norm",
            reducing(lambda draw, shape=shape: rows(draw, *shape, residual=True)),
        )
        for shape in ((14400, 64), (8, 516))
    },
    **{
        f"a sum as {', '.join(map(str, how.values()))}, {shape}": (
            "collective_quant.allreduce_add_rms_norm_quant",
            reducing(lambda draw, shape=shape, how=how: rows(draw, *shape, residual=True, **how)),
        )
        for shape, how in (
            ((3, 512), {"scheme": "fp8_static", "scale": torch.tensor([0.5])}),
            ((3, 512), {"scheme": "fp8_per_token", "dtype": torch.float8_e4m3fnuz}),
            ((3, 512), {"scheme": "fp8_group", "dtype": torch.float8_e4m3fnuz}),
            ((3, 512), {"scheme": "fp8_group", "style": "one_plus"}),
            ((3, 512), {"scheme": "mxfp4", "style": "one_plus"}),
            ((3, 512), {"scheme": "fp8_group", "group": 64}),
            ((140, 640), {"scheme": "fp8_group"}),
            ((3, 512), {"scheme": "mxfp4", "rounding": "up"}),
            ((1, 16384), {"scheme": "mxfp4"}),
        )
    },
    "a gather of whole numbers": (
        "collective.all_gather",
        reducing(lambda draw: {"x": draw.below(9, 3, 8), "ranks": 1}),
    ),
    "an activation in fp32": (
        "activation.silu_and_mul",
        lambda draw: dict(
            zip(("gate", "up"), draw.normal(3, 64, dtype=torch.float32).chunk(2, -1), strict=True)
        ),
    ),
    "LayerNorm without a weight": (
        "norm.layer_norm",
        lambda draw: rows(draw, 3, 64) | {"weight": None, "bias": draw.normal(64)},
    ),
    "one cosine for all rows": ("rope.rope", of_tokens_that_share_angles(roped, "cos")),
    "rotation and write, narrow values": (
        "rope_kv_write.rope_kv_write",
        lambda draw: (
            rope_written(draw, cache=torch.bfloat16)
            | dict(zip(("v", "v_cache"), narrow_values(draw), strict=True))
        ),
    ),
    "tokens before a batch": (
        "rope_kv_write.rope_kv_write",
        behind_tokens(partial(rope_written, cache=torch.bfloat16), "q", "k", "v", "cos", "sin"),
    ),
    "one angle for all tokens, shuffled": (
        "shuffled_norm_rope_kv_write.qk_norm_rope_kv_write",
        of_tokens_that_share_angles(partial(norm_rope_written, rope_style="half"), "cos", "sin"),
    ),
    "latents in fp32": (
        "latent_attention_triton.mla_absorbed_attention",
        lambda draw: latent_paged(draw, [(1, 5), (1, 7)], cache=torch.float32),
    ),
    "latents of 8 rotated columns": (
        "latent_attention_triton.mla_absorbed_attention",
        lambda draw: latent_paged(draw, [(1, 5), (1, 7)], rotated=8),
    ),
    "assembly, codes without a scale": (
        "latent_attention.mla_absorbed_attention",
        lambda draw: (
            latent_paged(
                draw,
                [(1, 5), (1, 7)],
                heads=16,
                latent=512,
                rotated=64,
                cache=torch.float8_e4m3fn,
            )
            | {"kv_scale": None}
        ),
    ),
    "assembly, 32 rotated columns": (
        "latent_attention.mla_absorbed_attention",
        lambda draw: latent_paged(draw, [(1, 5), (1, 7)], heads=16, latent=512, rotated=32),
    ),
    "latents and a weight in fp16": (
        "latent_prompts.mla_attention",
        lambda draw: in_dtype(latent_attended, draw, torch.float16, "latent", "weight"),
    ),
    "pairs before latents in Triton": (
        "mla.mla_rope_kv_write",
        partial(latent_rope_written, latent=64, rope_style="pairs"),
    ),
    "rotated keys of no vector": (
        "latent_cache.mla_kv_write",
        lambda draw: (
            (given := latent_written(draw, latent=32, rotated=20))
            | {
                name: placed(given[name], -1, more=more)
                for name, more in (("kv_c", 8), ("k_pe", 4))
            }
        ),
    ),
    "paged, scales of 16 bits": (
        "paged_attention.paged_attention",
        lambda draw: paged(draw, [(40, 40)]) | cache_scales(draw),
    ),
    "tables and caches in fp16": (
        "norm_rope_kv_write.qk_norm_rope_kv_write",
        lambda draw: in_dtype(
            partial(norm_rope_written, packed=True),
            draw,
            torch.float16,
            "cos",
            "sin",
            "k_cache",
            "v_cache",
        ),
    ),
    "tables and caches in fp16, shuffled": (
        "shuffled_norm_rope_kv_write.qk_norm_rope_kv_write",
        lambda draw: in_dtype(
            partial(norm_rope_written, rope_style="half", width=128),
            draw,
            torch.float16,
            "k",
            "v",
            "cos",
            "sin",
            "k_cache",
            "v_cache",
        ),
    ),
    "latents, part of the key rotates": (
        "latent_cache.mla_rope_kv_write",
        lambda draw: (
            (given := latent_rope_written(draw, **LATENT))
            | {name: given[name][..., :16] for name in ("cos", "sin")}
        ),
    ),
    "latents, pairs": (
        "latent_cache.mla_rope_kv_write",
        partial(latent_rope_written, **LATENT, rope_style="pairs"),
    ),
    "latents, 32 columns rotate": (
        "latent_cache.mla_rope_kv_write",
        partial(latent_rope_written, **LATENT | {"rotated": 32}),
    ),
    "rotation into a latent of 256": (
        "latent_cache.mla_rope_kv_write",
        lambda draw: latent_rope_written(draw, heads=8, latent=256, rotated=64),
    ),
    "latent attention, two dimensions of batches": (
        "latent_prompts.mla_attention",
        partial(latent_attended, batch=(2, 2)),
    ),
    "attention, two dimensions of batches": (
        "attention.attention",
        partial(attended, batch=(2, 2)),
    ),
    "paged, blocks of 12": (
        "paged_attention_triton.paged_attention",
        of_blocks(lambda draw: paged(draw, [(1, 5), (1, 7)]), 12),
    ),
    "shuffled, heads of 80": (
        "shuffled_attention_triton.paged_attention",
        lambda draw: paged(draw, [(1, 5), (1, 7)], width=80),
    ),
    "assembly, blocks of 12": (
        "latent_attention.mla_absorbed_attention",
        of_blocks(lambda draw: latent_paged(draw, [(3, 5)], heads=32, latent=512, rotated=64), 12),
    ),
    "latents, blocks of 12": (
        "latent_attention_triton.mla_absorbed_attention",
        of_blocks(lambda draw: latent_paged(draw, [(1, 5), (1, 7)]), 12),
    ),
    "experts in int4, in fp64": (
        "experts_triton.moe_experts_w4a16",
        lambda draw: (given := int4(draw, hidden=128, inner=64)) | {"x": given["x"].double()},
    ),
    "indexer, keys in fp64": (
        "indexer.index_write",
        lambda draw: in_dtype(
            lambda d: index_written(d, cache=torch.float8_e4m3fn, width=128),
            draw,
            torch.float64,
            "k",
        ),
    ),
    "latents in two batches": (
        "latent_cache.mla_kv_write",
        of_two_batches(partial(latent_written, tokens=8, latent=64), "kv_c", "k_pe"),
    ),
    "shuffled split product in MXFP4, 768 inputs": (
        "linear_shuffled_split_cat_mxfp4.linear_split_cat",
        partial(split_and_joined, scheme="mxfp4", heads=4, nope=80, values=48, latent=768),
    ),
    "a residual for all rows": (
        "norm.add_rms_norm",
        lambda draw: rows(draw, 3, 64) | {"residual": draw.normal(64)},
    ),
    "a residual for all rows, in Triton": (
        "norm_triton.add_rms_norm",
        lambda draw: rows(draw, 3, 64) | {"residual": draw.normal(64)},
    ),
    "a rotation without heads": ("rope.rope", without_heads),
    "int8, 24 inputs": (
        "scaled_linear.scaled_linear_int8",
        lambda draw: int8_operands(draw, 3, 24, out=32),
    ),
    "attention, heads of 264": ("attention.attention", partial(attended, width=264, heads=(2, 1))),
    "attention, more keys": ("attention.attention", partial(attended, tokens=7, keys=9, window=3)),
    "paged, heads of 264": (
        "paged_attention.paged_attention",
        lambda draw: paged(draw, [(40, 40)], width=264, heads=(2, 1)),
    ),
    "paged, window of one key": (
        "paged_attention.paged_attention",
        lambda draw: paged(draw, [(40, 40)], window=1),
    ),
    "assembly, 17 heads share one": (
        "shuffled_attention.paged_attention",
        lambda draw: paged(draw, [(1, 5)], width=128, heads=(17, 1)),
    ),
    "Gluon, 65 heads share one": (
        "shuffled_attention_gluon.paged_attention",
        lambda draw: paged(draw, [(1, 5)], heads=(65, 1)),
    ),
    "shuffled, columns of no piece": (
        "shuffled_kv_write.kv_write",
        lambda draw: written(draw, [range(5, 9)], width=12),
    ),
    "Gluon, window of one key": (
        "shuffled_attention_gluon.paged_attention",
        lambda draw: paged(draw, [(40, 40)], window=1),
    ),
    "Gluon, heads of 512": (
        "shuffled_attention_gluon.paged_attention",
        lambda draw: paged(draw, [(40, 40)], width=512, heads=(2, 1)),
    ),
    **{
        f"{of}, scales of 16 bits": (
            f"{module}.paged_attention",
            lambda draw: paged(draw, [(1, 5)], width=128) | cache_scales(draw),
        )
        for of, module in (
            ("assembly", "shuffled_attention"),
            ("Gluon", "shuffled_attention_gluon"),
        )
    },
    "assembly, codes": (
        "shuffled_attention.paged_attention",
        lambda draw: (
            paged(draw, [(1, 5)], width=128, cache=torch.float8_e4m3fn) | cache_scales(draw)
        ),
    ),
    **{
        f"norm and rotation, {what}": (
            "norm_rope_kv_write.qk_norm_rope_kv_write",
            partial(norm_rope_written, **{"rope_style": "half", "packed": True, **how}),
        )
        for what, how in {
            "tables of the full width": {"rope_style": "neox"},
            "neighbours": {"rope_style": "gptj"},
            "1 + weight": {"norm_style": "one_plus"},
            "weights in fp32": {"weight": torch.float32},
            "tables in fp32": {"table": torch.float32},
            "heads of 32": {"width": 32},
            "a half of 10 columns": {"width": 128, "rotated": 20},
            "another fp8": {"cache": torch.float8_e4m3fnuz},
        }.items()
    },
    "norm and rotation, scales of 16 bits": (
        "norm_rope_kv_write.qk_norm_rope_kv_write",
        lambda draw: norm_rope_written(draw, rope_style="half") | cache_scales(draw),
    ),
    "norm and rotation, one angle for all tokens": (
        "norm_rope_kv_write.qk_norm_rope_kv_write",
        of_tokens_that_share_angles(partial(norm_rope_written, rope_style="half"), "cos", "sin"),
    ),
    "norm and rotation, pages of 12": (
        "norm_rope_kv_write.qk_norm_rope_kv_write",
        of_blocks(partial(norm_rope_written, rope_style="half"), 12),
    ),
    "experts, out in fp32": (
        "experts.moe_experts_fp8",
        lambda draw: fp8(draw, **WHOLE) | {"out_dtype": torch.float32},
    ),
    "experts by blocks of 64": (
        "experts_blocks.moe_experts_fp8",
        lambda draw: fp8_block(draw, **WHOLE, block=64),
    ),
    "experts by blocks, 192 hidden": (
        "experts_blocks.moe_experts_fp8",
        lambda draw: fp8_block(draw, hidden=192, inner=128),
    ),
    "experts by blocks, 192 inner": (
        "experts_blocks.moe_experts_fp8",
        lambda draw: fp8_block(draw, hidden=128, inner=192),
    ),
    "experts in MXFP4, codes, out in fp32": (
        "experts_mxfp4.moe_experts_mxfp4",
        lambda draw: mxfp4(draw, **GROUPS) | {"out_dtype": torch.float32},
    ),
    "experts in MXFP4, out in fp32": (
        "experts_mxfp4_triton.moe_experts_mxfp4",
        lambda draw: mxfp4(draw, **COLUMNS) | {"out_dtype": torch.float32},
    ),
    "router in fp64": (
        "route.topk_route",
        lambda draw: route(draw) | {"logits": draw.normal(7, 16, dtype=torch.float64)},
    ),
    "indexer, 16 heads": (
        "indexer.paged_index_topk",
        lambda draw: ranked_codes(draw, [(1, 2100)], heads=16, width=128, topk=2048),
    ),
    "indexer, weights in bf16": (
        "indexer.paged_index_topk",
        lambda draw: in_dtype(
            lambda d: ranked_codes(d, [(1, 2100)], heads=64, width=128, topk=2048),
            draw,
            torch.bfloat16,
            "weights",
        ),
    ),
    "latents, rows of no vector": (
        "latent_cache.mla_kv_write",
        lambda draw: (
            (given := latent_written(draw, latent=20, rotated=16))
            | {
                name: placed(given[name], -1, more=more)
                for name, more in (("kv_c", 4), ("k_pe", 8))
            }
        ),
    ),
    "latents in Triton, 48 columns": ("mla.mla_rope_kv_write", latent_rope_written),
    "latents in Triton, 24 rotated": (
        "mla.mla_rope_kv_write",
        partial(latent_rope_written, latent=64, rotated=24),
    ),
    "queries outside of the latent space": (
        "mla.mla_rope_kv_write",
        partial(latent_rope_written, latent=64, nope=32),
    ),
    "quantized prompts, keys of 272": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: latent_multiplied(draw, [(60, 70)], **SHUFFLED | {"nope": 256, "values": 64}),
    ),
    "quantized prompts, walked latents of 24 rotated columns": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: latent_multiplied(draw, [(1, 200)], rotated=24, **SHUFFLED),
    ),
    "quantized prompts, 384 outputs": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: latent_multiplied(draw, [(60, 70)], **SHUFFLED | {"heads": 3}),
    ),
    "quantized prompts in MXFP4, 384 outputs": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: latent_multiplied(draw, [(60, 70)], "mxfp4", **SHUFFLED | {"heads": 3}),
    ),
    "quantized prompts, codes of MI300": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: (
            latent_multiplied(draw, [(60, 70)], **SHUFFLED) | {"dtype": torch.float8_e4m3fnuz}
        ),
    ),
    "quantized prompts, rounded up": (
        "latent_prompts.quantized_mla_paged_attention",
        lambda draw: latent_multiplied(draw, [(60, 70)], "mxfp4", **SHUFFLED) | {"rounding": "up"},
    ),
    "product by head, in fp32": (
        "head_product.quantized_linear_by_head",
        lambda draw: in_dtype(half_multiplied, draw, torch.float32, "x"),
    ),
    "product by head, a weight of MI300": (
        "head_product.quantized_linear_by_head",
        lambda draw: (
            half_multiplied(draw, dtype=torch.float8_e4m3fnuz) | {"dtype": torch.float8_e4m3fn}
        ),
    ),
    "product by head, rows of MI300": (
        "head_product.quantized_linear_by_head",
        lambda draw: half_multiplied(draw, tokens=99) | {"dtype": torch.float8_e4m3fnuz},
    ),
    "product by head, groups of 48": (
        "head_product.quantized_linear_by_head",
        partial(half_multiplied, group=48),
    ),
    "product by head in Triton, groups of 48": (
        "mla.bmm_rope_kv_write",
        lambda draw: (
            multiplied_and_written(draw, latent=64, cache=torch.bfloat16)
            | {"group": 48, "scale": None}
        ),
    ),
    "split product of 64 inputs": (
        "linear_split_cat.linear_split_cat",
        partial(split_and_joined, scheme="fp8_block", latent=64),
    ),
    "split product in MXFP4, 160 inputs": (
        "linear_split_cat.linear_split_cat",
        partial(split_and_joined, scheme="mxfp4", latent=160),
    ),
    "fp8, out in fp32": (
        "scaled_linear_rows.scaled_linear_fp8",
        lambda draw: scaled_fp8(draw, 3, 512, out=128) | {"out_dtype": torch.float32},
    ),
    "fp8, 24 outputs": (
        "scaled_linear.scaled_linear_fp8",
        lambda draw: scaled_fp8(draw, 3, 64, out=24, per="tensor"),
    ),
    "fp8, 24 inputs": (
        "scaled_linear.scaled_linear_fp8",
        lambda draw: scaled_fp8(draw, 3, 24, out=32, per="tensor"),
    ),
    "fp8 by blocks of 64": (
        "scaled_linear.scaled_linear_fp8_block",
        lambda draw: (
            scaled_blocks(draw, 3, 128, out=64)
            | {"x_scale": draw.normal(3, 2, dtype=torch.float32).abs() / 400}
            | {"weight_scale": draw.normal(1, 2, dtype=torch.float32).abs() / 400, "block": 64}
        ),
    ),
    "fp8 by blocks of 64, by column": (
        "scaled_linear_blocks.scaled_linear_fp8_block",
        lambda draw: by_column(
            scaled_blocks(draw, 3, 128, out=64)
            | {"x_scale": draw.normal(3, 2, dtype=torch.float32).abs() / 400}
            | {"weight_scale": draw.normal(1, 2, dtype=torch.float32).abs() / 400, "block": 64}
        ),
    ),
    "fp8 by blocks, columns with gaps": (
        "scaled_linear_blocks.scaled_linear_fp8_block",
        lambda draw: (
            (given := scaled_blocks(draw, 33, 256, out=64))
            | {"x_scale": placed(given["x_scale"].t().contiguous(), -1, more=3).t()}
        ),
    ),
    "fp8 by blocks, columns that overlap": (
        "scaled_linear_blocks.scaled_linear_fp8_block",
        lambda draw: (
            (given := scaled_blocks(draw, 2, 256, out=64))
            | {"x_scale": overlapping(given["x_scale"])}
        ),
    ),
    "fp8 by blocks of 64 in Triton": (
        "linear_triton.scaled_linear_fp8_block",
        lambda draw: (
            scaled_blocks(draw, 3, 128, out=64)
            | {"x_scale": draw.normal(3, 2, dtype=torch.float32).abs() / 400}
            | {"weight_scale": draw.normal(1, 2, dtype=torch.float32).abs() / 400, "block": 64}
        ),
    ),
    "fp8 in Triton, 64 inputs": (
        "linear_triton.scaled_linear_fp8_block",
        lambda draw: scaled_blocks(draw, 3, 64, out=64),
    ),
    "MXFP4, 48 outputs by 16 bits": (
        "scaled_linear.linear_mxfp4",
        lambda draw: mxfp4_operands(draw, 3, 256, out=40, activation="mxfp4"),
    ),
    "activation in groups of 48": (
        "activation_quant_triton.silu_and_mul_quant",
        lambda draw: halves(draw, 3, 96, scheme="fp8_group", group=48),
    ),
    "activation, scales by column": (
        "activation_quant_triton.silu_and_mul_quant",
        lambda draw: halves(draw, 3, 256, scheme="fp8_group", column_major=True),
    ),
    **{
        f"compiled activation, {width} columns in groups of {group}": (
            "activation_quant.silu_and_mul_quant",
            partial(halves_of, width=width, scheme="fp8_group", group=group),
        )
        for width, group in ((96, 48), (5120, 128), (8320, 128), (192, 128))
    },
    "compiled activation under one scale": (
        "activation_quant.silu_and_mul_quant",
        lambda draw: halves(draw, 3, 128, scheme="fp8_static", scale=torch.tensor([0.5])),
    ),
    "compiled activation, scales rounded to even": (
        "activation_quant.silu_and_mul_quant",
        lambda draw: halves(draw, 3, 128, scheme="mxfp4"),
    ),
    "a norm of 8200 columns": ("norm.rms_norm", lambda draw: rows(draw, 3, 8200)),
    "a quantized norm of 8200 columns": (
        "norm_quant.rms_norm_quant",
        lambda draw: rows(draw, 3, 8200, scheme="fp8_per_token"),
    ),
    "a norm in groups of 32": (
        "norm_quant.rms_norm_quant",
        lambda draw: rows(draw, 3, 4096, scheme="fp8_group", group=8),
    ),
    "a norm in groups of 48": (
        "norm_quant_triton.rms_norm_quant",
        lambda draw: rows(draw, 3, 96, scheme="fp8_group", group=48),
    ),
    "column-major groups of 16": (
        "quant.quant_fp8_group",
        lambda draw: x_of(draw, 3, 64, group=16, column_major_scales=True),
    ),
    "groups of 48": ("quant_triton.quant_fp8_group", lambda draw: x_of(draw, 3, 96, group=48)),
    "quantized fp32": (
        "quant.quant_fp8_per_token",
        lambda draw: x_of(draw, 3, 64, dtype=torch.float32),
    ),
    "a rotation of 96 columns": ("rope_triton.rope", partial(roped, width=96)),
    "one angle for all tokens": (
        "rope_kv_write.rope_kv_write",
        of_tokens_that_share_angles(partial(rope_written, cache=torch.bfloat16), "cos", "sin"),
    ),
    "one sine for all tokens": (
        "rope_kv_write.rope_kv_write",
        of_tokens_that_share_angles(partial(rope_written, cache=torch.bfloat16), "sin"),
    ),
    "one cosine for all tokens": (
        "rope_kv_write.rope_kv_write",
        of_tokens_that_share_angles(partial(rope_written, cache=torch.bfloat16), "cos"),
    ),
    "one sine for all rows": ("rope.rope", of_tokens_that_share_angles(roped, "sin")),
    "rotation and write, blocks of 12": (
        "rope_kv_write.rope_kv_write",
        of_blocks(partial(rope_written, cache=torch.bfloat16), 12),
    ),
    "norm, rotation and write, blocks of 12": (
        "norm_rope_kv_write_triton.qk_norm_rope_kv_write",
        of_blocks(partial(norm_rope_written, packed=True), 12),
    ),
    "heads of 80": (
        "rope_kv_write.rope_kv_write",
        partial(rope_written, width=80, cache=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_aiter_computes_otherwise_is_refused(case: str) -> None:
    name, make = CASES[case]
    kernel = KERNELS[name]

    def arguments() -> dict[str, Any]:
        return make(Draw(torch.bfloat16, layout=kernel.layout or "paged"))

    REGISTRY[kernel.op].reference(**arguments())
    with stand_ins.installed("gfx950"):
        assert isinstance(refusal(kernel, HERE, arguments()), Refusal)
        with pytest.raises(FAILURES):
            compare(kernel, arguments, torch.bfloat16)


def symbolic(x: Tensor) -> tuple[Tensor, ShapeEnv]:
    """x on fake memory, with sizes that a graph leaves open."""
    shape_env = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * x.dim())
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    return mode.from_tensor(x, symbolic_context=context), shape_env


@pytest.mark.parametrize(
    ("name", "key", "make"),
    [
        ("norm.rms_norm", "x", lambda draw: rows(draw, 5, 64)),
        ("quant.quant_fp8_per_token", "x", lambda draw: x_of(draw, 5, 64)),
    ],
)
def test_rows_of_no_fixed_width_are_refused_without_a_guard(
    name: str, key: str, make: Make
) -> None:
    given = make(Draw(torch.bfloat16))
    given[key], shape_env = symbolic(given[key])
    reason = refusal(KERNELS[name], Platform.named("gfx950"), given)
    assert reason is not None and reason.code == "shape"
    assert shape_env.guards == []


@pytest.fixture
def two_processes() -> Iterator[None]:
    """In AITER's group."""
    token = PROCESSES.set(2)
    yield
    PROCESSES.reset(token)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("all_reduce", "one row"),
        ("all_gather", "one row"),
        ("allreduce_add_rms_norm", "(1, 512), after"),
    ],
)
def test_a_collective_of_another_group_than_aiters_is_refused(op: str, case: str) -> None:
    kernel = KERNELS[f"collective.{op}"]
    make = kernel_cases_of(kernel, "gfx950")[case]
    mine = make(Draw(torch.bfloat16))["process_group"]
    with stand_ins.installed("gfx950"):
        own = distributed.new_group([0]).group_name

        def arguments() -> dict[str, Any]:
            return make(Draw(torch.bfloat16)) | {"process_group": own}

        reason = refusal(kernel, HERE, arguments())
        assert reason == Refusal("argument", f"the ranks are group {own!r}, AITER's is {mine!r}")
        with pytest.raises(AssertionError):
            compare(kernel, arguments, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("collective_quant.allreduce_add_rms_norm_quant", "fp8_per_token, (3, 512), native"),
        ("collective.all_gather", "one row"),
    ],
)
@pytest.mark.parametrize("processes", [2, 6])
def test_a_collective_of_other_gpus_than_its_kernel_takes_is_refused(
    processes: int, name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = KERNELS[name]
    make = kernel_cases_of(kernel, "gfx950")[case]

    def arguments() -> dict[str, Any]:
        return make(Draw(torch.bfloat16))

    monkeypatch.setattr(PEERS, "disabled", processes == 2)  # as over two hosts
    token = PROCESSES.set(processes)
    with stand_ins.installed("gfx950"):
        assert refusal(kernel, HERE, arguments()) == Refusal(
            "library", "AITER's kernel is for 2, 4 or 8 GPUs of one host"
        )
        with pytest.raises((TypeError, RuntimeError)):
            compare(kernel, arguments, torch.bfloat16)
    PROCESSES.reset(token)


def test_the_scales_of_a_large_quantizing_sum_lie_row_by_row() -> None:
    kernel = KERNELS["collective_quant.allreduce_add_rms_norm_quant"]
    given = reducing(lambda draw: rows(draw, 1030, 512, residual=True, scheme="mxfp4"))(
        Draw(torch.bfloat16)
    )
    with stand_ins.installed("gfx950"):
        results = kernel.function(**given)
    expected = REGISTRY[kernel.op].reference(**given)
    for result, reference in zip(results[:2], expected[:2], strict=True):
        assert result.stride() == reference.stride()
        assert (result == reference).float().mean() > 0.98


def test_a_sum_before_aiters_group_is_set_up_is_refused() -> None:
    kernel = KERNELS["collective.all_reduce"]
    make = next(iter(kernel_cases_of(kernel, "gfx950").values()))

    def not_initialized() -> None:
        raise AssertionError("tensor model parallel group is not initialized")

    with stand_ins.installed("gfx950"):
        get_tp_group.found = not_initialized
        reason = refusal(kernel, HERE, make(Draw(torch.bfloat16)))
    assert reason == Refusal("library", "AITER's group is not set up (aiter.init_dist_env)")


def halves_of_other_shapes(draw: Draw) -> dict[str, tuple[Tensor, Tensor]]:
    first, second = draw.normal(5, 128).chunk(2, -1)
    left, right = draw.normal(2, 5, 128)[:, :4].chunk(2, -1)
    return {
        "batches with gaps": (left, right),
        "a vector and rows": (first[0], second),
        "one row for all": (first, second[:1].expand(5, 64)),
        "one row": (first, second[:1]),
        "a vector": (first, second[0]),
        "vectors": (first[0], second[0]),
        "another dtype": (first, second.view(torch.float16)),
    }


@pytest.mark.parametrize("case", halves_of_other_shapes(Draw(torch.bfloat16)))
def test_halves_of_other_shapes_are_no_neighbours(case: str) -> None:
    first, second = halves_of_other_shapes(Draw(torch.bfloat16))[case]
    assert not library.neighbours(first, second)


@pytest.mark.parametrize("case", ["one row for all tokens", "columns before heads"])
def test_keys_of_other_strides_share_no_rows(case: str) -> None:
    q, k, v = Draw(torch.bfloat16).heads(5, 4, 2, 2, width=16)
    if case == "one row for all tokens":
        k = k[:1].expand(5, 2, 16)
    else:
        k = k.flatten(1).unflatten(1, (16, 2)).transpose(1, 2)
    joined = torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), 1)
    assert torch.equal(norm_rope_kv_write.rows_of(q, k, v), joined)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_shuffled_cache_with_gaps_is_refused(name: str) -> None:
    caches = {key: Draw(torch.bfloat16).normal(3, 16, 2, 64) for key in ("k_cache", "v_cache")}
    assert shuffled_cache.unshuffled(**caches) is None
    caches[name] = placed(caches[name], 0, step=2)
    assert shuffled_cache.unshuffled(**caches) == Refusal("layout", "a cache is not contiguous")
