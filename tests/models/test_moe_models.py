"""Mixtures of experts: our files and the stock classes against transformers on the same random
weights, eager, compiled and served.
"""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from packaging.version import Version
from test_models import IDS, TINY, YARN, error, hf_logits, hf_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import atomc
from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.models.glm4_moe import Config as Glm4MoeConfig
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
GLM = EXPERTS | {"n_routed_experts": 8, "moe_intermediate_size": 32}
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
    "eos_token_id": None,
}
# Enough heads that no score is 0, where all keys would be equal.
INDEXER = {"index_topk": 6, "index_n_heads": 12, "index_head_dim": 20}
MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
# name -> model_type and what differs from TINY
KINDS = {
    "qwen3_moe": (
        "qwen3_moe",
        EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "qwen3_moe, dense layers, window": (
        "qwen3_moe",
        EXPERTS
        | {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 7, "eos_token_id": None}),
    "mixtral, tied": (
        "mixtral",
        {"num_local_experts": 3, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "gpt_oss": (
        "gpt_oss",
        EXPERTS | {"num_local_experts": 8, "sliding_window": 6, "rope_parameters": YARN},
    ),
    "gpt_oss, other layers": (
        "gpt_oss",
        EXPERTS
        | {
            "num_local_experts": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 5,
            "attention_bias": False,
            "intermediate_size": 64,
            "swiglu_limit": 0.3,
            "swiglu_alpha": 1.5,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        GLM
        | {
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "glm4_moe, no dense layer, no groups": (
        "glm4_moe",
        GLM
        | {
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0},
        },
    ),
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
    "deepseek_v2, no q_lora, no groups": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_shared_experts": 1, "tie_word_embeddings": True},
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
            "n_shared_experts": 2,
            "rope_interleave": False,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v3, bias": (
        "deepseek_v3",
        LATENT
        | {
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "rms_norm_eps": 1e-3,
        },
    ),
    "deepseek_v32": (
        "deepseek_v32",
        LATENT
        | INDEXER
        | {
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": MSCALE,
        },
    ),
    "deepseek_v32, short": (
        "deepseek_v32",
        LATENT
        | INDEXER
        | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
        | {"index_topk": 500, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT | {"tie_word_embeddings": True, "v_head_dim": 28},
    ),
    "glm4_moe_lite, other layers": (
        "glm4_moe_lite",
        LATENT | {"mlp_layer_types": ["sparse", "dense"], "n_group": 2},
    ),
}
# Without a file in models/.
STOCK = {
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        {
            "num_experts": 8,
            "moe_topk": [2, 2],
            "head_dim": 16,
            "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 1000.0,
            },
        },
    )
}
ARCHITECTURES = (
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3, no q_lora",
    "deepseek_v32",
    "glm4_moe_lite",
)
# Compiled and served too: an indexer that chooses all keys.
OTHERS = ("deepseek_v32, short",)
POSITIONS = torch.arange(33)
EAGER = {"glue": "eager", "strict": True}


def theirs(name: str) -> nn.Module:
    """The transformers model of this kind."""
    model_type, differs = (KINDS | STOCK)[name]
    return theirs_of(model_type, **differs)


def theirs_of(model_type: str, **differs: object) -> nn.Module:
    """A transformers model with random weights, and random biases of its routers."""
    model = hf_model(model_type, **differs)
    generator = torch.Generator().manual_seed(2)
    for path, buffer in model.named_buffers():
        if path.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)
    for experts in model.modules():  # constants in transformers 5.17
        if type(experts).__name__ == "GptOssExperts":
            experts.alpha = differs.get("swiglu_alpha", experts.alpha)
            experts.limit = differs.get("swiglu_limit", experts.limit)
    return model.requires_grad_(False)


def median_error(actual: Tensor, expected: Tensor) -> float:
    """That of a token in the middle: rounding changes the experts of a few tokens, and their logits
    with them.
    """
    errors = (actual.float() - expected).abs().amax(-1)
    return (errors.median() / expected.abs().max()).item()


@pytest.mark.parametrize("name", KINDS)
def test_logits_and_names_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    ours = load(tmp_path)

    assert type(ours).__module__.startswith("atomc.models.")
    assert sorted(ours.state_dict()) == sorted(model.state_dict())
    for length in (1, 33):
        ids, positions = IDS[:length], torch.arange(length)
        assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4
    ids, positions = IDS[:30].view(2, 15), torch.arange(15).expand(2, 15)
    assert error(ours(ids, positions), hf_logits(model, ids, positions)) < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    expected = hf_logits(model, IDS, POSITIONS)
    in_bf16 = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )

    ours = load(tmp_path, dtype=torch.bfloat16)(IDS, POSITIONS)
    assert ours.dtype == torch.bfloat16
    theirs_in_bf16 = hf_logits(in_bf16, IDS, POSITIONS)
    assert median_error(ours, expected) < 1.5 * median_error(theirs_in_bf16, expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_in_bf16_are_rounded_where_those_of_hugging_face_are(
    name: str, tmp_path: Path
) -> None:
    theirs(name).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load(tmp_path, dtype=torch.bfloat16)
    norms = [path for path, _ in model.named_modules() if path.endswith("norm")]
    assert "model.norm" in norms
    for path in norms:
        norm, expected = ours.get_submodule(path), model.get_submodule(path)
        weight = torch.rand_like(expected.weight) + 0.5
        x = torch.randn(99, len(weight)).bfloat16()
        with torch.no_grad():
            norm.weight.copy_(weight)
            expected.weight.copy_(weight)
            assert torch.equal(norm(x), expected(x)), path


@pytest.mark.parametrize("name", KINDS)
def test_a_router_in_bf16_decides_as_that_of_hugging_face(name: str, tmp_path: Path) -> None:
    # Stored in bf16: transformers 5.24 keeps routers of a checkpoint in fp32 as they are.
    theirs(name).bfloat16().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load(tmp_path, dtype=torch.bfloat16)
    x = torch.randn(10_000, TINY["hidden_size"]).bfloat16()
    path = next(path for path, _ in model.named_modules() if path.endswith((".gate", ".router")))
    with torch.no_grad():
        _, expected_weights, expected_ids = model.get_submodule(path)(x)
        ids, weights = ours.get_submodule(path)(x)
    order, expected_order = ids.argsort(-1), expected_ids.argsort(-1)
    assert torch.equal(ids.gather(-1, order), expected_ids.gather(-1, expected_order))
    torch.testing.assert_close(
        weights.gather(-1, order), expected_weights.gather(-1, expected_order)
    )


class Cell(NamedTuple):
    name: str
    whose: str
    dtype: torch.dtype


CLASSES = [(name, whose) for name in (*ARCHITECTURES, *OTHERS) for whose in ("ours", "stock")]
CLASSES += [(name, "stock") for name in STOCK]
CELLS = [
    Cell(name, whose, dtype) for name, whose in CLASSES for dtype in (torch.float32, torch.bfloat16)
]
# Each architecture, each class and each dtype once, or twice.
FAST = {
    Cell("qwen3_moe", "ours", torch.bfloat16),
    Cell("mixtral", "stock", torch.float32),
    Cell("gpt_oss", "ours", torch.float32),
    Cell("glm4_moe", "stock", torch.bfloat16),
    Cell("deepseek_v2", "stock", torch.float32),
    Cell("deepseek_v3", "ours", torch.float32),
    Cell("deepseek_v32", "ours", torch.float32),
    Cell("glm4_moe_lite", "ours", torch.bfloat16),
    Cell("hunyuan_v1_moe", "stock", torch.float32),
}


@pytest.mark.covering
@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(
            cell,
            marks=() if cell in FAST else pytest.mark.slow,
            id=f"{cell.name}-{cell.whose}-{cell.dtype}".replace("torch.", ""),
        )
        for cell in CELLS
    ],
)
def test_a_compiled_model_computes_what_the_eager_one_does(cell: Cell, tmp_path: Path) -> None:
    model = theirs(cell.name)
    expected = hf_logits(model, IDS, POSITIONS)
    model.save_pretrained(tmp_path)
    if cell.whose == "ours":
        eager = load(tmp_path, dtype=cell.dtype)
    else:
        eager = type(model).from_pretrained(tmp_path, dtype=cell.dtype).requires_grad_(False)

    def logits(run: nn.Module) -> Tensor:
        if cell.whose == "stock":
            return hf_logits(run, IDS, POSITIONS)
        return run(IDS, POSITIONS)

    compiled = logits(torch.compile(eager, backend="atom", options=EAGER, fullgraph=True))
    if cell.dtype == torch.float32:
        assert error(compiled, expected) < 1e-4
    else:
        assert median_error(compiled, expected) < 1.5 * median_error(logits(eager), expected)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("gpt_oss", "ours"),
        ("qwen3_moe", "stock"),
        *(
            pytest.param(name, whose, marks=pytest.mark.slow)
            for name, whose in CLASSES
            if (name, whose) not in {("gpt_oss", "ours"), ("qwen3_moe", "stock")}
        ),
    ],
)
def test_a_served_model_gives_the_text_that_transformers_generates(
    name: str, whose: str, tmp_path: Path
) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 24, (20,), generator=generator).tolist()
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]

    served = load(tmp_path) if whose == "ours" else model
    llm = LLM(served, max_num_seqs=8, max_model_len=64, progress=False, options=EAGER)
    assert all(len(tokens) == 12 for tokens in expected)
    made = llm.generate(prompts, SamplingParams(max_tokens=12))
    assert [list(completion.token_ids) for completion in made] == expected


