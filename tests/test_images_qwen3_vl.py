"""Qwen3-VL with images in the runtime: greedy tokens are those of transformers' generate."""

import hashlib

import numpy as np
import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from atomc.runtime.llm import LLM
from atomc.runtime.prompt_image import PromptImage
from atomc.runtime.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.xdist_group("runtime")

IMAGE, VIDEO, BEGIN, END, PATCH_WIDTH, NEW = 120, 121, 122, 123, 96, 8
TEXT = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "eos_token_id": None,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 64,
}
# Tokens, and (seed, grid) of images.
PROMPTS = [
    [5, 6, 7],
    [5, BEGIN, (1, (1, 4, 6)), END, 7],
    [BEGIN, (1, (1, 8, 8)), END, 7, BEGIN, (2, (1, 4, 4)), END, BEGIN, (3, (1, 2, 10)), END, 9],
]


def stock():
    """In fp64, so that rounding decides about no token."""
    torch.manual_seed(0)
    special = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
        "tie_word_embeddings": False,
    }
    config = Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **special)
    model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float64).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1 if parameter.dim() > 1 else 0.5)
    return model


def prompt_of(parts):
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        seed, grid = part
        count = grid[1] * grid[2]
        pixels = np.random.default_rng(seed).normal(size=(count, PATCH_WIDTH)).astype(np.float32)
        digest = hashlib.sha256(repr(grid).encode() + pixels.tobytes()).digest()
        images.append(PromptImage(len(tokens), count // 4, grid, pixels.tobytes(), digest))
        tokens += [IMAGE] * images[-1].length
    return {"prompt_token_ids": tokens, "images": images}


def generated(model, prompt):
    """Greedy tokens of model.generate."""
    tokens, images = prompt["prompt_token_ids"], prompt["images"]
    given = {}
    if images:
        pixels = b"".join(image.pixels for image in images)
        given = {
            "pixel_values": torch.tensor(np.frombuffer(pixels, np.float32)).view(-1, PATCH_WIDTH),
            "image_grid_thw": torch.tensor([image.grid for image in images]),
            "mm_token_type_ids": torch.tensor([[int(token == IMAGE) for token in tokens]]),
        }
    ids = torch.tensor([tokens])
    with torch.no_grad():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW,
            do_sample=False, **given,
        )  # fmt: skip
    return found[0, len(tokens) :].tolist()


@pytest.fixture(scope="module")
def expected():
    model = stock()
    return [generated(model, prompt_of(parts)) for parts in PROMPTS]


def tokens_of(llm):
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    found = llm.generate([prompt_of(parts) for parts in PROMPTS], params)
    llm.engine.check()
    return [list(completion.token_ids) for completion in found]


SETTINGS = {
    "options": {"glue": "eager", "strict": True},
    "num_blocks": 60,
    "max_num_batched_tokens": 9,
    "max_num_seqs": 3,
    "progress": False,
}


def test_our_model_gives_the_tokens_of_transformers(expected, tmp_path):
    stock().save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float64", device="cpu", **SETTINGS)
    assert type(llm.engine.module).__module__ == "atomc.models.qwen3_vl"
    assert tokens_of(llm) == expected
    assert tokens_of(llm) == expected
    stats = llm.engine.stats()
    assert stats.images_encoded == 4 and stats.prefix_hits


@pytest.mark.slow
def test_the_stock_class_gives_the_tokens_of_transformers(expected):
    # In fp64, transformers' rotary tables in fp32 count as a difference.
    assert tokens_of(LLM(stock(), self_check=False, **SETTINGS)) == expected
