"""Processes that hold a part of each model compute what one process computes, eager and compiled."""

import multiprocessing
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import tensor_parallel_ranks as ranks
from tensor_parallel_ranks import Case, Result

pytestmark = pytest.mark.xdist_group("tensor_parallel")
BIASES = {"attention_bias": True, "mlp_bias": True}
TIED, ONE_KEY_HEAD = {"tie_word_embeddings": True}, {"num_key_value_heads": 1}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
# Two blocks of 128 outputs of heads, and of their results, for two ranks.
LATENT_BLOCKS = {
    **LATENT,
    "hidden_size": 128,
    "intermediate_size": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "head_dim": 64,
}
GROUPED = {name: LATENT[name] for name in list(LATENT)[1:7]}
GATED = MOE | {
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
}
RECURRENT = GATED | {"layer_types": ["linear_attention", "full_attention"]}
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_key_value_heads": 4}
# Halves end at groups of 32 inputs.
GROUPS = {"intermediate_size": 128}
EXPERT_GROUPS = MOE | {"moe_intermediate_size": 64}
EXPERT_BLOCKS = BLOCKS | MOE | {"moe_intermediate_size": 256}
# Of logits, relative to the largest. Weight-only schemes have the weights of one process. fp8_block
# has its scales, too: a part ends with a block of activations. But where sums differ in the last
# bit, an activation may be rounded to the next fp8 number.
TOLERANCE = {"fp8_block": 2e-2}
# Per change; an eager case takes less than a tenth of a second.
CASES = [
    Case("llama", differs=BIASES | TIED, compiles=True),
    Case("qwen3"),
    Case("qwen3", "stock"),
    Case("qwen3", "stock", {"num_hidden_layers": 3}, states=(1, 2)),
    Case("llama", compiles=True, states=(1,)),
    Case("llama", "stock", BIASES),
    Case("llama", "stock", TIED),
    Case("llama", differs=ONE_KEY_HEAD),
    Case("llama", "transformers", ONE_KEY_HEAD),
    Case("qwen3_moe", differs=MOE),
    Case("qwen3_moe", differs=MOE, ep=True),
    Case("qwen3_moe", "stock", MOE),
    Case("qwen3_moe", "stock", MOE, ep=True),
    Case("qwen3_moe", "transformers", MOE, ep=True),
    Case("gpt_oss", differs=LOCAL),
    Case("gpt_oss", differs=LOCAL, ep=True),
    Case("gpt_oss", "stock", LOCAL, ep=True),
    Case("qwen3_next", "stock", GATED, compiles=True),
    Case("phi3", "stock"),
    Case("gpt_neox", "stock", {"num_key_value_heads": 4}),
    Case("deepseek_v3", "stock", LATENT),
    Case("youtu", "transformers", LATENT | BIASES),
    Case("llama", differs=BLOCKS, scheme="fp8_block"),
    Case("youtu", "stock", LATENT_BLOCKS, scheme="fp8_block"),
    Case("llama", differs=GROUPS, scheme="int4"),
    Case("qwen3_moe", differs=EXPERT_GROUPS, scheme="mxfp4_a16"),
]
SLOW = [
    Case("qwen3", "stock", compiles=True),
    Case("llama", compiles=True),
    Case("qwen3", compiles=True),
    Case("llama", "transformers", compiles=True),
    Case("qwen3_moe", differs=MOE, compiles=True),
    Case("qwen3_moe", differs=MOE, ep=True, compiles=True),
    Case("mixtral", differs=LOCAL),
    Case("gpt_oss", differs=LOCAL, compiles=True),
    Case("deepseek_v3", differs=LATENT, compiles=True),
    Case("deepseek_v3", "stock", LATENT, compiles=True),
    Case("youtu", "stock", LATENT | {"q_lora_rank": None}, compiles=True),
    Case("axk1", "stock", LATENT),
    Case("glm4_moe", "stock", GROUPED, compiles=True),
    Case("qwen3_moe", "stock", MOE, compiles=True),
    Case("qwen3_next", differs=GATED, compiles=True),
    Case("qwen3_next", "transformers", GATED),
    Case("qwen3_5_text", differs=RECURRENT, compiles=True),
    Case("qwen3_5_text", "stock", RECURRENT, compiles=True),
    Case("qwen3_5_moe_text", differs=RECURRENT, ep=True, compiles=True),
    Case("olmo_hybrid", "stock", RECURRENT),
    Case("gemma3_text", "stock", {"num_hidden_layers": 2}),
    Case("olmoe", "stock", LOCAL | {"num_experts": 4}),
    Case("llama", differs=BLOCKS, scheme="fp8_block", compiles=True),
    Case("qwen3_moe", differs=EXPERT_BLOCKS, scheme="fp8_block"),
    Case("llama", differs=GROUPS, scheme="int4", compiles=True),
    Case("llama", differs=GROUPS, scheme="mxfp4_a16", compiles=True),
    Case("qwen3_moe", differs=EXPERT_GROUPS, scheme="int4", compiles=True),
    Case("qwen3_moe", differs=EXPERT_GROUPS, scheme="mxfp4_a16", ep=True),
]
FOUR = [
    Case("llama", differs=BIASES, compiles=True),  # 2 heads of keys
    Case("llama", "stock"),
    Case("qwen3", "transformers", ONE_KEY_HEAD),
    Case("qwen3_moe", differs=MOE),
    Case("qwen3_moe", differs=MOE, ep=True),
    Case("gpt_oss", differs=LOCAL, ep=True),
    Case("deepseek_v3", "stock", LATENT, compiles=True),
    Case("qwen3_5_text", differs=RECURRENT | {"linear_num_key_heads": 4}, compiles=True),
]


