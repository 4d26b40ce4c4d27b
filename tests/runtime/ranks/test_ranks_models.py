"""Checkpoints of each kind of model, served by several ranks: the text is that of one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")
pytest.importorskip("transformers")

import torch
import transformers
from embeddings import embed
from fake_group import without_groups
from tensor_parallel_ranks import fill
from test_quant_experts_checkpoints import GPT_OSS, WIDE, blocks
from test_tensor_parallel import BLOCKS, LATENT_BLOCKS
from tiny_experts import random_model
from tiny_experts import write as write_experts
from tiny_models import SIZES

from atomc.runtime.llm import LLM, SamplingParams
from atomc.runtime.ranks.local_launcher import LocalLauncher

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module", autouse=True)
def no_groups_of_other_tests() -> Iterator[None]:
    with without_groups():
        yield


SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_blocks": 40,
    "options": {"strict": True, "glue": "eager"},
    "progress": False,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [[1 + (7 * i + 3 * j) % 90 for j in range(1 + 5 * i)] for i in range(6)]
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = SHARED_EXPERT | {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
DELTA_NET = {
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT_V2 = LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}
INDEXED = LATENT | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
# Halves end at groups of 32 inputs, or at blocks of 128.
GROUPS = {"intermediate_size": 128}
EXPERT_GROUPS = EXPERTS | {"moe_intermediate_size": 64}
EXPERT_BLOCKS = BLOCKS | EXPERTS | {"moe_intermediate_size": 256}
FOUR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# The first stage has layers of one kind only.
MIXED = {
    "num_local_experts": 4,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"],
}
ALTERNATING = DELTA_NET | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

LOGITS_APART = "logits are gathered after the program"


class Row(NamedTuple):
    """differs: from the sizes of all models; settings: of the LLM."""

    model_type: str
    differs: Mapping[str, Any] = {}
    settings: Mapping[str, Any] = {}
    tp: int = 2
    pp: int = 1
    dp: int = 1


SHARES_EXPERTS: dict[str, Any] = {"ep": True}
ROWS = {
    "experts by expert": Row("mixtral", {"num_local_experts": 4}, {"ep": True}),
    "dense": Row("llama"),
    "norms of heads, four ranks": Row("qwen3", tp=4),
    "a class of transformers": Row("olmo2"),
    "experts by width": Row("qwen3_moe", EXPERTS),
    "experts by expert, four ranks": Row("qwen3_moe", EXPERTS, {"ep": True}, tp=4),
    "sinks and windows": Row("gpt_oss", {"num_local_experts": 4, "sliding_window": 8}),
    "latent attention": Row("deepseek_v3", LATENT),
    "latent attention of a class of transformers": Row("youtu", LATENT | {"head_dim": 8}),
    "latent attention of a class of transformers, fp8": Row(
        "youtu", LATENT_BLOCKS, {"quantization": "fp8_block"}
    ),
    "latent attention, a class that is read whole": Row("axk1", LATENT | {"head_dim": 8}),
    "recurrent state": Row("qwen3_next", DELTA_NET),
    "recurrent state, dense": Row("qwen3_5_text", DELTA_NET),
    "recurrent state, four ranks": Row("qwen3_5_moe_text", DELTA_NET | FOUR_HEADS, tp=4),
    "recurrent state of a class of transformers": Row("olmo_hybrid", DELTA_NET),
    "recurrent state, 4 bits": Row(
        "qwen3_5_text", DELTA_NET | {"intermediate_size": 128}, {"quantization": "mxfp4_a16"}
    ),
    "recurrent state, drafts": Row("qwen3_next", DELTA_NET, {"speculative": "ngram"}),
    "4 bits": Row("llama", {"intermediate_size": 128}, {"quantization": "mxfp4_a16"}),
    "drafts": Row("qwen3", {}, {"speculative": "ngram"}),
    "int4": Row("llama", GROUPS, {"quantization": "int4"}),
    "int4, experts by width": Row("qwen3_moe", EXPERT_GROUPS, {"quantization": "int4"}),
    "int4, experts by expert": Row(
        "qwen3_moe", EXPERT_GROUPS, {"quantization": "int4", "ep": True}
    ),
    "fp8 blocks": Row("llama", BLOCKS, {"quantization": "fp8_block"}),
    "fp8 blocks, experts by width": Row("qwen3_moe", EXPERT_BLOCKS, {"quantization": "fp8_block"}),
    "experts by width, Mixtral": Row("mixtral", {"num_local_experts": 4}),
    "a shared expert": Row("glm4_moe", SHARED_EXPERT),
    "latent attention, GLM": Row("glm4_moe_lite", LATENT),
    "latent attention, groups of experts": Row("deepseek_v2", LATENT_V2),
    "latent attention, an indexer": Row("deepseek_v32", INDEXED),
    "4 bits, four ranks": Row(
        "llama", GROUPS | {"head_dim": 32}, {"quantization": "mxfp4_a16"}, tp=4
    ),
    "a shared expert, four ranks": Row("glm4_moe", SHARED_EXPERT, tp=4),
    "latent attention, four ranks": Row("deepseek_v3", LATENT, tp=4),
    "recurrent state of heads, four ranks": Row("qwen3_next", DELTA_NET | FOUR_HEADS, tp=4),
    "stages": Row("llama", tp=1, pp=2),
    "stages, int4": Row("llama", GROUPS, {"quantization": "int4"}, tp=1, pp=2),
    "stages, experts by width": Row("qwen3_moe", EXPERTS, pp=2),
    "stages of a class of transformers": Row("olmo2", tp=1, pp=2),
    "stages, scaled embeddings": Row("granite", {"embedding_multiplier": 3.0}, tp=1, pp=2),
    "stages, experts by expert": Row("qwen3_moe", EXPERTS, {"ep": True}, pp=2),
    "stages, windows in some": Row("gpt_oss", MIXED, tp=1, pp=2),
    "stages, latent attention": Row("deepseek_v3", LATENT, pp=2),
    "stages, recurrent state": Row("qwen3_next", ALTERNATING, tp=1, pp=2),
    "stages of two ranks, recurrent state": Row("qwen3_next", ALTERNATING, pp=2),
    "stages, 4 bits": Row("llama", {"intermediate_size": 128}, {"quantization": "mxfp4_a16"}, pp=2),
    "three stages, drafts": Row(
        "qwen3", {"num_hidden_layers": 4}, {"speculative": "ngram"}, tp=1, pp=3
    ),
    "own requests": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS, tp=1, dp=2),
    "own requests, four ranks": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS, tp=1, dp=4),
    "own requests, sinks and windows": Row(
        "gpt_oss", {"num_local_experts": 4, "sliding_window": 8}, SHARES_EXPERTS, tp=1, dp=2
    ),
    "own requests of two ranks each": Row("qwen3_moe", EXPERTS, SHARES_EXPERTS, tp=2, dp=2),
    "own requests of two ranks each, a class of transformers": Row(
        "olmoe", EXPERTS, SHARES_EXPERTS, tp=2, dp=2
    ),
    "own requests, latent attention": Row("deepseek_v3", LATENT, SHARES_EXPERTS, tp=1, dp=2),
    "own requests, a class of transformers": Row("olmoe", EXPERTS, SHARES_EXPERTS, tp=1, dp=2),
    "own requests, recurrent state, drafts": Row(
        "qwen3_next", DELTA_NET, SHARES_EXPERTS | {"speculative": "ngram"}, tp=1, dp=2
    ),
    "own requests, fp8": Row(
        "qwen3_moe", EXPERTS, SHARES_EXPERTS | {"quantization": "fp8_per_token"}, tp=1, dp=2
    ),
}
PER_CHANGE = {
    "recurrent state, dense",
    "own requests of two ranks each",
}


def text(folder: Any, row: Row, **settings: Any) -> list[tuple[int, ...]]:
    """The tokens of each prompt."""
    with LLM(folder, **(SETTINGS | dict(row.settings) | settings)) as llm:
        if settings.get("tp", 1) > 1 and settings.get("pp", 1) == 1:
            assert any(LOGITS_APART in note for note in llm.program.report.notes)
        return [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]


def checkpoint(folder: Any, row: Row) -> Any:
    """A checkpoint of the row's model with random weights; its folder."""
    sizes = SIZES | {"num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 0}
    config = transformers.AutoConfig.for_model(row.model_type, **(sizes | dict(row.differs)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(folder)
    return folder


@pytest.mark.rotating
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if name in PER_CHANGE else pytest.mark.slow)
        for name, row in ROWS.items()
    ],
)
def test_several_ranks_give_the_text_of_one(row: Row, tmp_path: Any) -> None:
    checkpoint(tmp_path, row)
    expected = text(tmp_path, row, ep=False)
    assert len({tokens for tokens in expected}) == len(PROMPTS)
    assert text(tmp_path, row, tp=row.tp, pp=row.pp, dp=row.dp) == expected


