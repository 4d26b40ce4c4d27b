"""Layers that attend to the keys and values of an earlier layer: they read its cache (Gemma 3n,
Gemma 4).
"""

from collections import Counter
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import atomc
from atomc import LLM, SamplingParams, ops
from atomc.parallel.process_group import TensorParallel
from atomc.program import compile_model
from atomc.stock.adapter import wrap_stock

# A prompt of several chunks and windows, one of a single chunk, and one that begins as the first.
PROMPTS = [list(range(3, 40)), [5, 7, 9], [*range(3, 36), 50, 51]]
NEW_TOKENS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# Gemma 3n: fewer embeddings for the layers than tokens, gates without their smallest values.
KINDS: dict[str, dict[str, Any]] = {
    "Gemma3n": {
        "vocab_size_per_layer_input": 60,
        "altup_num_inputs": 3,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "Gemma4": {
        "vocab_size_per_layer_input": 99,
        "global_head_dim": 16,
        "use_double_wide_mlp": True,
    },
}


def gemma(kind: str, **differs: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}TextConfig")(**SIZES | KINDS[kind] | differs)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.normal_(0.0, 1.5 * weight.shape[-1] ** -0.5)
    return model


def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    return list(out[0, len(prompt) :].tolist())


def llm_of(model: nn.Module) -> LLM:
    return LLM(
        model,
        options={"glue": "eager", "cache": False},
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=64,
        kv_bytes=2**22,
        progress=False,
    )


@pytest.mark.rotating
@pytest.mark.parametrize("kind", [pytest.param("Gemma3n", marks=pytest.mark.slow), "Gemma4"])
def test_gemma_with_shared_keys_answers_as_in_transformers(kind: str) -> None:
    model = gemma(kind)
    expected = [generated(model, prompt) for prompt in PROMPTS]
    dropped_from = getattr(model.model, "first_kv_shared_layer_idx", None)
    llm = llm_of(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    first = llm.generate(PROMPTS, greedy)
    assert [list(made.token_ids) for made in first] == expected
    again = llm.generate(PROMPTS, greedy)
    assert [list(made.token_ids) for made in again] == expected
    assert [made.num_cached for made in again] == [32, 0, 32]
    # The last two layers keep nothing.
    assert [spec.name.rpartition("layers.")[2] for spec in llm.program.specs] == [
        "0.self_attn",
        "1.self_attn",
    ]
    # Its owner's model drops rows again.
    assert getattr(model.model, "first_kv_shared_layer_idx", None) == dropped_from
    assert generated(model, PROMPTS[1]) == expected[1]


def test_gemma_4_computes_all_rows_while_it_is_traced() -> None:
    transformers = pytest.importorskip("transformers")
    if Version(transformers.__version__) < Version("5.23"):
        pytest.skip("the class of transformers before 5.23 drops no rows")
    model = gemma("Gemma4")
    assert model.model.first_kv_shared_layer_idx == 2
    stock = wrap_stock(model)
    assert model.model.first_kv_shared_layer_idx == -1
    stock.own.set_in(model)
    assert model.model.first_kv_shared_layer_idx == 2
    stock.ours.set_in(model)
    assert model.model.first_kv_shared_layer_idx == -1


class Attentions(nn.Module):
    """Three layers of attention, the last one of rows of its own; `second` gives the arguments of
    the second one that differ.
    """

    def __init__(self, **second: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.q, self.k, self.v, self.q_2, self.v_2 = (
            nn.Linear(16, 16, bias=False) for _ in range(5)
        )
        self.head = nn.Linear(16, 50, bias=False)
        self.kv, self.kv_2, self.kv_3 = (ops.kv_state(2, 8) for _ in range(3))
        self.second = second

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (linear(x).unflatten(-1, (2, 8)) for linear in (self.q, self.k, self.v))
        x = x + ops.attention(q, k, v, self.kv, scale=0.35).flatten(-2)
        how = dict(self.second)
        if how.pop("own_values", False):
            v = self.v_2(x).unflatten(-1, (2, 8))
        q = self.q_2(x).unflatten(-1, (2, 8))
        x = x + ops.attention(q, k, v, self.kv_2, **{"scale": 0.35, **how}).flatten(-2)
        q, k, v = (linear(x).unflatten(-1, (2, 8)) for linear in (self.q, self.k, self.v_2))
        x = x + ops.attention(q, k, v, self.kv_3, scale=0.35).flatten(-2)
        return self.head(x.index_select(0, logits_rows))


@pytest.mark.parametrize(
    ("second", "states"),
    [({}, 2), ({"scale": 0.5, "softcap": 5.0}, 2), ({"window": 4}, 3), ({"own_values": True}, 3)],
    ids=["the same rows", "other scores", "another window", "other values"],
)
def test_only_equal_rows_in_equal_blocks_are_kept_once(second: dict[str, Any], states: int) -> None:
    model = Attentions(**second).eval().requires_grad_(False)
    llm = llm_of(model)
    ids = [int(i) for i in torch.randperm(50)[:20]]
    made = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=5))[0].token_ids
    for _ in range(5):
        rows = torch.tensor([len(ids) - 1])
        ids.append(int(model(torch.tensor(ids), torch.arange(len(ids)), rows).argmax()))
    assert list(made) == ids[-5:]
    assert len(llm.program.specs) == states


def test_rows_that_two_layers_read_are_written_once() -> None:
    calls: Counter[str] = Counter()

    def count(name: str, gm: torch.fx.GraphModule) -> None:
        if name == "bind_state":
            calls.update(getattr(node.target, "__name__", "") for node in gm.graph.nodes)

    model = Attentions().eval().requires_grad_(False)
    compile_model(model, {"glue": "eager", "cache": False}, observers=[count])
    assert calls["kv_write.default"] == 2 and calls["paged_attention.default"] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_more_ranks_than_heads_of_shared_keys_are_refused(kind: str) -> None:
    model = gemma(kind)
    whole = {name: weight.shape for name, weight in model.named_parameters()}
    with pytest.raises(
        ValueError,
        match=r"layers\.2\.self_attn reads the keys and values of another layer, of 2 heads, and "
        "there are 4 ranks: use at most 2",
    ):
        atomc.parallelize(model, TensorParallel(0, 4, "ranks"))
    assert {name: weight.shape for name, weight in model.named_parameters()} == whole
    # As many ranks as heads, and fewer heads in a model whose layers all have keys of their own.
    attention = atomc.parallelize(model, TensorParallel(0, 2, "ranks")).model.layers[3].self_attn
    assert attention.q_proj.out_features == whole["model.layers.3.self_attn.q_proj.weight"][0] // 2
    own = gemma(kind, num_kv_shared_layers=0)
    atomc.parallelize(own, TensorParallel(0, 4, "ranks"))