class Runs:
    """What processes wrote for groups of cases, which run when the first of them is read."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cache  # noqa: B019 - lives as long as the module's tests
    def of(self, name: str) -> Path:
        cases, size = GROUPS[name]
        folder = self.folder / name
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=ranks.run, args=(rank, size, folder, cases), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=600)
            process.kill()  # if it still waits for another one
        return folder


GROUPS = {"two": (CASES, 2), "two, slow": (SLOW, 2), "four": (FOUR, 4)}
ALL = [
    pytest.param(name, case, id=f"{name}: {case}", marks=[pytest.mark.slow] * (name != "two"))
    for name, (cases, _) in GROUPS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("tensor_parallel"))


def read(runs: Runs, group: str, case: Case) -> list[Result]:
    """The results of each rank."""
    cases, size = GROUPS[group]
    found = []
    for rank in range(size):
        path = runs.of(group) / f"{cases.index(case)}-{rank}.pt"
        assert path.exists(), "the process ended before this case, or still runs it"
        result = torch.load(path)
        assert not isinstance(result, str), result
        found.append(Result(*result))
    return found


def error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("group", "case"), ALL)
def test_ranks_compute_what_one_process_computes(group: str, case: Case, runs: Runs) -> None:
    results = read(runs, group, case)
    model = ranks.whole(case)
    expected = ranks.logits(ranks.view(case, model))
    tolerance = TOLERANCE.get(case.scheme, 1e-4)
    for result in results:
        assert error(result.eager, expected) < tolerance
        assert result.eager.equal(results[0].eager)
        if result.compiled is not None:
            assert error(result.compiled, expected) < tolerance
            assert result.compiled.equal(results[0].compiled)
        assert result.num_ops == results[0].num_ops


# Not where a quantizer is behind the norm.
NORMED = [param for param in ALL for case in param.values[1:] if case.compiles and not case.scheme]


@pytest.mark.parametrize(("group", "case"), NORMED)
def test_each_sum_joins_the_norm_behind_it(group: str, case: Case, runs: Runs) -> None:
    """2L + 1 sums: of attention and MLP of each layer, and of the embedding. That of a shared expert
    joins that of the other experts.
    """
    [ops, *_] = (result.num_ops for result in read(runs, group, case))
    assert ops.get("all_reduce", 0) == 0
    layers = ranks.TINY["num_hidden_layers"]
    assert ops["allreduce_add_rms_norm"] == 2 * layers and ops.get("add_rms_norm", 0) == 0
    # The plan of transformers 5.17 leaves the embedding whole: no sum is before the first norm.
    of_5_17 = case.kind != "ours" and ranks.transformers.__version__.startswith("5.17.")
    assert ops["rms_norm" if of_5_17 else "allreduce_rms_norm"] == 1 and ops["all_gather"] >= 1


@pytest.mark.parametrize(("group", "case"), ALL)
def test_a_rank_holds_its_share_of_what_is_divided(group: str, case: Case, runs: Runs) -> None:
    """Weights of at least two dimensions, but for routers, latents, and heads of keys that several
    ranks hold.
    """
    size = GROUPS[group][1]
    whole = sum(weight.numel() for weight in ranks.whole(case).parameters())
    shares = [result.held / whole for result in read(runs, group, case)]
    assert len(set(shares)) == 1 and 1 / size < shares[0] < 1 / size + 0.2