def served_logits(served: nn.Module, prompts: list[list[int]]) -> tuple[list[list[int]], Tensor]:
    """Sequences that the runtime generates, and the log-probabilities [T, V] of all their tokens."""
    vocabulary = TINY["vocab_size"]
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 11, "max_model_len": 64}
    llm = LLM(served, progress=False, options=EAGER, **settings)
    params = SamplingParams(
        max_tokens=8, ignore_eos=True, logprobs=vocabulary, prompt_logprobs=vocabulary
    )
    sequences, rows = [], []
    for prompt, made in zip(prompts, llm.generate(prompts, params), strict=True):
        sequences.append([*prompt, *made.token_ids])
        for each in (*made.prompt_logprobs[1:], *made.logprobs):
            row = dict(each.top)
            rows.append(torch.tensor([row[token] for token in range(vocabulary)]))
    return sequences, torch.stack(rows)


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        pytest.param(
            name, whose, marks=() if (name, whose) == ("mixtral", "ours") else pytest.mark.slow
        )
        for name in ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe")
        for whose in ("ours", "stock")
    ],
)
def test_a_model_served_in_bf16_is_as_close_to_fp32_as_hugging_face_is(
    name: str, whose: str, tmp_path: Path
) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    in_bf16 = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (30, 3, 17, 24, 9)]

    def log_probabilities(of: nn.Module, sequences: list[list[int]]) -> Tensor:
        found = [hf_logits(of, torch.tensor(ids), torch.arange(len(ids)))[:-1] for ids in sequences]
        return torch.cat(found).float().log_softmax(-1)

    if whose == "ours":
        served = load(tmp_path, dtype=torch.bfloat16)
    else:
        served = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    sequences, found = served_logits(served, prompts)
    expected = log_probabilities(model, sequences)
    limit = 1.5 * median_error(log_probabilities(in_bf16, sequences), expected)
    assert 0 < median_error(found, expected) < limit


