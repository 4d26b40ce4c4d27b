"""The demo model in the package: small, in the shape that later steps rely on, and as good as its
folder says.
"""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from atomc.demo import PATH

CONFIG = json.loads((PATH / "config.json").read_text())
RECORDED = json.loads((PATH / "perplexity.json").read_text())


def test_the_shape_suits_every_quantization_scheme_and_four_ranks():
    assert CONFIG["architectures"] == ["Qwen3ForCausalLM"]
    heads = [CONFIG[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    assert heads == [8, 4, 64]
    assert CONFIG["hidden_size"] == 256
    assert CONFIG["intermediate_size"] == 768
    assert CONFIG["vocab_size"] % 256 == 0
    assert CONFIG["tie_word_embeddings"]


def test_the_weights_are_bfloat16_below_8_megabytes_and_the_tied_head_is_stored_once():
    assert (PATH / "model.safetensors").stat().st_size <= 8_000_000
    with safe_open(PATH / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {weights.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_the_tokenizer_gives_the_held_out_text_back():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(PATH / "tokenizer.json"))
    text = (PATH / "held_out.txt").read_text()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) == RECORDED["tokens"]
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == CONFIG["eos_token_id"]


def test_transformers_splits_text_as_tokenizers_does():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    text = "In 1816, she didn't say: \u00e9t\u00e9 \u4f60\u597d \U0001f600\n\n  Why?<|endoftext|>"
    ids = transformers.AutoTokenizer.from_pretrained(PATH)(text)["input_ids"]
    assert ids == tokenizers.Tokenizer.from_file(str(PATH / "tokenizer.json")).encode(text).ids


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_stock_transformers_reaches_the_recorded_perplexity(dtype):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(PATH)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        PATH, dtype=getattr(torch, dtype)
    ).eval()
    ids = tokenizer((PATH / "held_out.txt").read_text())["input_ids"][: RECORDED["slice"]["tokens"]]
    context, stride = RECORDED["context"], RECORDED["stride"]

    # Every window after the first scores its last `stride` tokens; the slice is whole strides, so
    # no window is shorter.
    losses = []
    for start in range(0, len(ids) - context + 1, stride):
        window = torch.tensor(ids[start : start + context])
        with torch.inference_mode():
            logits = model(window[None]).logits[0, :-1].float()
        losses.append(
            F.cross_entropy(logits, window[1:], reduction="none")[-stride if start else 0 :]
        )
    assert sum(map(len, losses)) == len(ids) - 1
    assert math.exp(torch.cat(losses).mean()) == pytest.approx(RECORDED["slice"][dtype], rel=0.01)
