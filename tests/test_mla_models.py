"""Models of latent attention: the stock classes against transformers on the same random weights."""

import pytest
import torch
from test_models import YARN
from test_moe_models import EAGER, theirs_of
from torch import nn

from atomc import models
from atomc.runtime.llm import LLM
from atomc.runtime.sampling.sampling_params import SamplingParams

transformers = pytest.importorskip("transformers")

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
# name -> model_type and what differs from TINY
KINDS = {
    "deepseek_v2": (
        "deepseek_v2",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek_v3, no q_lora": (
        "deepseek_v3",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | {"tie_word_embeddings": True}),
}


def theirs(name: str) -> nn.Module:
    """The transformers model of this kind."""
    model_type, differs = KINDS[name]
    return theirs_of(model_type, **differs)


def prompts_of(count: int, longest: int, common: int = 0) -> list[list[int]]:
    """Prompts of random lengths, behind as many tokens that all of them begin with."""
    generator = torch.Generator().manual_seed(3)
    prefix = torch.randint(3, 96, (common,), generator=generator).tolist()
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [prefix + torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]


def generated(model: nn.Module, prompts: list[list[int]], count: int) -> list[list[int]]:
    """What transformers generates greedily."""
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def served(
    model: nn.Module, prompts: list[list[int]], count: int, **settings: object
) -> tuple[list[list[int]], int]:
    """What the runtime generates greedily, and how many tokens of prompts the prefix cache had."""
    settings = {"options": EAGER, "max_num_seqs": 8, "max_model_len": 96} | settings
    llm = LLM(model, progress=False, **settings)
    # The first one alone, so that its blocks are in the prefix cache.
    made = llm.generate(prompts[:1], SamplingParams(max_tokens=count))
    made += llm.generate(prompts[1:], SamplingParams(max_tokens=count))
    return [list(each.token_ids) for each in made], sum(each.num_cached for each in made)


@pytest.mark.parametrize("name", KINDS)
def test_a_wrapped_class_has_handles_as_wide_as_its_keys(name: str) -> None:
    model = models.wrap_stock(theirs(name))
    handles = [buffer for path, buffer in model.named_buffers() if path.endswith(".kv")]
    assert [tuple(handle.shape) for handle in handles] == [(0, 4, 24)] * 2


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("deepseek_v3", {"max_num_batched_tokens": 7}),
        *(
            pytest.param(name, settings, marks=pytest.mark.slow)
            for name in KINDS
            for settings in (
                {"max_num_batched_tokens": 7},
                {"enable_prefix_caching": False},
                {"options": EAGER | {"layout": "contiguous"}},
            )
            if (name, settings) != ("deepseek_v3", {"max_num_batched_tokens": 7})
        ),
    ],
    ids=str,
)
def test_chunks_ragged_batches_and_a_shared_prefix_give_the_text_that_transformers_generates(
    name: str, settings: dict[str, object]
) -> None:
    model, prompts = theirs(name), prompts_of(6, 24, common=35)
    expected = generated(model, prompts, 12)
    made, num_cached = served(model, prompts, 12, **settings)
    assert made == expected
    shares = "options" not in settings and "enable_prefix_caching" not in settings
    assert num_cached == (5 * 32 if shares else 0)
