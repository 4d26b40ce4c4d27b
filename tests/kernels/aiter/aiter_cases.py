"""Which kernels we have of AITER, what to try them with, and a process that does so with AITER's
real code.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from expert_cases import of_experts
from kernel_cases import CASES
from kernel_cases.attention import CHUNKS, DECODE, attended, paged
from kernel_cases.draw import Cases, Draw, cache_scales
from kernel_cases.indexer import index_written, ranked_codes
from kernel_cases.linear import linear
from kernel_cases.mla import (
    half_multiplied,
    latent_attended,
    latent_multiplied,
    latent_of_chosen,
    latent_paged,
    latent_projected,
    latent_rope_written,
    latent_written,
    multiplied_and_written,
    split_and_joined,
)
from kernel_cases.scaled_linear import (
    int8_operands,
    mxfp4_operands,
    scale_of,
    scaled_blocks,
    scaled_fp8,
)
from kernel_cases.state import norm_rope_written, rope_written
from row_cases import of_rows

from atomc import kernels, ops
from atomc.ops.norm import RMS_NORM_STYLES
from atomc.ops.op import Kernel
from atomc.testing.layouts import plain_order_kernel

HERE = Path(__file__).parent
# What its process imports from.
IMPORTED_FROM = (HERE, HERE.parent, HERE.parents[1] / "_support", HERE.parents[2])
ARCHS = ("gfx942", "gfx950")
FP8_OF = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
assert kernels.load("aiter") is None
KERNELS = {
    f"{kernel.function.__module__.rpartition('.')[2]}.{kernel.op}": plain_order_kernel(kernel)
    for op in ops.REGISTRY.values()
    for kernel in op.kernels
    if kernel.provider == "aiter"
}
PLAINLY_NAMED = (
    "head_product",
    "linear_shuffled_split_cat",
    "linear_shuffled_split_cat_mxfp4",
    "linear_split_cat",
    "mla",
    "rope_kv_write",
    "shuffled_rope_kv_write",
)
IN_TRITON = sorted(
    name
    for name in KERNELS
    if name.partition(".")[0].endswith("_triton") or name.partition(".")[0] in PLAINLY_NAMED
)
COMPILED = sorted(set(KERNELS) - set(IN_TRITON))
# Compiled for some steps, in Triton for the others, which read lengths on the host.
PARTLY_COMPILED = {
    "latent_prompts.mla_paged_attention",
    "latent_prompts.quantized_mla_paged_attention",
    "paged_attention.paged_attention",
    "shuffled_attention_gluon.paged_attention",
}


def tables_in_bf16(draw: Draw, **rest: Any) -> dict[str, Any]:
    return rope_written(draw, cache=torch.bfloat16, **rest)


def unscaled(draw: Draw, make: Callable[..., dict[str, Any]], **rest: Any) -> dict[str, Any]:
    """With a cache in bfloat16, which needs no scale."""
    return make(draw, cache=torch.bfloat16, **rest) | {"scale": None}


def codes_written(draw: Draw, scale: float | None = None, **rest: Any) -> dict[str, Any]:
    """With this scale of the keys, and twice as much of the values; None: without scales."""
    scales = {} if scale is None else {"k_scale": scale, "v_scale": 2 * scale}
    return norm_rope_written(draw, **rest) | {
        name: torch.tensor([number], device=draw.device) for name, number in scales.items()
    }


def of_deepseeks_widths(make: Callable[..., dict[str, Any]]) -> Cases:
    """With a latent of 512 and 64 rotated columns, for which AITER's HIP kernels are written."""
    how: dict[str, dict[str, Any]] = {
        "": {},
        ", gptj": {"rope_style": "gptj"},
        ", DeepSeek's style": {"rope_style": "pairs_to_half", "skip": (1,)},
        ", batch of one": {"batch": True, "rope_style": "pairs_to_half"},
        ", one token": {"tokens": 1},
        ", no tokens": {"tokens": 0},
        ", some nowhere": {"tokens": 9, "skip": (0, 4, 8)},
        ", fp32 tables": {"table": torch.float32},
    }
    return {
        f"512 + 64{name}": partial(make, heads=4, latent=512, rotated=64, **rest)
        for name, rest in how.items()
    }