GPT_OSS_ROWS = {
    "by width": Row("gpt_oss"),
    "by expert": Row("gpt_oss", {}, SHARES_EXPERTS),
    "by width, four ranks": Row("gpt_oss", tp=4),
    "stages": Row("gpt_oss", pp=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", GPT_OSS_ROWS.values(), ids=GPT_OSS_ROWS)
def test_ranks_of_the_blocks_of_gpt_oss_give_the_text_of_one(row: Row, tmp_path: Path) -> None:
    model = random_model("gpt_oss", **WIDE)
    fill(model)
    tensors = {name: weight.data for name, weight in model.named_parameters()}
    write_experts(tmp_path, "gpt_oss", blocks(tensors), GPT_OSS, **WIDE)
    expected = text(tmp_path, row, ep=False)
    assert len(set(expected)) == len(PROMPTS)
    assert text(tmp_path, row, tp=row.tp, pp=row.pp) == expected


# The experts of the first layer on so many ranks, by rank; the second layer keeps ranges.
PLACED = {2: [1, 0, 0, 1], 4: [2, 0, 3, 1]}
PLACED_ROWS = {
    "4 bits": Row("qwen3_moe", EXPERTS, {"ep": True, "quantization": "mxfp4_a16"}),
    "own requests, fp8": ROWS["own requests, fp8"],
    "a class of transformers": Row("olmoe", EXPERTS, {"ep": True}),
    "own requests, a class of transformers": ROWS["own requests, a class of transformers"],
    "own requests of two ranks each": ROWS["own requests of two ranks each"],
    "a shared expert": Row("deepseek_v3", LATENT, {"ep": True}),
    "drafts": Row("qwen3_moe", EXPERTS, {"ep": True, "speculative": "ngram"}),
}


def texts_and_counts(
    folder: Any, row: Row, **settings: Any
) -> tuple[list[tuple[int, ...]], Mapping[str, Sequence[int]]]:
    """The tokens of each prompt, and those of each expert."""
    with LLM(folder, **(SETTINGS | dict(row.settings) | settings)) as llm:
        tokens = [completion.token_ids for completion in llm.generate(PROMPTS, GREEDY)]
        return tokens, llm.engine.stats().expert_load


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if i == 1 else pytest.mark.slow)
        for i, (name, row) in enumerate(PLACED_ROWS.items())
    ],
)
def test_ranks_of_placed_experts_give_the_text_and_the_counts_of_one(
    row: Row, tmp_path: Any
) -> None:
    checkpoint(tmp_path, row)
    expected, counts = texts_and_counts(tmp_path, row, ep=False, expert_load=True)
    assert all(len(each) == 4 and sum(each) for each in counts.values())
    placement = {path: PLACED[row.tp * row.dp] for path in list(counts)[:1]}
    (tmp_path / "placement.json").write_text(json.dumps(placement))
    found = texts_and_counts(
        tmp_path,
        row,
        tp=row.tp,
        dp=row.dp,
        expert_load=True,
        expert_placement=tmp_path / "placement.json",
    )
    assert found == (expected, counts)


