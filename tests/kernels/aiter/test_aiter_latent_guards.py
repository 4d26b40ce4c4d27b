"""What kernels of latent attention over AITER refuse, and what they do where AITER would leave
memory unwritten or take another default.
"""

from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
from aiter_cases import KERNELS, SHUFFLED, cases, prepared
from argument_changes import placed
from kernel_cases.draw import E4M3, Draw
from kernel_cases.indexer import chosen_rows, ranked_codes
from kernel_cases.mla import (
    latent_attended,
    latent_multiplied,
    latent_paged,
    latent_projected,
    latent_rope_written,
    latent_written,
    split_and_joined,
)
from tiny_experts import sqnr

from atomc import ops
from atomc.kernels.aiter.latent import latent_attention, latent_cache
from atomc.kernels.aiter.linear import linear_shuffled_split_cat_mxfp4
from atomc.ops.op import Refusal, refusal
from atomc.platform import Platform

DRAW = Draw(torch.bfloat16)
HERE = replace(Platform.named("gfx950"), here=True)
OLDER = replace(Platform.named("gfx942"), here=True)
WIDTHS = {"latent": 512, "rotated": 64}
ASSEMBLY = "latent_attention.mla_absorbed_attention"
TRITON = "latent_attention_triton.mla_absorbed_attention"
KV_WRITE = "latent_cache.mla_kv_write"
ROPE_KV_WRITE = "latent_cache.mla_rope_kv_write"
LATENT = [
    name
    for name, kernel in KERNELS.items()
    if "mla" in kernel.op
    or kernel.op in ("bmm_rope_kv_write", "linear_split_cat", "quantized_linear_by_head")
]


def refused(name: str, given: dict[str, Any], platform: Platform = HERE) -> Refusal | None:
    with stand_ins.installed(platform.arch):
        return refusal(KERNELS[name], platform, given)


@pytest.mark.parametrize("name", LATENT)
def test_other_machines_are_refused(name: str) -> None:
    for make in cases(KERNELS[name], "gfx950").values():
        given = make(Draw(torch.bfloat16))
        if refusal(KERNELS[name], Platform.named("gfx950"), given) is None:
            assert refusal(KERNELS[name], Platform.named("sm90"), given) == Refusal(
                "hardware", "AITER runs on AMD GPUs"
            )


