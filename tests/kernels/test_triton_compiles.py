"""Kernels around the cache, of experts, and some of linear layers compile for GPUs that are not
here; the interpreter says nothing of that.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CALLS = (
    "kv_write/fp8 with scales",
    "rope_kv_write/fp8, scales",
    "rope_kv_write/dense, batch",
    "qk_norm_rope_kv_write/fp8, scales",
    "paged_attention/fp8 with scales, decode",
    "varlen_attention/three sequences",
    "rms_norm_add_rms_norm/packed",
    "rms_norm_pair/packed",
    "rms_norm_pair_quant/fp8_group, x",
    "rms_norm_pair_quant/mxfp4, packed",
    "mla_absorbed_attention/DeepSeek-V3",
    "mla_absorbed_attention/DeepSeek-V3, decode",
    "mla_absorbed_attention/fp8",
    "mla_absorbed_attention/chosen, DeepSeek-V3.2",
    "mla_absorbed_attention/chosen, fp8",
    "paged_index_topk/DeepSeek-V3.2",
    "paged_index_topk/fp8",
    "index_write/fp8",
    "ssm_scan_update/Granite 4",
    "mla_kv_write/fp8",
    "mla_paged_attention/fp8",
    "mla_rope_kv_write/several tokens",
    "bmm_rope_kv_write/fp8, fp8 cache",
    "bmm_rope_kv_write/mxfp4, several tokens",
    "linear_split_cat/fp8_block, several tokens",
    "linear_split_cat/mxfp4, several tokens",
    "topk_route/groups of two",
    "topk_route/square root",
    "rms_norm_gated/packed",
    "linear_gated/one row",
    "linear_gated/sixteen rows",
    "rotary_tables/in the dtype of the model",
    "rotary_tables/pairs, image",
    "causal_conv1d_update/chunks",
    "gated_delta_rule_update/packed, decode",
    "conv_gated_delta_rule_update/packed, decode",
    "delta_gates/packed",
)
EXPERTS = (
    "moe_experts/GPT-OSS",
    "moe_experts/transposed",
    "moe_experts_fp8/odd sizes",
    "moe_experts_fp8/blocks",
    "moe_experts_int8/odd sizes",
    "moe_experts_mxfp4/GPT-OSS",
    "moe_experts/transposed halves",
    "moe_experts/full blocks",
    "moe_experts_fp8/full blocks",
    "moe_experts_fp8/blocks, interleaved",
    "moe_experts_int8/biases",
    "moe_experts_w4a16/zeros",
)
LINEARS = (
    "linear_w4a16/zero points, one row, bias",
    "linear_w4a16/many rows, parts that are not full",
    "linear_mxfp4/columns of several programs",
    "linear_mxfp4/many rows, parts that are not full",
    "linear_nvfp4/one row",
    "linear_nvfp4/many rows",
    "lora_linear/merged",
    "lora_linear/many rows",
    "lora_linear/widest rank",
)
# What AMD's GPUs have otherwise: fp8, and the products of tensor cores.
ON_AMD = (
    "kv_write/fp8 with scales",
    "paged_attention/fp8 with scales, decode",
    "mla_absorbed_attention/DeepSeek-V3",
    "mla_absorbed_attention/chosen, fp8",
    "paged_index_topk/fp8",
    "ssm_scan_update/Granite 4",
    "bmm_rope_kv_write/fp8, fp8 cache",
    "linear_split_cat/mxfp4, several tokens",
    "topk_route/groups of two",
    "gated_delta_rule_update/packed, decode",
)
# On AMD its products have another precision, which is chosen where the kernel is launched.
CHUNKS = ("gated_delta_rule_update/Qwen3.5",)


def compiled(target: str, calls: tuple[str, ...], cache: Path) -> list[str]:
    """The lines of compile_triton.py about these calls; `cache` gets what the compiler wrote."""
    # A process of its own: where there is no GPU, this one has Triton's interpreter.
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).parents[1] / "_support/compile_triton.py"
    done = subprocess.run(
        [sys.executable, script, target, *calls], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        pytest.param("sm90", CALLS, id="sm90", marks=pytest.mark.rotating),
        pytest.param("sm90", LINEARS, id="sm90 linears"),
        pytest.param("gfx942", ON_AMD, id="gfx942"),
        pytest.param("gfx942", CALLS, id="gfx942, all", marks=pytest.mark.slow),
        pytest.param(
            "sm90", EXPERTS + CHUNKS, id="sm90 experts and chunks", marks=pytest.mark.rotating
        ),
    ],
)
def test_every_kernel_compiles(target: str, calls: tuple[str, ...], tmp_path: Path) -> None:
    lines = compiled(target, calls, tmp_path)
    assert len(lines) >= len(calls) and all(line.endswith(" compiled") for line in lines), lines


def test_one_or_two_warps_multiply_rows_that_are_read_16_bytes_at_a_time(tmp_path: Path) -> None:
    """With four adjacent columns of x in a thread, Triton copies pairs of them by themselves."""
    case = "many experts, few tokens"
    compiled("sm90", (f"moe_experts_mxfp4/{case}", f"moe_experts_w4a16/{case}"), tmp_path)
    texts = [path.read_text() for path in tmp_path.rglob("_product.ttgir")]
    products = [text for text in texts if "experts_4_bits.py" in text]
    assert len(products) == 4  # gate and up, and down, of both
    for text in products:
        assert "nvidia_mma<{versionMajor = 2" in text
        assert "kWidth = 2" in text and "kWidth = 4" not in text


@pytest.mark.rotating
def test_4_bit_weights_are_multiplied_in_the_registers_that_read_them(tmp_path: Path) -> None:
    """Through shared memory a product takes several times as long; only its result, written once,
    goes there.
    """
    cases = ("many experts, few tokens", "group of 64")
    compiled("sm90", tuple(f"moe_experts_w4a16/{case}" for case in cases), tmp_path)
    texts = [path.read_text() for path in tmp_path.rglob("_product.ptx")]
    products = [text for text in texts if "experts_4_bits.py" in text]
    assert len(products) == 4  # gate and up, and down, of both
    # Instructions of 16 columns and rows: a warp has 16 rows of one pair, and 32 of several.
    assert sorted(text.count("mma.sync") for text in products) == [8, 8, 16, 16]
    for text in products:
        assert text.count("st.shared") < 10


@pytest.mark.rotating
def test_int4_layers_are_multiplied_in_the_registers_that_read_them(tmp_path: Path) -> None:
    """Weights do not pass through shared memory a second time; scales are read ahead, too."""
    cases = ("parts that are not full", "groups of 128, several programs")
    compiled("sm90", tuple(f"linear_w4a16/{case}" for case in cases), tmp_path)
    texts = [path.read_text() for path in tmp_path.rglob("_rows.ptx")]
    texts = [text for text in texts if "w4a16_mma_rows.py" in text]
    assert len(texts) == 2
    for text in texts:
        # Instructions of 16 columns each; from Triton 3.9 on, those of a warp group, with the
        # weights in registers: {sums}, {weights}, descriptor of x.
        before, *products = re.split(r"mma\.sync|wgmma\.mma_async\.sync", text)
        assert len(products) == 8
        groups = re.findall(r"wgmma\.mma_async[^{;]*(\{[^}]*\}, *\{[^}]*\}, *%rd)?", text)
        assert all(groups)
        assert text.count("st.shared") < 10  # of the result
        assert "ld.global" not in before