@pytest.mark.parametrize("name", [*ARCHITECTURES, *STOCK])
def test_registered_experts_compute_what_those_of_transformers_do(name: str) -> None:
    model = theirs(name)
    model.set_experts_implementation("eager")
    expected = hf_logits(model, IDS, POSITIONS)
    atomc.register_experts()
    model.set_experts_implementation("atom")
    assert error(hf_logits(model, IDS, POSITIONS), expected) < 1e-5


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_registered_experts_are_one_op_in_a_compiled_graph(name: str) -> None:
    atomc.register_experts()
    model = theirs(name)
    model.set_experts_implementation("atom")
    graphs = []

    def recorded(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    experts = model.model.layers[0].mlp.experts
    ids, weights = torch.tensor([[0, 2], [3, 1], [2, 3]]), torch.rand(3, 2)
    arguments = torch.randn(3, 64), ids, weights
    compiled = torch.compile(experts, backend=recorded, fullgraph=True)
    if torch.__version__ < "2.13":
        with pytest.raises(torch._dynamo.exc.Unsupported, match="run the model once before"):
            compiled(*arguments)
        assert torch.equal(torch.compile(experts, backend="eager")(*arguments), experts(*arguments))
    compiled(*arguments)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("moe_experts" in call for call in calls) == 1
    assert not any("mm" in call or "sort" in call for call in calls)


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        ({"has_gate": False}, "MixtralExperts has no gate; supported are gated experts"),
        ({"has_post_expert_norm": True}, "MixtralExperts has a norm after each expert"),
        ({"act_fn": nn.ReLU()}, r"the gate of MixtralExperts \(activation ReLU\) is another"),
    ],
)
def test_experts_that_the_op_cannot_express_are_refused_and_served_as_they_are(
    attributes: dict[str, object], sentence: str
) -> None:
    atomc.register_experts()
    model = theirs("mixtral")
    experts = model.model.layers[1].mlp.experts
    for attribute, value in attributes.items():
        setattr(experts, attribute, value)
    model.set_experts_implementation("atom")
    with pytest.raises(ValueError, match=f'^experts implementation "atom": {sentence}'):
        hf_logits(model, IDS, POSITIONS)

    model.set_experts_implementation("batched_mm")
    assert wrap_stock(model).hf_model.config._experts_implementation == "batched_mm"


