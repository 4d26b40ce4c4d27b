"""Several models in one process: each is compiled as if it were alone."""

import copy

import pytest
import torch
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.loading.create_model import create_model
from atomc.loading.loader import ready
from atomc.program import compile_model
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock
from atomc.torch_compat.tracing import lifted_floats
from atomc.weights.parameters import fill_randomly

transformers = pytest.importorskip("transformers", reason="stock models")

EAGER = {"glue": "eager"}
PROMPT = [5, 17, 3, 88, 41, 9, 60]
IDS = torch.tensor([PROMPT])
POSITIONS = torch.arange(len(PROMPT))


def stock(name: str, **differs: object) -> nn.Module:
    """A tiny one with weights large enough that a wrong number shows."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
            **differs,
        }
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def ours(**differs: object) -> nn.Module:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **differs,
    }
    model = create_model(config, torch.float32, "cpu")
    fill_randomly(model, "cpu")
    return ready(model)


def greedy(model: nn.Module, count: int) -> tuple[int, ...]:
    """What transformers generates without a compiler."""
    ids = IDS
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tuple(ids[0, len(PROMPT) :].tolist())


def generated(model: nn.Module, count: int) -> tuple[int, ...]:
    llm = LLM(model, max_num_seqs=2, max_model_len=64, num_blocks=32, progress=False, options=EAGER)
    return llm.generate([PROMPT], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids


GEMMA2 = dict(head_dim=32, query_pre_attn_scalar=64, sliding_window=4, attn_logit_softcapping=20.0)
PHI3 = dict(num_attention_heads=2, rms_norm_eps=1e-2)
DEEPSEEK = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_group=1,
    n_routed_experts=4,
    topk_group=1,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)


@pytest.mark.rotating
@pytest.mark.parametrize("second", ["Gemma2", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_three_stock_models_in_one_process_generate_what_each_does_alone_also_after_a_refused_one(
    second: str,
) -> None:
    sizes = {"Gemma2": GEMMA2, "DeepseekV3": DEEPSEEK, "Phi3": PHI3}
    for name in ("Llama", second, "Doge", "Phi3"):
        differs = sizes.get(name, {})
        model = stock(name, **differs)
        if name == "Doge":
            with pytest.raises(ValueError, match=r"^DogeForCausalLM "):
                generated(model, 1)
        else:
            expected = greedy(model, 6)
            assert len(set(expected)) > 1
            assert generated(model, 6) == expected, name


@pytest.mark.slow  # models of our own, more than Dynamo recompiles for, run per change
def test_ten_models_in_one_process_are_all_compiled() -> None:
    for i in range(10):
        model = stock(
            "Llama", num_hidden_layers=1, rms_norm_eps=10.0**-i, hidden_size=32 + 32 * (i % 3)
        )
        expected = greedy(model, 3)
        assert generated(model, 3) == expected, i
        assert atomc.reports()[-1].treated


class Scaled(nn.Module):
    """As a program has it that calls our ops itself."""

    def __init__(self, scale: float, eps: float, window: int):
        super().__init__()
        self.scale, self.eps, self.window = scale, eps, window
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = ops.rms_norm(x, self.weight, self.eps)
        return ops.attention(x, x, x, scale=self.scale, window=self.window, softcap=self.scale * 30)


class Wrapper(nn.Module):
    """Code that several models share."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=False).logits
        return logits


