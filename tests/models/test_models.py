"""Our models against Hugging Face's on the same random weights, and the stock classes behind our
forward.
"""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from atomc.loading.create_model import create_model
from atomc.loading.loader import load
from atomc.models.llama import Config as LlamaConfig
from atomc.models.llama import LlamaForCausalLM
from atomc.models.qwen3 import Config as Qwen3Config
from atomc.models.rotary import Rotary, rope_parameters
from atomc.stock.adapter import wrap_stock

transformers = pytest.importorskip("transformers")

TINY = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> model_type and what differs from TINY
OURS = {
    "llama": ("llama", {}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    ),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with mscale": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "llama, yarn not truncated": (
        "llama",
        {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8}},
    ),
    "llama, bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim": ("llama", {"head_dim": 24}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, one head per group": ("llama", {"num_key_value_heads": 4}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, one key head": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
    "qwen3, tied, bias": (
        "qwen3",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen3, window on the second layer": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
}
STOCK = {
    "phi3, window": ("phi3", {"sliding_window": 6}),
    "gemma3, window": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2, softcap": (
        "gemma2",
        {"head_dim": 16, "attn_logit_softcapping": 2.0, "sliding_window": 5},
    ),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}
IDS = torch.randint(0, 96, (33,), generator=torch.Generator().manual_seed(0))


def hf_model(model_type: str, **differs: object) -> nn.Module:
    """A transformers model whose random weights are large enough that every part of it shows in the
    logits.
    """
    config = transformers.AutoConfig.for_model(model_type, **(TINY | differs))
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        weight.data.normal_(mean, 0.15, generator=generator)
    return model.eval()