NAMES_OF_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
}


SINCE_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="transformers before 5.23 lets users replace no experts of Aria",
)


def one_layer_of_experts(kind: str, name: str, **differs: object) -> nn.Module:
    """The experts of this class of transformers with random weights; skips if it has none."""
    module = pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")
    config = transformers.AutoConfig.for_model(kind).get_text_config()
    for field, value in (NAMES_OF_SIZES | differs).items():
        if hasattr(config, field):
            setattr(config, field, value)
    experts: nn.Module = getattr(module, f"{name}Experts")(config)
    generator = torch.Generator().manual_seed(4)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return experts.requires_grad_(False)


def routed(tokens: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, 64], ids and weights [T, 2] for four experts."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.rand(tokens, 4, generator=generator).argsort(-1)[:, :2]
    x = torch.randn(tokens, 64, generator=generator)
    return x, ids, torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize(
    ("kind", "name", "differs"),
    [
        pytest.param(*("aria", "Aria", {}), marks=SINCE_5_23),
        ("beam", "Beam", {}),
        ("deepseek_v4", "DeepseekV4", {"swiglu_limit": 1.0}),
        ("gemma4", "Gemma4Text", {}),
        ("glm5_next", "Glm5NextText", {"swiglu_limit": 1.0}),
        ("hy_v4", "HYV4", {"swiglu_limit": 1.0}),
        ("jamba", "Jamba", {}),
        ("lfm2_moe", "Lfm2Moe", {}),
        ("minimax_m3_vl", "MiniMaxM3VL", {"swiglu_limit": 1.0, "swiglu_alpha": 1.5}),
        ("openai_privacy_filter", "OpenAIPrivacyFilter", {"swiglu_limit": 1.0}),
        ("phimoe", "Phimoe", {}),
    ],
)
def test_experts_of_any_class_are_recognised_by_what_their_gate_computes(
    kind: str, name: str, differs: dict[str, object]
) -> None:
    experts = one_layer_of_experts(kind, name, **differs)
    config = experts.config
    config._experts_implementation = "batched_mm"  # type: ignore[union-attr]
    expected = experts(*routed())
    atomc.register_experts()
    config._experts_implementation = "atom"  # type: ignore[union-attr]
    assert error(experts(*routed()), expected) < 1e-5


@pytest.mark.parametrize(
    ("kind", "name", "sentence"),
    [
        ("inkling2", "Inkling2", "the gate of Inkling2Experts"),
        ("muse_spark", "MuseSpark", "MuseSparkExperts has a norm after each expert"),
        ("nemotron_h", "NemotronH", "NemotronHExperts has no gate"),
    ],
)
def test_experts_of_classes_with_another_computation_are_refused(
    kind: str, name: str, sentence: str
) -> None:
    experts = one_layer_of_experts(kind, name)
    atomc.register_experts()
    experts.config._experts_implementation = "atom"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=sentence):
        experts(*routed())


def test_experts_are_recognised_on_fake_tensors_and_while_they_are_exported() -> None:
    atomc.register_experts()
    for_export, for_fakes = (one_layer_of_experts("gpt_oss", "GptOss") for _ in range(2))
    for experts in (for_export, for_fakes):
        experts.config._experts_implementation = "atom"  # type: ignore[union-attr]
    exported = torch.export.export(for_export, routed(), strict=False)
    calls = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert [call for call in calls if "mT" not in call and "transpose" not in call] == [
        "atom.moe_experts.default"
    ]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert for_fakes(*map(mode.from_tensor, routed())).shape == (7, 64)


def test_layers_of_experts_that_have_run_share_one_compiled_graph() -> None:
    atomc.register_experts()
    graphs = []

    def recorded(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    layers = [one_layer_of_experts("mixtral", "Mixtral") for _ in range(3)]
    for layer in layers:
        layer.config._experts_implementation = "atom"  # type: ignore[union-attr]
        layer(*routed())
    torch._dynamo.reset()
    for layer in layers:
        torch.compile(layer, backend=recorded, fullgraph=True)(*routed())
    assert len(graphs) == 1


def test_a_wrapped_model_calls_the_op_for_its_experts() -> None:
    model = wrap_stock(theirs("gpt_oss"))
    assert model.hf_model.config._experts_implementation == "atom"


HF = TINY | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8}