def attends(scale: float, eps: float, window: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Scaled(scale, eps, window), (
        torch.randn(2, 7, 4, 16, generator=torch.Generator().manual_seed(0)),
    )


def wrapped(name: str, **differs: object) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Wrapper(stock(name, **differs)), (IDS,)


def as_ours(name: str, **differs: object) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return wrap_stock(stock(name, **differs)), (IDS[0], POSITIONS)


def of_ours(**differs: object) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return ours(**differs), (IDS[0], POSITIONS)


SHARING_CODE = {
    "our ops": lambda: [attends(0.25, 1e-6, 3), attends(0.5, 1e-3, 5), attends(0.125, 1e-1, 2)],
    "a class of transformers": lambda: [
        wrapped("Llama"),
        wrapped("Llama", head_dim=32, rms_norm_eps=1e-2),
        wrapped("Llama", num_attention_heads=8, hidden_size=32, rms_norm_eps=1e-1),
    ],
    "stock classes behind our forward": lambda: [
        as_ours("Llama"),
        as_ours("Gemma2", **GEMMA2),
        as_ours("Phi3", **PHI3),
    ],
    "our classes": lambda: [of_ours(), of_ours(head_dim=32, rms_norm_eps=1e-2)],
}


@pytest.mark.covering
@pytest.mark.parametrize(
    "kind, dynamic, prepared",
    [
        ("our ops", None, False),
        ("our ops", True, False),
        ("a class of transformers", None, True),
        pytest.param("a class of transformers", None, False, marks=pytest.mark.slow),
        pytest.param("a class of transformers", True, True, marks=pytest.mark.slow),
        ("stock classes behind our forward", None, False),
        pytest.param("stock classes behind our forward", None, True, marks=pytest.mark.slow),
        ("our classes", None, False),
    ],
)
def test_models_that_share_code_compute_what_they_do_without_a_compiler(
    kind, dynamic, prepared
) -> None:
    for model, args in SHARING_CODE[kind]():
        with torch.no_grad():
            expected = model(*args)
            compiled = torch.compile(
                atomc.prepare(model) if prepared else model,
                backend="atom",
                dynamic=dynamic,
                options=EAGER,
            )
            actual = compiled(*args)
        atomc.unprepare(model)
        torch.testing.assert_close(
            actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )
        assert atomc.reports()[-1].treated


@pytest.mark.rotating
def test_more_models_than_dynamo_recompiles_for_are_all_compiled_if_each_counts_for_itself() -> (
    None
):
    if "isolate_recompiles" not in torch.compile.__code__.co_varnames:
        pytest.skip("this torch counts the compiles of all models of a class together")
    for i in range(10):
        model, args = attends(0.5, 10.0**-i, i + 1)
        before = atomc.reports()[-1:]
        with torch.no_grad():
            compiled = torch.compile(model, backend="atom", isolate_recompiles=True, options=EAGER)
            torch.testing.assert_close(compiled(*args), model(*args))
        assert atomc.reports()[-1:] != before, i


def floats_made_inputs(model: nn.Module, args: tuple[Tensor, ...]) -> list[str]:
    """Of the graph that Dynamo makes for a compile of the user's."""
    found = []

    def backend(gm, inputs):
        found.extend(node.name for node in lifted_floats(gm.graph))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(*args)
    return found


@pytest.mark.rotating
def test_a_program_that_the_runtime_compiles_leaves_nothing_for_the_next_compile_of_a_user() -> (
    None
):
    model, args = as_ours("Llama", rms_norm_eps=1e-2)
    other, _ = as_ours("Llama", rms_norm_eps=1e-4)
    compile_model(copy.deepcopy(model), EAGER)
    atomc.explain(copy.deepcopy(model), *args)
    assert floats_made_inputs(other, args) == []


@pytest.mark.rotating
def test_what_a_user_compiled_before_is_nothing_to_the_runtime_and_stays() -> None:
    first, args = as_ours("Llama", rms_norm_eps=1e-2)
    second, _ = as_ours("Llama", rms_norm_eps=1e-3)
    third, _ = as_ours("Llama", rms_norm_eps=1e-4)
    assert not floats_made_inputs(first, args)
    assert floats_made_inputs(second, args)
    program = compile_model(copy.deepcopy(third), EAGER)
    assert not any(isinstance(x, Tensor) and x.dtype == torch.float64 for x in program._arguments)
    assert floats_made_inputs(third, args)
