"""Models whose cache is kept in the order of AMD's kernels, over stand-ins for AITER's functions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import stand_ins
import torch
import transformers
from torch import Tensor

import atomc
from atomc import OptionsError, ops
from atomc.loading.create_model import create_model
from atomc.platform import Platform
from atomc.testing.layouts import plain_order_kernel

CONFIG: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [2, 7, 1]]


@pytest.fixture
def gfx950(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = replace(Platform.named("gfx950"), device="cpu", here=True)
    monkeypatch.setattr(Platform, "detect", staticmethod(lambda device_type=None: platform))


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
STOCK: dict[str, Any] = {}  # Qwen3 of transformers, with a batch of one


def generated(name: dict[str, Any] = LLAMA, **options: Any) -> tuple[list[list[int]], set[str]]:
    """Tokens, and layouts of the cache."""
    torch.manual_seed(0)
    if name is STOCK:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**CONFIG)).bfloat16()
    else:
        model = create_model(CONFIG | name, torch.bfloat16)
    model.requires_grad_(False).eval()
    llm = atomc.LLM(
        model,
        max_model_len=64,
        enforce_eager=True,
        options={"glue": "eager", "strict": True, "cache": False, **options},
    )
    params = atomc.SamplingParams(max_tokens=6, temperature=0.0)
    answers = [list(answer.token_ids) for answer in llm.generate(PROMPTS, params)]
    return answers, {spec.paging.layout for spec in llm.program.specs if spec.paging}


WRITTEN = "fused_qk_norm_rope_cache_pts_quant_shuffle"


@pytest.mark.usefixtures("gfx950")
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype", "functions"),
    [
        (LLAMA, "auto", {"fused_qk_rope_reshape_and_cache", "pa_fwd_asm", "unified_attention"}),
        (QWEN3, "auto", {WRITTEN, "pa_fwd_asm", "unified_attention"}),
        (QWEN3, "fp8", {WRITTEN, "pa_decode_gluon", "unified_attention"}),
        (STOCK, "auto", {WRITTEN, "pa_fwd_asm", "flash_attn_varlen_func"}),
        (STOCK, "fp8", {WRITTEN, "pa_decode_gluon", "unified_attention"}),
    ],
    ids=["llama", "qwen3", "qwen3 in fp8", "stock qwen3", "stock qwen3 in fp8"],
)
def test_a_model_in_the_shuffled_layout_generates_the_tokens_of_a_paged_one(
    name: dict[str, Any], kv_cache_dtype: str, functions: set[str]
) -> None:
    options = {"kv_cache_dtype": kv_cache_dtype}
    with stand_ins.installed("gfx950") as called:
        tokens, layouts = generated(name, **options)
        assert {function.rpartition(".")[2] for function in called} >= functions
    assert layouts == {"shuffled"}
    assert (tokens, {"paged"}) == generated(name, providers=("torch",), **options)


def test_other_machines_have_no_shuffled_layout() -> None:
    with pytest.raises(OptionsError, match="no kernel reads and writes it"):
        generated(layout="shuffled")


def test_shuffling_a_cache_moves_whole_pieces() -> None:
    """A kernel that does nothing sees keys [K, D/8, block_size, 8], values [K, block_size/8, D, 8]
    and leaves both as they were.
    """
    seen: dict[str, Tensor] = {}

    def kv_write(k_cache: Tensor, v_cache: Tensor) -> None:
        seen.update(k=k_cache.clone(), v=v_cache.clone())

    def numbered(*sizes: int) -> Tensor:
        return torch.arange(2 * 16 * 3 * 24, dtype=torch.int32).to(torch.int16).view(sizes)

    kernel = ops.Kernel("kv_write", "mine", kv_write, layout="shuffled")
    caches = {name: numbered(2, 16, 3, 24) for name in ("k_cache", "v_cache")}
    function: Callable[..., None] = plain_order_kernel(kernel).function
    function(**caches)
    assert all(torch.equal(cache, numbered(2, 16, 3, 24)) for cache in caches.values())
    token, head, column = 11, 2, 21
    number = numbered(2, 16, 3, 24)[1, token, head, column]
    assert seen["k"].view(2, 3, 3, 16, 8)[1, head, column // 8, token, column % 8] == number
    assert seen["v"].view(2, 3, 2, 24, 8)[1, head, token // 8, column, token % 8] == number
