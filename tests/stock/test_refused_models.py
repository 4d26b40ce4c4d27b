"""A model that cannot be served is refused in one sentence that says why, and in which line."""

import logging
import re

import pytest
import torch
from rewriting import since
from torch import Tensor, nn

import atomc
from atomc import ops
from atomc.compiler.trace_model import serving_error
from atomc.program import compile_model
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.torch_compat.trace_failure import BackendCompilerFailed

transformers = pytest.importorskip("transformers", reason="stock models")

EAGER = {"glue": "eager"}
PROMPT = [5, 17, 3, 88, 41, 9, 60]
IDS = torch.tensor([PROMPT])
IDENTITY = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.3,
)
GPT = dict(n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)
PEGASUS = dict(
    d_model=64,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    encoder_layers=1,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    max_position_embeddings=128,
)
IN_YOUR_OWN = 'torch.compile(model, backend="atom") in a program of your own has no such limit'


def stock(name: str, **differs: object) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**IDENTITY, **differs)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval().requires_grad_(False)


def served(model: nn.Module, **options: object) -> LLM:
    return LLM(
        model,
        max_num_seqs=2,
        max_model_len=64,
        num_blocks=32,
        progress=False,
        options={**EAGER, **options},
    )


REFUSED = {
    "DiffLlama": (
        LLAMA,
        r"it branches on a number that is only known at run time, Eq\(u\d+, 0\) in `.*groupnorm.*` "
        r"\(transformers/models/diffllama/modeling_diffllama\.py:\d+\)",
    ),
    "Doge": (
        LLAMA,
        r"it branches on a number that is only known at run time, u\d+ > 2048 in `if "
        r".*keep_window_size:` "
        r"\(transformers/models/doge/modeling_doge\.py:\d+\)",
    ),
    "BigBirdPegasus": (
        PEGASUS,
        r"attention in hf_model\.model\.decoder\.layers\.0\.self_attn "
        r"\(modeling_bigbird_pegasus\.py:\d+\): it has a mask or is not causal, and a paged cache "
        r"serves causal attention only",
    ),
}