# Whole tiles of a shuffled weight.
SHUFFLED: dict[str, Any] = {"heads": 4, "nope": 80, "values": 48, "latent": 512}
DRAFTS = [(4, 33), (4, 4), (4, 18)]


def of_whole_tiles(arch: str) -> dict[str, Cases]:
    """More cases: sizes that AITER's products have tiles for, the fp8 of the architecture, a cache
    in bfloat16.
    """
    fp8 = FP8_OF[arch]
    return {
        "attention": {"another scale": lambda draw: attended(draw, 33, scale=0.3)},
        "linear": {"whole tiles": lambda draw: linear(draw, 33, 128, out=64)},
        "scaled_linear_fp8": {
            "whole tiles": lambda draw: scaled_fp8(draw, 33, 256, out=64, dtype=fp8),
            "odd sizes, native": lambda draw: scaled_fp8(draw, 7, 80, out=33, dtype=fp8),
            "bias, native": lambda draw: scaled_fp8(draw, 7, 80, out=33, bias=True, dtype=fp8),
            "whole tiles, bias": lambda draw: scaled_fp8(
                draw, 5, 1536, out=64, bias=True, dtype=fp8
            ),
            **{
                f"per tensor, native{', bias' * bias}": lambda draw, bias=bias: scaled_fp8(
                    draw, 33, 256, out=64, per="tensor", dtype=fp8, bias=bias
                )
                for bias in (False, True)
            },
        },
        "scaled_linear_fp8_block": {
            "whole tiles": lambda draw: scaled_blocks(draw, 33, 256, out=64, dtype=fp8),
            "odd sizes, native": lambda draw: scaled_blocks(draw, 7, 208, out=144, dtype=fp8),
            "whole blocks, bias": lambda draw: scaled_blocks(
                draw, 2, 5, 256, out=144, bias=True, dtype=fp8
            ),
            "column-major scales, bias": lambda draw: (
                scaled_blocks(draw, 5, 384, out=128, bias=True, dtype=fp8)
                | {"x_scale": scale_of(draw, 3, 5).t()}
            ),
        },
        "scaled_linear_int8": {
            f"whole tiles{', bias' * bias}": lambda draw, bias=bias: int8_operands(
                draw, 33, 128, out=64, bias=bias
            )
            for bias in (False, True)
        },
        "linear_mxfp4": {
            "whole tiles": lambda draw: mxfp4_operands(draw, 33, 256, out=64, activation="mxfp4"),
            "few rows": lambda draw: mxfp4_operands(draw, 5, 512, out=96, activation="mxfp4"),
            "bias, codes": lambda draw: mxfp4_operands(
                draw, 2, 5, 256, out=48, activation="mxfp4", bias=True
            ),
        },
        "rope_kv_write": {
            **{
                f"{style}, bf16 cache": partial(tables_in_bf16, rope_style=style)
                for style in ("neox", "half", "gptj")
            },
            "some nowhere, bf16 cache": partial(tables_in_bf16, tokens=33, skip=(0, 4, 32)),
            "packed, bf16 cache": partial(tables_in_bf16, packed=True, heads=(6, 2), width=128),
            "no tokens, bf16 cache": partial(tables_in_bf16, tokens=0),
        },
        "mla_kv_write": {
            "native fp8": partial(latent_written, cache=fp8, tokens=33, latent=64, skip=(3,)),
            "DeepSeek-V3": partial(latent_written, latent=512, rotated=64),
            "DeepSeek-V3, native fp8": partial(
                latent_written, cache=fp8, latent=512, rotated=64, skip=(0,)
            ),
            "a key wider than the latent": partial(latent_written, latent=16, rotated=32),
        },
        "mla_rope_kv_write": of_deepseeks_widths(latent_rope_written)
        | {"native fp8": partial(latent_rope_written, cache=fp8, latent=64, skip=(3,))}
        | {
            f"{style}, bf16 cache": partial(
                unscaled, make=latent_rope_written, rope_style=style, latent=64, skip=(2,)
            )
            for style in ("neox", "half", "gptj", "pairs_to_half")
        },
        "bmm_rope_kv_write": {
            **of_deepseeks_widths(
                partial(multiplied_and_written, scheme="fp8", nope=128, dtype=fp8)
            ),
            "mxfp4, DeepSeek-V3": partial(
                multiplied_and_written,
                scheme="mxfp4",
                heads=4,
                nope=128,
                latent=512,
                rotated=64,
                skip=(2,),
            ),
            **{
                f"{scheme}, bf16 cache, {nope}": partial(
                    unscaled,
                    make=multiplied_and_written,
                    scheme=scheme,
                    nope=nope,
                    latent=64,
                    dtype=fp8,
                    skip=(2,),
                    rope_style="pairs_to_half" if nope == 256 else "half",
                )
                for scheme in ("fp8", "mxfp4")
                for nope in (128, 256)
            },
        },
        "quantized_linear_by_head": {
            f"{scheme}, native, {inner} inputs": partial(
                half_multiplied, scheme=scheme, nope=inner, latent=128, dtype=fp8
            )
            for scheme in ("fp8", "mxfp4")
            for inner in (128, 512)
        },
        "linear_split_cat": {
            "fp8_block, native": partial(
                split_and_joined, scheme="fp8_block", dtype=fp8, latent=256
            ),
            "mxfp4, whole tiles": partial(
                split_and_joined, scheme="mxfp4", latent=512, nope=32, values=32
            ),
            **{
                f"{scheme}, shuffled, {tokens} tokens": partial(
                    split_and_joined, scheme=scheme, tokens=tokens, **SHUFFLED, **how
                )
                for scheme, how in (("fp8_block", {"dtype": fp8}), ("mxfp4", {}))
                for tokens in (1, 7, 40, 70)
            },
            "mxfp4, shuffled, stock": partial(
                split_and_joined, scheme="mxfp4", heads_first=True, **SHUFFLED
            ),
        },
        "qk_norm_rope_kv_write": {
            **{
                f"packed, {norm}, {rope}": partial(
                    norm_rope_written, packed=True, norm_style=norm, rope_style=rope
                )
                for norm in RMS_NORM_STYLES
                for rope in ("neox", "half", "gptj")
            },
            "packed, some nowhere": partial(
                norm_rope_written, packed=True, tokens=33, skip=(0, 4, 32)
            ),
            **{
                f"{norm}, {rope}, {width}": partial(
                    norm_rope_written, norm_style=norm, rope_style=rope, width=width, tokens=9
                )
                for norm in ("after", "before")
                for rope in ("half", "gptj")
                for width in (128, 256)
            },
            "half of half rotates": partial(
                norm_rope_written, rope_style="half", width=128, rotated=64, skip=(0, 3)
            ),
            "packed, half rotates": partial(
                norm_rope_written, packed=True, width=128, rotated=64, heads=(4, 4)
            ),
            "packed, half rotates, gptj": partial(
                norm_rope_written, packed=True, rotated=32, rope_style="gptj"
            ),
            "packed, fp32 weight": partial(
                norm_rope_written, packed=True, norm_style="before", weight=torch.float32
            ),
            **{
                f"native fp8, {width}{name}": partial(
                    codes_written, cache=fp8, rope_style="half", width=width, **how
                )
                for width in (64, 128, 256)
                for name, how in {
                    "": {},
                    ", packed": {"packed": True, "heads": (5, 1), "skip": (0, 6)},
                    ", scales": {"scale": 0.5, "rotated": width // 2},
                    ", clamped": {"scale": 1e-3, "tokens": 1},
                }.items()
            },
        },
        "mla_attention": {
            "narrow values": partial(latent_attended, values=16),
            "another scale": lambda draw: latent_attended(draw) | {"scale": 0.3},
            "DeepSeek-V3": partial(
                latent_attended, nope=128, values=128, latent=512, rotated=64, batch=(2,)
            ),
        },
        "mla_absorbed_attention": {
            f"{heads} heads of 512 + 64, {kind}, {dtype}": partial(
                latent_paged,
                sequences=sequences,
                heads=heads,
                latent=512,
                rotated=64,
                padding=padding,
                cache=None if dtype == "as q" else fp8,
                scale=0.07,
            )
            for heads in (3, 16, 48, 128)
            for kind, sequences, padding in (
                ("decode", [(1, 70), (1, 7), (1, 16), (0, 0)], 1),
                ("prompts", [(3, 20), (0, 4), (19, 19), (1, 5)], 2),
            )
            for dtype in ("as q", "native fp8")
        }
        | {"native fp8, drafts": partial(latent_paged, sequences=DRAFTS, cache=fp8)}
        | {
            f"chosen, {heads} heads of 512 + 64, {kind}, {dtype}": partial(
                latent_of_chosen,
                sequences=sequences,
                topk=19,
                heads=heads,
                latent=512,
                rotated=64,
                padding=padding,
                cache=None if dtype == "as q" else fp8,
                scale=0.07,
            )
            for heads in (3, 48)
            for kind, sequences, padding in (
                ("decode", [(1, 70), (1, 7), (1, 19), (0, 0)], 1),
                ("prompts", [(3, 20), (0, 4), (21, 21), (1, 5)], 2),
            )
            for dtype in ("as q", "native fp8")
        },
        "index_write": {
            "native fp8": partial(index_written, cache=fp8, width=128, skip=(2,)),
            "native fp8, batch of one": partial(index_written, cache=fp8, width=128, batch=True),
            "native fp8, no tokens": partial(index_written, cache=fp8, width=128, tokens=0),
        },
        "paged_index_topk": {
            f"{heads} heads, {kind}": partial(
                ranked_codes,
                sequences=sequences,
                dtype=fp8,
                heads=heads,
                width=128,
                topk=2048,
                padding=padding,
            )
            for heads, kind, sequences, padding in (
                (64, "decode", [(1, 2100), (1, 2048), (1, 2049), (1, 7)], 0),
                (64, "mixed", [(3, 2500), (0, 4), (5, 5), (1, 2300)], 2),
                (32, "drafts", [(3, 2200), (3, 40)], 0),
                (128, "one sequence", [(1, 2300)], 0),
            )
        },
        "mla_paged_attention": {
            "another scale": lambda draw: (
                latent_projected(draw, [(60, 70), (63, 63)], values=16) | {"scale": 0.3}
            ),
        }
        | {
            f"{widths}, {kind}": partial(
                latent_projected, sequences=sequences, padding=padding, **how, **cache
            )
            for widths, how, cache in (
                ("narrow values", {"values": 16}, {}),
                ("native fp8", {"values": 24}, {"cache": fp8}),
                ("values as wide as keys", {"values": 40}, {}),
                (
                    "DeepSeek-V3",
                    {"nope": 128, "values": 128, "latent": 512, "rotated": 64, "heads": 2},
                    {},
                ),
            )
            for kind, sequences, padding in (
                ("prompts", [(60, 70), (63, 63), (1, 65)], 2),
                ("one row of many keys", [(1, 200), (3, 9)], 0),
            )
        },
        "quantized_mla_paged_attention": {
            f"{scheme}, prompts, {cache or 'as q'}": partial(
                latent_multiplied,
                sequences=[(60, 70), (63, 63), (1, 65)],
                padding=2,
                scheme=scheme,
                dtype=fp8,
                cache=cache,
                **SHUFFLED,
            )
            for scheme in ("fp8_block", "mxfp4")
            for cache in (None, fp8)
        },
        "paged_attention": {
            "another scale": lambda draw: paged(draw, DECODE, scale=0.3),
            "decode, heads of 128": lambda draw: paged(draw, DECODE, heads=(12, 2), width=128),
            "decode, heads of 128, packed": lambda draw: (
                paged(draw, DECODE, width=128) | {"q": draw.heads(5, 8, 2, 2, width=128)[0]}
            ),
            "decode, heads of 128, padding": lambda draw: paged(
                draw, [(1, 33), (1, 5), (0, 0)], width=128, padding=1
            ),
            "sinks, window, decode": lambda draw: (
                paged(draw, [*DECODE, (1, 70)], window=16) | {"sinks": draw.normal(8)}
            ),
            "long decode, heads of 128": lambda draw: paged(
                draw, [(1, 600), (1, 3)], heads=(4, 2), width=128
            ),
            "mixed, heads of 128": lambda draw: paged(draw, CHUNKS, heads=(4, 2), width=128),
            "decode, padding": lambda draw: paged(draw, [(1, 33), (1, 5), (0, 0)], padding=1),
            "long decode, padding": lambda draw: paged(draw, [(1, 600), (0, 0)], padding=1),
            **{
                f"long prompts{name}": lambda draw, how=how: paged(
                    draw, [(60, 70), (63, 63), (1, 65)], padding=2, **how
                )
                for name, how in {
                    "": {},
                    ", window": {"window": 9},
                    ", softcap": {"softcap": 2.0},
                    ", another scale": {"scale": 0.3},
                    ", widest heads": {"width": 256, "heads": (2, 1)},
                }.items()
            },
            "long": lambda draw: paged(draw, [(1, 700), (1, 3), (1, 530)]),
            "long, padding rows": lambda draw: paged(draw, [(1, 600), (0, 0), (5, 20)], padding=2),
            "native fp8": lambda draw: paged(draw, DECODE, cache=fp8),
            "native fp8, scales, sinks": lambda draw: (
                paged(draw, [*DECODE, (0, 0)], cache=fp8, window=9, padding=1, width=128)
                | cache_scales(draw)
                | {"sinks": draw.normal(8)}
            ),
            # Powers of two: versions of AITER before today's round what they have scaled.
            "native fp8, scales, mixed": lambda draw: (
                paged(draw, CHUNKS, cache=fp8, heads=(6, 1))
                | {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
            ),
            "native fp8, long prompts": lambda draw: paged(draw, [(60, 70), (63, 63)], cache=fp8),
        },
    }


def cases(kernel: Kernel, arch: str) -> Cases:
    more: Cases = {}
    for made in (of_whole_tiles(arch), of_rows(FP8_OF[arch]), of_experts(FP8_OF[arch])):
        more |= made.get(kernel.op, {})
    return CASES[kernel.op] | more


def prepared(kernel: Kernel, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the kernel gets them."""
    made = {
        names[0]: prepare(
            *map(given.get, names), **{name: given[name] for name in kernel.attributes}
        ).tensors
        for names, prepare in kernel.prepares.items()
        if given.get(names[0]) is not None
    }
    shared = {} if kernel.shared is None else {"shared": kernel.shared.of(given)}
    return given | made | shared


class Stage:
    """A process in which AITER's real code stands: see child.py."""

    def __init__(self, mode: str, arch: str, folder: Path):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, IMPORTED_FROM)))
        environment.pop("TRITON_INTERPRET", None)
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), mode, arch, source(), str(folder)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def tell(self, **request: Any) -> dict[str, Any]:
        """What the process answers. Raises RuntimeError with all that it printed if it ended
        instead.
        """
        assert self.process.stdin and self.process.stdout
        printed = []
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            for line in self.process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
                printed.append(line)
        except BrokenPipeError:
            printed += list(self.process.stdout)
        raise RuntimeError(f"the process with AITER ended:\n{''.join(printed)}")

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(60)


ANSWER = "answer: "


def source() -> str:
    return os.environ.get("ATOMC_AITER_SOURCE", "")


def is_todays() -> bool:
    """Whether it has the folders of today; before, it had fewer functions, and its MXFP4 rounded
    ties away from zero.
    """
    return Path(source(), "aiter/ops/triton/quant").is_dir()


def staged(mode: str, arch: str, folder: Path) -> Iterator[Stage]:
    stage = Stage(mode, arch, folder)
    yield stage
    stage.close()