@pytest.mark.parametrize(
    ("architecture", "differs", "sentence"),
    [
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 9},
            "mixtral: num_experts_per_tok 9 is more than n_routed_experts 8",
        ),
        (
            "MixtralForCausalLM",
            {"n_routed_experts": None},
            "mixtral: config.json lacks 'num_local_experts', a positive integer",
        ),
        (
            "MixtralForCausalLM",
            {"hidden_act": "gelu"},
            "mixtral: hidden_act 'gelu' is not supported, only 'silu'",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"mlp_only_layers": 1},
            "qwen3_moe: mlp_only_layers 1 is not a list",
        ),
        (
            "Qwen3MoeForCausalLM",
            {"decoder_sparse_step": 0},
            "qwen3_moe: decoder_sparse_step 0 is not a positive integer",
        ),
        (
            "GptOssForCausalLM",
            {"layer_types": ["full_attention"]},
            "gpt_oss: layer_types ['full_attention'] are not 2 of 'full_attention' or "
            "'sliding_attention'",
        ),
        (
            "GptOssForCausalLM",
            {"swiglu_limit": 0},
            "gpt_oss: swiglu_limit 0 is not a positive number of fp32",
        ),
        (
            "Glm4MoeForCausalLM",
            {"n_group": 3},
            "glm4_moe: 2 of 8 experts cannot be chosen from topk_group 1 of n_group 3 groups",
        ),
        (
            "Glm4MoeForCausalLM",
            {"partial_rotary_factor": 1.5},
            "glm4_moe: partial_rotary_factor 1.5 is not supported, only a number above 0 and up "
            "to 1.0",
        ),
        (
            "Glm4MoeForCausalLM",
            {"partial_rotary_factor": 0.2},
            "glm4_moe: partial_rotary_factor 0.2 rotates 3 of 16 columns, rotary positions need "
            "pairs of columns",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"topk_method": "noaux"},
            "deepseek_v2: topk_method 'noaux' is not supported, only 'greedy' or "
            "'group_limited_greedy' or 'noaux_tc'",
        ),
        (
            "DeepseekV2ForCausalLM",
            {"norm_topk_prob": True},
            "deepseek_v2: norm_topk_prob True is not supported, only False",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"scoring_func": "softmax"},
            "deepseek_v3: scoring_func 'softmax' is not supported, only 'sigmoid'",
        ),
        (
            "DeepseekV3ForCausalLM",
            {},
            "deepseek_v3: num_key_value_heads 2 is not supported, only that of "
            "num_attention_heads, 4: keys and values are expanded to all heads",
        ),
        (
            "DeepseekV3ForCausalLM",
            {"num_key_value_heads": None, "qk_rope_head_dim": 7},
            "deepseek_v3: qk_rope_head_dim 7 is odd, rotary positions need pairs of columns",
        ),
        (
            "Glm4MoeLiteForCausalLM",
            {"num_key_value_heads": None, "mlp_layer_types": ["sparse"]},
            "glm4_moe_lite: mlp_layer_types ['sparse'] are not 2 of 'dense' or 'sparse'",
        ),
    ],
)
def test_an_unsupported_config_is_refused_in_one_sentence(
    architecture: str, differs: dict[str, object], sentence: str
) -> None:
    model_type = {
        "MixtralForCausalLM": "mixtral",
        "Qwen3MoeForCausalLM": "qwen3_moe",
        "GptOssForCausalLM": "gpt_oss",
        "Glm4MoeForCausalLM": "glm4_moe",
        "DeepseekV2ForCausalLM": "deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek_v3",
        "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    }[architecture]
    config = HF | {"architectures": [architecture], "model_type": model_type} | differs
    with pytest.raises(ValueError) as raised:
        create_model(config, device="meta")
    assert str(raised.value) == sentence


def test_half_of_each_head_of_glm_is_rotated_without_the_field() -> None:
    assert Glm4MoeConfig.from_hf(HF | {"model_type": "glm4_moe"}).rotated_columns == 8


def test_the_bias_of_a_router_stays_fp32_and_survives_meta() -> None:
    config = HF | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    on_meta = create_model(config, torch.bfloat16, "meta")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert on_meta.get_parameter(name).dtype == torch.float32
    assert on_meta.get_parameter("model.layers.1.mlp.gate.weight").dtype == torch.bfloat16
    model = create_model(config)
    bias = torch.full((8,), 1.0 + 2.0**-20)
    model.get_parameter(name).data = bias.clone()
    assert torch.equal(model.to(torch.bfloat16).get_parameter(name), bias)