def is_close(actual: Tensor, expected: Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.rotating
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_cannot_be_served_is_refused_with_its_line_and_compiles_in_a_program_of_ones_own(
    name,
) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(
        ValueError,
        match=f"^{name}ForCausalLM cannot be served: {reason}; {re.escape(IN_YOUR_OWN)}$",
    ):
        served(stock(name, **config))
    model = stock(name, **config)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        before = atomc.reports()
        actual = torch.compile(model, backend="atom", options=EAGER)(IDS, use_cache=False).logits
        if not is_close(actual, expected):  # torch 2.11 traces Doge wrongly, for each backend
            traced = torch.compile(model, backend="eager")(IDS, use_cache=False).logits
            assert not is_close(traced, expected) and is_close(actual, traced)
    assert any(report.treated for report in since(before))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name, config",
    [
        ("JetMoe", {**LLAMA, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("GPTBigCode", GPT),
        ("GPTBigCode", {**GPT, "multi_query": False}),
    ],
)
def test_keys_are_kept_for_as_many_heads_as_the_attention_hands_over(name, config) -> None:
    model, ids = stock(name, **config), IDS
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat(
                [ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1
            )
    (completion,) = served(model).generate([PROMPT], SamplingParams(max_tokens=6, ignore_eos=True))
    assert list(completion.token_ids) == ids[0, len(PROMPT) :].tolist()


class Undecided(nn.Module):
    """A user's model that looks at values while it is traced."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.head = what, nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor) -> Tensor:
        x: Tensor = self.head(input_ids)
        if self.what == "length" and len(input_ids) > 100:
            return x
        if self.what == "value" and x.sum() > 0:
            return x
        if self.what == "raises":
            raise KeyError("nothing of that name")
        if self.what == "quotes":
            raise ValueError(f"it's 'one' of \"{len(x.shape)}\"", 3)
        if self.what == "without text":
            raise IndexError
        if self.what == "shapes":
            return x @ x.new_zeros(3, 3)
        return x


@pytest.mark.parametrize(
    "what, reason, code",
    [
        (
            "length",
            r"it branches on a number that is only known at run time, u\d+ > 100 in `.*> 100:`",
            "> 100:",
        ),
        (
            "value",
            "torch.compile cannot trace it as one graph: Data-dependent branching",
            "x.sum() > 0:",
        ),
        ("raises", "it raises KeyError: nothing of that name", "raise KeyError"),
        ("quotes", """it raises ValueError: it's 'one' of "2", 3""", "raise ValueError"),
        ("without text", "it raises IndexError", "raise IndexError"),
        ("shapes", "RuntimeError: a and b must have same reduction dim.*", "x @ x"),
    ],
)
def test_a_users_model_is_refused_with_the_line_of_the_users(what, reason, code) -> None:
    sentence = rf"^Undecided cannot be served: {reason} \(.*test_refused_models\.py:\d+\)$"
    with pytest.raises(ValueError, match=sentence) as caught:
        compile_model(Undecided(what), EAGER)
    number = int(str(caught.value).rpartition(":")[2].rstrip(")"))
    with open(__file__) as file:
        assert code in file.read().splitlines()[number - 1]


class OfAUser(nn.Module):
    """A module for LLM that returns what its subclasses change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.kv = ops.kv_state(2, 16)

    def attend(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(input_ids).unflatten(-1, (2, 16))
        return ops.attention(x, x, x, self.kv, scale=0.25).flatten(-2)


class OneArgument(OfAUser):
    def forward(self, input_ids):
        return self.head(self.attend(input_ids))


class WithAMask(OfAUser):
    def forward(self, input_ids, positions, logits_rows, mask):
        return self.head(self.attend(input_ids)[logits_rows])


class AllRows(OfAUser):
    def forward(self, input_ids, positions, logits_rows):
        return self.head(self.attend(input_ids))


class OneBatch(OfAUser):
    def forward(self, input_ids, positions, logits_rows):
        return self.head(self.attend(input_ids)[logits_rows])[None]


class WithoutParameters(nn.Module):
    def forward(self, input_ids, positions, logits_rows):
        return input_ids


class OtherNames(OfAUser):
    def forward(self, ids, at, rows=None):
        return self.head(self.attend(ids)[rows])


@pytest.mark.parametrize(
    "module, reason",
    [
        (OneArgument, r"forward\(input_ids\), which cannot be called with three tensors"),
        (WithAMask, "missing a required argument: 'mask'"),
        (AllRows, r"returns a tensor \[2, 64\] in a step of 2 tokens and 1 row of logits"),
        (OneBatch, r"returns a tensor \[1, 1, 64\] in a step of 2 tokens and 1 row of logits"),
        (WithoutParameters, "has no parameters"),
    ],
)
def test_a_module_that_llm_cannot_call_is_refused_with_the_signature(module, reason) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        LLM(module(), max_model_len=32, num_blocks=4, options=EAGER, progress=False)
    assert "forward(input_ids [T], positions [T], logits_rows [R]) -> logits [R, V]" in str(
        caught.value
    )


def test_a_module_of_the_signature_may_name_its_arguments_otherwise() -> None:
    llm = LLM(OtherNames(), max_model_len=32, num_blocks=4, options=EAGER, progress=False)
    (completion,) = llm.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0.0))
    assert len(completion.token_ids) == 3


def test_the_trace_is_in_the_log_at_level_debug_and_comes_along_if_strict(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "atomc"):
        with pytest.raises(ValueError, match="cannot be served") as caught:
            compile_model(Undecided("value"), {**EAGER, "strict": False})
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        (record,) = [record for record in caplog.records if "was not compiled" in record.message]
        assert record.exc_info and record.levelno == logging.DEBUG
    with pytest.raises(ValueError, match="cannot be served") as caught:
        compile_model(Undecided("value"), {**EAGER, "strict": True})
    assert "Data-dependent branching" in str(caught.value.__cause__)


def test_memory_that_ran_out_while_compiling_is_not_taken_for_a_fault_of_the_model() -> None:
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert serving_error(Undecided(""), BackendCompilerFailed(None, full, None)) is full