def hf_logits(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """[T, V], or [B, T, V] if the ids have a batch."""
    flat = ids.dim() == 1
    with torch.no_grad():
        logits = model(
            input_ids=ids[None] if flat else ids,
            position_ids=positions[None] if flat else positions,
            use_cache=False,
        ).logits
    return logits[0] if flat else logits


def error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest expected logit."""
    return ((actual.float() - expected.float()).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", OURS)
def test_logits_and_names_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    model_type, differs = OURS[name]
    theirs = hf_model(model_type, **differs)
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)

    assert type(ours).__module__.startswith("atomc.models.")
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    for length in (1, 7, 33):
        ids, positions = IDS[:length], torch.arange(length)
        assert error(ours(ids, positions), hf_logits(theirs, ids, positions)) < 1e-4
    ids, positions = IDS[:30].view(2, 15), torch.arange(15).expand(2, 15)
    assert error(ours(ids, positions), hf_logits(theirs, ids, positions)) < 1e-4


@pytest.mark.parametrize("name", ["llama, yarn", "mistral, window", "qwen3"])
def test_bf16_is_as_close_to_fp32_as_hugging_face_is(name: str, tmp_path: Path) -> None:
    model_type, differs = OURS[name]
    theirs = hf_model(model_type, **differs)
    theirs.save_pretrained(tmp_path)
    positions = torch.arange(33)
    expected = hf_logits(theirs, IDS, positions)
    in_bf16 = type(theirs).from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )

    ours = load(tmp_path, dtype=torch.bfloat16)(IDS, positions)
    assert ours.dtype == torch.bfloat16
    assert error(ours, expected) < 1.5 * error(hf_logits(in_bf16, IDS, positions), expected)


def test_positions_need_not_start_at_zero(tmp_path: Path) -> None:
    theirs = hf_model("llama", rope_parameters=LLAMA3)
    theirs.save_pretrained(tmp_path)
    positions = torch.arange(40, 73)
    assert error(load(tmp_path)(IDS, positions), hf_logits(theirs, IDS, positions)) < 1e-4


@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_only_the_wanted_rows_get_logits(model_type: str, tmp_path: Path) -> None:
    hf_model(model_type).save_pretrained(tmp_path)
    model, positions = load(tmp_path), torch.arange(33)
    rows = torch.tensor([32, 0, 7])
    with torch.no_grad():
        torch.testing.assert_close(model(IDS, positions, rows), model(IDS, positions)[rows])


@pytest.mark.parametrize("name", STOCK)
def test_an_architecture_without_a_file_runs_as_its_transformers_class(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, differs = STOCK[name]
    theirs = hf_model(model_type, **differs)
    theirs.save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO, "atomc"):
        ours = load(tmp_path)
    notices = [r.getMessage() for r in caplog.records if r.name == "atomc"]
    assert notices == [
        f"{type(theirs).__name__} has no model file in atomc; using the class of transformers "
        f"{transformers.__version__}"
    ]
    for length in (1, 33):
        ids, positions = IDS[:length], torch.arange(length)
        with torch.no_grad():
            assert error(ours(ids, positions), hf_logits(theirs, ids, positions)) < 1e-4
    ids, positions = IDS[:30].view(2, 15), torch.arange(15).expand(2, 15)
    with torch.no_grad():
        assert error(ours(ids, positions), hf_logits(theirs, ids, positions)) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen3, window on the second layer"])
def test_a_wrapped_model_of_the_user_gives_the_same_logits(name: str) -> None:
    model_type, differs = OURS[name]
    model = hf_model(model_type, **differs)
    positions = torch.arange(33)
    expected = hf_logits(model, IDS, positions)
    with torch.no_grad():
        assert error(wrap_stock(model)(IDS, positions), expected) < 1e-4


def test_every_attention_layer_of_a_wrapped_model_has_a_state_handle_of_its_own() -> None:
    model = wrap_stock(hf_model("gemma3_text", head_dim=24, num_key_value_heads=1))
    handles = {name: buffer for name, buffer in model.named_buffers() if name.endswith(".kv")}
    assert [tuple(handle.shape) for handle in handles.values()] == [(0, 1, 24)] * 2
    assert len({id(handle) for handle in handles.values()}) == 2
    assert not any(name.endswith(".kv") for name in model.state_dict())


def test_a_stock_model_built_in_bf16_keeps_its_rotary_frequencies_in_fp32() -> None:
    config = hf_model("phi3").config.to_dict() | {"architectures": ["Phi3ForCausalLM"]}
    model = create_model(config, torch.bfloat16)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for name, b in model.named_buffers() if name.endswith("inv_freq")} == {
        torch.float32
    }


@pytest.mark.parametrize(
    ("model_type", "differs", "sentence"),
    [
        ("bloom", {}, "BloomForCausalLM does not support a custom attention"),
        ("bert", {}, "BertLMHeadModel has no attention layer with a layer_idx and a head_dim"),
    ],
)
def test_attention_that_cannot_be_given_a_state_is_refused(
    model_type: str, differs: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        wrap_stock(hf_model(model_type, **differs))


def test_a_state_handle_that_does_not_fit_the_keys_is_refused() -> None:
    model = wrap_stock(hf_model("gpt2", num_key_value_heads=2))
    with pytest.raises(
        ValueError, match=r"GPT2Attention: keys \[1, 4, 33, 16\] .* do not match its state handle"
    ):
        model(IDS, torch.arange(33))


@pytest.mark.parametrize(
    ("model_type", "differs", "kind"),
    [
        ("llama4_text", {"intermediate_size_mlp": 96, "num_local_experts": 2}, "chunked_attention"),
        ("minimax", {"num_local_experts": 2, "head_dim": 16}, "linear_attention"),
        ("rwkv", {}, "recurrent"),
    ],
)
def test_layers_whose_state_or_mask_we_do_not_know_are_refused(
    model_type: str, differs: dict[str, object], kind: str
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"has layers of kind {kind}, only full_attention and sliding_attention are",
    ):
        wrap_stock(hf_model(model_type, **differs))


HF = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | TINY


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"hidden_act": "gelu"}, "llama: hidden_act 'gelu' is not supported, only 'silu'"),
        ({"vocab_size": None}, "llama: config.json lacks 'vocab_size', a positive integer"),
        ({"num_hidden_layers": "2"}, "llama: num_hidden_layers '2' is not a positive integer"),
        ({"rms_norm_eps": -1}, "llama: rms_norm_eps -1 is not a positive number of fp32"),
        (
            {"num_key_value_heads": 3},
            "llama: num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        (
            {"hidden_size": 66},
            "llama: hidden_size 66 is not a multiple of num_attention_heads 4, "
            "and config.json has no head_dim",
        ),
        ({"head_dim": 15}, "llama: head_dim 15 is odd, rotary positions need pairs of columns"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "llama: rope_type 'dynamic' is not supported, only default, linear, llama3, yarn",
        ),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "llama: rope_type 'su' is not supported, only default, linear, llama3, yarn",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "llama: rope_type 'linear' needs the number 'factor', rope_parameters has "
            "{'rope_type': 'linear'}",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "llama: partial_rotary_factor 0.5 is not supported, only 1.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "llama: rope_parameters per layer type (full_attention) are not supported",
        ),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "mistral: sliding_window 0 is not a positive integer",
        ),
    ],
)
def test_an_unsupported_llama_config_is_refused_in_one_sentence(
    differs: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ValueError) as raised:
        create_model(HF | differs, device="meta")
    assert str(raised.value) == sentence


def test_an_unknown_layer_type_of_qwen3_is_refused() -> None:
    config = HF | {"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]}
    with pytest.raises(
        ValueError,
        match=r"qwen3: layer_types .*chunked_attention.* are not 2 of 'full_attention' or",
    ):
        Qwen3Config.from_hf(config)


def test_rope_settings_of_older_configs_mean_the_same() -> None:
    scaling = {
        key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")
    }
    older = HF | {"rope_theta": 10000.0, "rope_scaling": scaling | {"type": "llama3"}}
    newer = HF | {"rope_parameters": LLAMA3}
    assert {**rope_parameters(older), "type": None} == {**rope_parameters(newer), "type": None}


def test_llama_ignores_a_sliding_window_and_mistral_without_the_field_has_one() -> None:
    assert LlamaConfig.from_hf(HF | {"sliding_window": 8}).sliding_window is None
    assert LlamaConfig.from_hf(HF | {"model_type": "mistral"}).sliding_window == 4096


def test_rotary_frequencies_stay_fp32_and_survive_meta() -> None:
    rope = rope_parameters(HF)
    expected = Rotary(rope, 16).inv_freq
    with torch.device("meta"):
        rotary = Rotary(rope, 16)
    assert rotary.inv_freq.is_meta
    moved = rotary.to_empty(device="cpu").to(torch.bfloat16)
    assert torch.equal(moved.inv_freq, expected) and moved.inv_freq.dtype == torch.float32
    cos, sin = moved(torch.empty(3, 64, dtype=torch.bfloat16), torch.arange(3))
    assert cos.shape == sin.shape == (3, 1, 16) and cos.dtype == torch.bfloat16


def test_the_number_of_heads_is_not_in_forward() -> None:
    """A shard of the q, k, v and o weights runs without a change to the model: head groups 0 and 1
    add up to all.
    """
    model = LlamaForCausalLM(LlamaConfig.from_hf(HF)).eval()
    x, positions = torch.randn(5, 64), torch.arange(5)
    attention = model.model.layers[0].self_attn
    cos, sin = model.model.rotary_emb(x, positions)
    with torch.no_grad():
        whole = attention(x, cos, sin)
        full = {
            name: getattr(attention, name).weight
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        total = torch.zeros_like(whole)
        for rank in range(2):
            for name, weight in full.items():
                cut = weight.chunk(2, dim=0 if name != "o_proj" else 1)[rank]
                getattr(attention, name).weight = nn.Parameter(cut)
            total += attention(x, cos, sin)
    torch.testing.assert_close(total, whole)
