"""Models that read images in the runtime: greedy tokens are those of transformers' generate."""

import hashlib
import random
from functools import cache

import numpy as np
import pytest
import torch
from tiny_vl import IMAGE, theirs
from torch import nn

from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.stock.adapter import wrap_stock

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]

PATCH_WIDTH, NEW = 96, 8
# Tokens, and (seed, grid) of images: one or three of different sizes. Some images come again, and
# the last prompts begin alike. Text stands between images and at the end: transformers takes images
# side by side for one, and new tokens behind an image for further tokens of it.
A, B, C = (1, (1, 4, 6)), (2, (1, 8, 8)), (3, (1, 2, 10))
START = [*range(20, 40), A, 41, 42]
WITH_IMAGES = [
    [5, A, 7],
    [B, 9, 8],
    [5, 6, C, 2],
    [5, (4, (1, 2, 2)), 7, 7],
    [*range(1, 30), (5, (1, 12, 4)), 3],
    [B, 7, (6, (1, 4, 4)), 8, C, 9],
    [5, A, 6, B, 6, C, 7],
    [(7, (1, 10, 2)), 4, (8, (1, 6, 6)), 5, 6, (9, (1, 2, 2)), 7],
    [*START, 43],
    [*START, B, 44, C, 3],
]
TEXTS = [random.Random(i).choices(range(80), k=1 + 2 * i) for i in range(20)]
PROMPTS = WITH_IMAGES + TEXTS


@cache
def model_of(kind: str) -> nn.Module:
    """In fp64, so that rounding decides about no token."""
    model = theirs(kind, torch.float64)
    if kind.endswith("_moe"):
        model.set_experts_implementation("eager")  # the default one has no kernel for fp64
    return model


def prompt_of(parts):
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        seed, grid = part
        count = grid[0] * grid[1] * grid[2]
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


@cache
def expected(kind):
    found = [generated(model_of(kind), prompt_of(parts)) for parts in PROMPTS]
    assert len({tuple(tokens) for tokens in found}) > 25, "the prompts have equal answers"
    return found


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


@pytest.mark.rotating
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_vl",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", "qwen3_5_moe")),
    ],
)
def test_our_model_gives_the_tokens_of_transformers(kind, tmp_path):
    model_of(kind).save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype="float64", device="cpu", **SETTINGS)
    assert type(llm.engine.module).__module__.startswith("atomc.models.qwen3_")
    assert tokens_of(llm) == expected(kind)
    assert tokens_of(llm) == expected(kind)
    stats = llm.engine.stats()
    images = {part for parts in WITH_IMAGES for part in parts if isinstance(part, tuple)}
    assert stats.images_encoded == len(images)
    # Of state per sequence, there are no snapshots for prompts as short as these.
    assert (stats.prefix_hits > 0) == (kind == "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_the_stock_class_gives_the_tokens_of_transformers(kind):
    # In fp64, transformers' rotary tables in fp32 count as a difference.
    model = wrap_stock(theirs.__wrapped__(kind, torch.float64))
    assert tokens_of(LLM(model, self_check=False, **SETTINGS)) == expected(kind)