@pytest.mark.slow
def test_stages_of_placed_experts_give_the_text_of_one(tmp_path: Any) -> None:
    row = ROWS["stages, experts by expert"]
    checkpoint(tmp_path, row)
    placement = {f"model.layers.{layer}.mlp.experts": PLACED[2] for layer in range(2)}
    (tmp_path / "placement.json").write_text(json.dumps(placement))
    given = {"tp": row.tp, "pp": row.pp, "expert_placement": tmp_path / "placement.json"}
    assert text(tmp_path, row, **given) == text(tmp_path, row, ep=False)


def test_a_bad_placement_is_refused_before_other_ranks_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(LocalLauncher, "start", start)
    checkpoint(tmp_path, Row("qwen3_moe", EXPERTS))
    file = tmp_path / "placement.json"
    settings = SETTINGS | {"tp": 2, "ep": True, "expert_placement": file}
    for content, message in {
        '{"model.layers.0.mlp.experts": [0, 1, 2, 3]}': "expert 2 is on rank 2",
        '{"model.layers.0.mlp.experts": [0, 1]}': "ranks of 2 experts for .*, which has 4",
        '{"model.layers.5.mlp.experts": [0, 1, 0, 1]}': "which are no experts of this model",
    }.items():
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, **settings)


# Of one engine of two ranks: steps of both with rows that only some of them sample, mask or score.
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "seed": 1},
    {"allowed_token_ids": (3, 5, 7, 11, 13), "temperature": 0.5, "seed": 2},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 3, "n": 3},
]


@pytest.mark.slow
def test_requests_of_all_kinds_are_divided_among_ranks_that_share_experts(tmp_path: Any) -> None:
    row = ROWS["own requests"]
    config = transformers.AutoConfig.for_model(row.model_type, **(SIZES | dict(row.differs)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.save_pretrained(tmp_path)
    prompts = [[1 + (5 * i + 3 * j) % 90 for j in range(1 + 3 * i)] for i in range(12)]
    params = [
        SamplingParams(max_tokens=6, ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(len(prompts))
    ]

    def outputs(**settings: Any) -> Any:
        with LLM(tmp_path, **(SETTINGS | {"dtype": "float64"} | settings)) as llm:
            found = llm.generate(prompts, params)
            tokens = [(each.token_ids, each.finish_reason) for each in found]
            logprobs = [each.logprobs and len(each.logprobs) for each in found]
            scored = [each.prompt_logprobs and len(each.prompt_logprobs) for each in found]
            embedded = embed(llm.engine, [prompt for prompt in prompts if len(prompt) > 1])
            llm.engine.check()
            return tokens, logprobs, scored, torch.tensor(embedded)

    *expected, means = outputs()
    *found, means_of_ranks = outputs(dp=2, ep=True)
    assert found == expected
    torch.testing.assert_close(means_of_ranks, means)
