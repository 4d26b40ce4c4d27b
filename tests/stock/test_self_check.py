"""A transformers class is served only if it computes in the runtime what it computes by itself."""

import pytest
import torch

from atomc import LLM
from atomc.cache.store import usage
from atomc.options import Options
from atomc.program import compile_model
from atomc.quantization import quantize
from atomc.runtime.execution.self_check import SelfCheck
from atomc.stock.implementations import Implementations

transformers = pytest.importorskip("transformers")

TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
)
# Their decoders count positions from the tokens that they kept themselves.
SEQ2SEQ = dict(
    vocab_size=96,
    d_model=64,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)
WITHOUT_POSITIONS = [
    "bart",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "pegasus",
    "plbart",
]
RIGHT = {
    "learned positions": ("gpt2", {}),
    "rotary positions, window": ("mistral", {"sliding_window": 6, "num_key_value_heads": 2}),
    "experts": (
        "mixtral",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 6,
            "num_key_value_heads": 2,
        },
    ),
}


def stock(model_type, dtype=torch.float32, **differs):
    """A transformers model with weights large enough that positions show in the logits."""
    sizes = SEQ2SEQ if model_type in WITHOUT_POSITIONS else TINY
    config = transformers.AutoConfig.for_model(model_type, **(sizes | differs))
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        .eval()
        .requires_grad_(False)
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 0.15)
    return model


def llm_of(model, options=None, **settings):
    settings = {"max_num_seqs": 2, "max_model_len": 48, "progress": False, **settings}
    return LLM(model, options={"glue": "eager", **(options or {})}, **settings)


def notes(llm):
    return [note for note in llm.program.report.notes if "self-check" in note]


# Per change two of them. The code of the others in transformers is a copy of theirs.
@pytest.mark.rotating
@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in ("bart", "marian") else pytest.mark.slow)
        for name in WITHOUT_POSITIONS
    ],
)
def test_a_class_whose_positions_are_ignored_is_refused_with_the_numbers(model_type):
    with pytest.raises(ValueError) as error:
        llm_of(stock(model_type))
    text = str(error.value)
    assert (
        "computes something else in the runtime than by itself: its logits differ by" in text
        and "\n" not in text
    )
    assert (
        "a decode step of their spread, and rounding explains 4.3e-05 (its forward takes no "
        "position_ids" in text
    )
    assert "--no-self-check (self_check=False)" in text


@pytest.mark.rotating
def test_a_class_that_gives_more_logits_than_are_wanted_is_refused():
    sizes = {"max_target_positions": 64, "num_mel_bins": 8, "max_source_positions": 16}
    with pytest.raises(
        ValueError, match=r"WhisperForCausalLM computes something else .* no logits_to_keep"
    ):
        llm_of(stock("whisper", **(SEQ2SEQ | sizes)))


@pytest.mark.rotating
def test_ignored_positions_are_orders_of_magnitude_from_rounding():
    model = stock("marian", torch.bfloat16)
    llm = llm_of(model, self_check=False)
    assert notes(llm) == []
    verdict = SelfCheck(llm.engine.module, Options()).verdict(llm.program)
    errors = dict(verdict.errors)
    assert errors.pop("a prompt alone") < verdict.limit < 0.05
    assert min(errors.values()) > 0.5


# Per change, each class in one of both ways, by turns.
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        pytest.param(
            name,
            dtype,
            layout,
            id=f"{name}-{dtype}-{layout}".replace("torch.", ""),
            marks=() if (i + j) % 2 == 0 else pytest.mark.slow,
        )
        for i, name in enumerate(RIGHT)
        for j, (dtype, layout) in enumerate(
            ((torch.float32, "paged"), (torch.bfloat16, "contiguous"))
        )
    ],
)
def test_a_class_that_is_right_is_served_and_the_report_says_so(name, dtype, layout):
    model_type, differs = RIGHT[name]
    model = stock(model_type, dtype, **differs)
    llm = llm_of(model, {"layout": layout})
    (note,) = notes(llm)
    assert (
        note.startswith("self-check in ")
        and f"as {type(model).__name__}'s own forward; logits differ by" in note
    )
    assert llm.generate([[5, 6, 7]])[0].token_ids


@pytest.mark.rotating
def test_many_layers_in_bf16_stay_within_rounding():
    llm = llm_of(stock("llama", torch.bfloat16, num_hidden_layers=24), self_check=False)
    verdict = SelfCheck(llm.engine.module, Options()).verdict(llm.program)
    assert verdict.right and all(error < verdict.limit / 2 for _, error in verdict.errors)


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", ["fp8", "int4"])
def test_a_quantized_class_is_compared_in_the_same_state(scheme):
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    assert notes(llm_of(quantize(stock("llama", torch.bfloat16, **sizes), scheme)))[0].startswith(
        "self-check in "
    )


@pytest.mark.rotating
def test_a_quantized_class_whose_positions_are_ignored_is_refused():
    model = quantize(stock("marian", torch.bfloat16, d_model=128, decoder_ffn_dim=128), "fp8")
    with pytest.raises(ValueError, match="MarianForCausalLM computes something else"):
        llm_of(model)


def test_without_the_check_the_class_is_served_as_it_is():
    llm = llm_of(stock("marian"), self_check=False)
    assert notes(llm) == [] and llm.generate([[5, 6, 7]])[0].token_ids


@pytest.mark.rotating
def test_a_model_with_few_positions_is_served_with_a_note():
    (note,) = notes(llm_of(stock("gpt2", max_position_embeddings=16), max_model_len=16))
    assert note == "no self-check: it needs sequences of 23 tokens, the model has 16 positions"


@pytest.mark.rotating
def test_a_given_module_has_its_own_attention_after_the_check():
    model = stock("gpt2")
    own = model.config._attn_implementation
    llm = llm_of(model)
    assert model.config._attn_implementation == own != "atom"
    from atomc.stock.adapter import wrap_stock

    assert compile_model(wrap_stock(model), {"glue": "eager"}).specs == llm.program.specs


def test_a_part_without_a_module_of_which_no_attention_is_chosen_is_left_alone():
    config = transformers.MoshiConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=48
    )
    model = transformers.MoshiForCausalLM(config)
    own = Implementations.of(model)
    assert list(own.attention) == [""] and len(config.sub_configs) == 2
    model.set_attn_implementation("eager")
    own.set_in(model)
    assert config._attn_implementation == own.attention[""] != "eager"


@pytest.mark.rotating
def test_the_verdict_is_kept_beside_the_program_and_belongs_to_its_configuration(tmp_path):
    cached = {"cache": True, "cache_dir": str(tmp_path)}

    def said(**differs):
        torch._dynamo.reset()
        return (
            notes(llm_of(stock("gpt2", **differs), cached))[0]
            .partition(":")[0]
            .partition(" in ")[0]
        )

    assert said() == "self-check"
    assert usage(Options.of(cached)).entries == 3  # its graph, its modules and the verdict
    assert said() == "self-check at an earlier start"
    assert said(layer_norm_epsilon=1e-3) == "self-check"
    for path in tmp_path.glob("*.atomc"):
        path.write_bytes(path.read_bytes()[:-1])
    assert said() == "self-check"


@pytest.mark.rotating
def test_a_refused_class_is_refused_again(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="computes something else"):
            llm_of(stock("marian"), {"cache": True, "cache_dir": str(tmp_path)})