def test_assembly_takes_its_widths_heads_and_dtypes() -> None:
    def of(platform: Platform = HERE, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Any:
        given = latent_paged(Draw(dtype), [(1, 20), (1, 3)], **{**WIDTHS, **how})
        return refused(ASSEMBLY, given, platform)

    assert of(heads=16) is of(heads=128) is of(OLDER, heads=48) is None
    assert of(latent=256) == Refusal(
        "shape",
        "a latent of 256 and 64 rotated columns: AITER's assembly has 512 and 64",
    )
    assert of(heads=129) == Refusal("shape", "129 heads: AITER's assembly takes up to 128")
    assert of(heads=32) is None
    assert of(OLDER, heads=20) == Refusal(
        "shape", "20 heads: AITER does not support 32 on gfx942 in bfloat16"
    )
    assert of(dtype=torch.float16) == Refusal(
        "dtype", "q is torch.float16: written for torch.bfloat16"
    )
    assert of(cache=E4M3) is None
    assert of(OLDER, cache=E4M3) == Refusal(
        "dtype",
        "the cache is torch.float8_e4m3fn: AITER's assembly reads torch.bfloat16, or "
        "torch.float8_e4m3fnuz with a scale",
    )


def test_a_layout_that_is_not_aiters_is_refused() -> None:
    given = latent_paged(DRAW, [(1, 20)], heads=16, **WIDTHS)
    blocks = given["kv_cache"]
    given["kv_cache"] = torch.cat((blocks, blocks), 1)[:, :16]
    assert refused(ASSEMBLY, given) == Refusal(
        "layout", "the blocks of the cache are not contiguous"
    )
    given["kv_cache"] = blocks.transpose(1, 2).contiguous().transpose(1, 2)
    assert refused(ASSEMBLY, given) is not None
    assert refused(TRITON, given) == Refusal(
        "layout", "the last dimension of kv_cache is not contiguous"
    )
    given = latent_projected(DRAW, [(40, 40)], values=24)
    assert refused("latent_prompts.mla_paged_attention", given) is None
    given["kv_cache"] = placed(given["kv_cache"], 1, more=16)
    assert refused("latent_prompts.mla_paged_attention", given) == Refusal(
        "layout", "the blocks of the cache are not contiguous"
    )
    assert {KERNELS[name].layout for name in LATENT} <= {"paged", None}


def test_the_indexer_chooses_as_many_keys_as_atom_has_aiter_choose() -> None:
    given = ranked_codes(DRAW, [(1, 70)], heads=64, width=128, topk=64)
    assert refused("indexer.paged_index_topk", given) == Refusal(
        "argument", "64 chosen keys: AITER is used for 2048"
    )


def test_amd_gpus_read_chosen_keys_with_the_projections_absorbed() -> None:
    [kernel] = [k for k in ops.mla_paged_attention.kernels if k.provider == "triton"]
    given = latent_projected(DRAW, [(3, 9)]) | {"chosen": chosen_rows(DRAW, [(3, 9)], 5)}
    assert refusal(kernel, Platform.named("sm90"), given) is None
    assert refusal(kernel, Platform.named("gfx950"), given) == Refusal(
        "hardware", "AMD GPUs read chosen keys with the projections absorbed"
    )
    assert refusal(kernel, Platform.named("gfx950"), given | {"chosen": None}) is None


def test_triton_takes_powers_of_two() -> None:
    assert refused(TRITON, latent_paged(DRAW, [(1, 20)])) is None
    assert refused(TRITON, latent_paged(DRAW, [(1, 20)], latent=48)) == Refusal(
        "shape",
        "a latent of 48 and 16 rotated columns: AITER takes powers of two from 16 on",
    )


def test_keys_that_have_no_thread_are_refused() -> None:
    assert refused(KV_WRITE, latent_written(DRAW, latent=16, rotated=16)) is None
    assert refused(KV_WRITE, latent_written(DRAW, latent=16, rotated=24)) == Refusal(
        "shape",
        "16 + 24 columns: AITER's threads are those of a latent of up to 1024 columns, which is at "
        "least as wide as the key",
    )
    given = latent_written(DRAW, latent=16, rotated=16)
    given["kv_c"] = torch.randn(7, 37).bfloat16()[:, :16]
    assert refused(KV_WRITE, given) == Refusal(
        "layout", "the rows of kv_c are not a multiple of 8 elements apart"
    )


def test_codes_whose_rotation_does_not_saturate_are_written_after_it() -> None:
    given = latent_rope_written(DRAW, heads=4, cache=E4M3, **WIDTHS)
    assert refused(ROPE_KV_WRITE, given) == Refusal(
        "argument",
        "AITER's write, which does not saturate rotated codes, does not support scale",
    )
    assert refused("mla_unfused.mla_rope_kv_write", given) is None


def test_queries_of_tokens_without_a_slot_are_written_or_the_sizes_refused() -> None:
    given = latent_rope_written(DRAW, heads=4, skip=(0, 3), **WIDTHS)
    assert refused(ROPE_KV_WRITE, given) is None
    with stand_ins.installed("gfx950"):
        out, _ = KERNELS[ROPE_KV_WRITE].function(**given)
    assert torch.equal(out[0, :, :512], given["q_nope"][0])
    assert refused(ROPE_KV_WRITE, latent_rope_written(DRAW, heads=3, **WIDTHS)) == Refusal(
        "shape",
        "3 heads over 512 + 64 columns: with others than 4 heads and more over 512 + 64, AITER "
        "leaves queries without a slot unwritten",
    )


def test_tables_with_one_row_for_all_tokens_are_refused() -> None:
    given = latent_rope_written(DRAW, heads=4, **WIDTHS)
    assert refused(ROPE_KV_WRITE, given) is None
    given |= {name: given[name][:1] for name in ("cos", "sin")}
    assert refused(ROPE_KV_WRITE, given) == Refusal(
        "shape", "the tables do not have a row for each token"
    )


def test_tables_with_two_angles_a_pair_are_refused() -> None:
    given = latent_rope_written(DRAW, heads=4, rope_style="neox", **WIDTHS)
    assert refused(ROPE_KV_WRITE, given) == Refusal(
        "argument", "the tables have two angles a pair, AITER's kernel reads one"
    )


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4"])
def test_a_shuffled_weight_consists_of_whole_tiles(scheme: str) -> None:
    module = "linear_shuffled_split_cat" + ("_mxfp4" if scheme == "mxfp4" else "")

    def of(**how: int) -> Refusal | None:
        sizes = {"heads": 4, "nope": 80, "values": 48, "latent": 512} | how
        given = split_and_joined(DRAW, scheme, **sizes)
        return refusal(KERNELS[f"{module}.linear_split_cat"], Platform.named("gfx950"), given)

    assert of() is None
    for reason in (of(heads=3), of(latent=192)):
        assert reason is not None and reason.text.endswith(
            "bytes: AITER reads whole tiles of a shuffled one, of 256 x 128"
        )


def test_scales_of_x_are_shuffled_from_32_rows_on() -> None:
    shapes = []
    kernel = KERNELS["linear_shuffled_split_cat_mxfp4.linear_split_cat"]

    def noted(x: Any, w: Any, y: Any, x_scale: Any, *rest: Any, **how: Any) -> Any:
        shapes.append(tuple(x_scale.shape))
        return x.new_empty(len(x), 4, 96, dtype=how["dtype"]), x.new_empty(
            len(x), 4, 48, dtype=how["dtype"]
        )

    function = linear_shuffled_split_cat_mxfp4.fused_gemm_afp4wfp4_preshuffle_split_cat
    with stand_ins.installed("gfx950"):
        function.found = noted
        for tokens in (31, 32, 33):
            given = split_and_joined(DRAW, "mxfp4", tokens, heads=4, nope=80, values=48, latent=512)
            kernel.function(**prepared(kernel, given))
    assert shapes == [(31, 16), (8, 512), (8, 512)]


@pytest.mark.parametrize("widths", [(40, 48), (264, 40), (44, 40), (40, 36)])
def test_keys_and_values_of_other_widths_are_not_expanded(widths: tuple[int, int]) -> None:
    key, value = widths
    reason = Refusal(
        "shape",
        f"keys of {key} columns and values of {value}: AITER takes multiples of 8 up to 256, and "
        "values that are not wider than keys",
    )
    how = {"nope": key - 16, "values": value}
    assert refused("latent_prompts.mla_attention", latent_attended(DRAW, **how)) == reason
    given = latent_projected(DRAW, [(9, 9)], **how)
    assert refused("latent_prompts.mla_paged_attention", given) == reason


@pytest.mark.parametrize("scheme", ["fp8_block", "mxfp4"])
def test_latents_that_are_walked_are_not_quantized(scheme: str) -> None:
    """Of a step with few rows over many keys; the weight is that of its shuffled tiles."""
    kernel = KERNELS["latent_prompts.quantized_mla_paged_attention"]
    given = latent_multiplied(DRAW, [(1, 200), (3, 9)], scheme, **SHUFFLED)
    names = ("weight", "weight_scale", "scheme")
    weight = ops.kv_b_weight.reference(**{n: given[n] for n in names}, dtype=torch.bfloat16)
    plain = {n: x for n, x in given.items() if n not in (*names, "dtype")}
    expected = ops.mla_paged_attention.reference(**plain, weight=weight)
    with stand_ins.installed("gfx950"):
        out = kernel.function(**prepared(kernel, given))
    assert sqnr(out, expected) > 35
    rounded = ops.quantized_mla_paged_attention.reference(**given)
    assert sqnr(out, expected) > sqnr(rounded, expected) + 5


def test_the_division_of_the_work_is_what_aiter_documents() -> None:
    """The work of a sequence without keys, which is padding, is one key; other arguments say that a
    row of the cache is a page, and which kernel is meant.
    """
    lengths = torch.tensor([40, 0, 3], dtype=torch.int32)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)
    with stand_ins.installed("gfx950"):
        pages, *divided = latent_attention.schedule(
            lengths, tables, 16, 16, torch.bfloat16, torch.bfloat16
        )
    made = latent_attention.Division(*divided)
    assert made.page_start.tolist() == [0, 40, 41, 44]
    assert pages[:44].tolist() == [*range(40), 48, *range(96, 99)]
    assert made.last_page_lens.tolist() == [1, 1, 1]
    assert made.work_indptr.dim() == 1 and made.work_info_set.shape[1] == 8
    works = made.work_info_set[: made.work_indptr[-1], [0, 2, 4, 5]].tolist()
    assert works == [[0, 0, 0, 16], [0, 0, 16, 40], [1, 1, 40, 41], [2, 2, 41, 44]]


def test_the_functions_of_versions_that_leave_queries_unwritten_are_refused() -> None:
    function = latent_cache.fused_qk_rope_concat_and_cache_mla
    with stand_ins.installed("gfx950"):
        function.found = "it takes no compute_all_q_rope"
        given = latent_rope_written(DRAW, heads=4, **WIDTHS)
        assert refusal(KERNELS[ROPE_KV_WRITE], HERE, given) == Refusal(
            "library", "it takes no compute_all_q_rope"
        )
