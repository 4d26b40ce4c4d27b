"""A small model with a vision encoder, and random images for it.

T tokens, D width, I tokens of images, P patches of W values, E = 2 D: the embeddings that replace
those of image tokens, and what is added to them after the first layer.
"""

import functools
import hashlib
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atomc import ops
from atomc.models.image_grid import num_image_tokens
from atomc.models.mrope import mrope_positions
from atomc.program import compile_model
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution import compile_programs
from atomc.runtime.requests.request import PromptImage

VOCAB, D, W, MERGE, IMAGE, MAX_LEN = 61, 16, 6, 2, 60, 96
OPTIONS: dict[str, Any] = {"strict": True, "glue": "eager", "layout": "paged"}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.kv = ops.kv_state(1, D)

    def forward(self, x, turn):
        q, k, v = self.q(x) * turn, self.k(x) * turn, self.v(x)
        q, k, v = (each.unflatten(-1, (1, D)) for each in (q, k, v))
        return ops.attention(q, k, v, self.kv, scale=0.3).flatten(-2)


class DeltaNet(nn.Module):
    """A gated delta rule of one head, whose state is one matrix per sequence."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.gates = nn.Linear(D, 2)
        self.state = ops.delta_state(1, D, D)

    def forward(self, x, turn):
        q, k, v = (each(x).unflatten(-1, (1, D)) for each in (self.q, self.k, self.v))
        g, beta = self.gates(x).float().unsqueeze(-1).unbind(-2)
        g, beta = -nn.functional.softplus(g), beta.sigmoid()
        return ops.gated_delta_rule(q, k, v, g, beta, self.state, scale=0.3).flatten(-2)


class TinyVision(nn.Module):
    layer_classes: tuple[type[nn.Module], ...] = (Attention, Attention)
    image_token_ids = frozenset({IMAGE, IMAGE - 1})
    merge_size, patch_width, embedding_width = MERGE, W, 2 * D

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.layers = nn.ModuleList(layer() for layer in self.layer_classes)
        self.lm_head = nn.Linear(D, VOCAB, bias=False)
        self.vision = nn.Linear(W, 2 * D)

    def encode_images(self, pixels, grids):
        """A token is the mean of the patches of its square."""
        assert len(pixels) == sum(t * h * w for t, h, w in grids) and pixels.dtype == torch.float32
        return self.vision(pixels.to(self.vision.weight.dtype)).unflatten(0, (-1, MERGE**2)).mean(1)

    def forward(self, input_ids, positions, logits_rows=None, embeddings=None, is_image=None):
        x = self.embed(input_ids)
        if embeddings is not None:
            x = torch.where(is_image[:, None], embeddings[:, :D], x)
        t, h, w = positions.to(x.dtype)
        turn = torch.stack([torch.cos(t / 3), torch.cos(h / 5), torch.cos(w / 7)]).sum(0)[:, None]
        for i, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x, turn))
            if embeddings is not None and i == 0:
                x = x + torch.where(is_image[:, None], embeddings[:, D:], torch.zeros_like(x))
        return self.lm_head(x if logits_rows is None else x.index_select(0, logits_rows))


class HybridVision(TinyVision):
    """With state per sequence, as Qwen3.5."""

    layer_classes = (DeltaNet, Attention)


def tiny_vision(dtype=torch.float64, model=TinyVision):
    """In fp64, so that rounding decides about no token."""
    torch.manual_seed(3)
    made = model().to(dtype)
    for parameter in made.parameters():
        parameter.data.normal_(0, 0.5)
    made.config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=MAX_LEN)
    return made.eval().requires_grad_(False)


@functools.cache
def _compiled(model):
    """A model and its programs, which all engines of it use, one after the other: its class is in
    a test, so that the cache of compiled models has no key for it.
    """
    module = tiny_vision(model=model)
    return module, functools.cache(lambda takes: compile_model(module, OPTIONS, takes=takes))


@contextmanager
def compiled_once(model=TinyVision):
    """A context in which engines of this model, which it gives, use programs compiled before.
    Each can be used until the next one is started.
    """
    module, program = _compiled(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_programs, "compile_model", lambda *_, takes, **__: program(takes))
        yield module


def started(model=TinyVision, **config):
    """An engine of this model; see compiled_once."""
    given = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "num_blocks": 40,
        "seed": 0,
        "options": OPTIONS,
    }
    with compiled_once(model) as module:
        return Engine(EngineConfig(**{**given, **config}), module=module, progress=False)


def image_at(start, seed=0, grid=(1, 4, 4), **changes):
    """An image of random pixels that begins at this position."""
    count = grid[0] * grid[1] * grid[2]
    pixels = np.random.default_rng(seed).normal(size=(count, W)).astype(np.float32).tobytes()
    digest = hashlib.sha256(repr(grid).encode() + pixels).digest()
    length = num_image_tokens(grid, MERGE)
    return PromptImage(**{
        "start": start, "length": length, "grid": grid, "pixels": pixels, "digest": digest, **changes
    })  # fmt: skip


def prompt_of(*parts):
    """Tokens and images of a prompt: ints are tokens; (seed, grid) is an image."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            seed, grid = part
            images.append(image_at(len(tokens), seed, grid))
            tokens += [IMAGE] * images[-1].length
    return tokens, tuple(images)


def whole_logits(model, tokens, images, num_prompt=None):
    """Logits [T, V] of the plain model on a whole sequence; tokens after num_prompt are new."""
    grids = [(image.start, image.grid) for image in images]
    num_prompt = num_prompt or len(tokens)
    positions, delta = mrope_positions(grids, num_prompt, MERGE)
    new = torch.arange(num_prompt, len(tokens)).expand(3, -1) + delta
    embeddings = torch.zeros(len(tokens), 2 * D, dtype=model.embed.weight.dtype)
    is_image = torch.zeros(len(tokens), dtype=torch.bool)
    for image in images:
        pixels = torch.tensor(np.frombuffer(image.pixels, np.float32).reshape(-1, W))
        embeddings[image.start : image.end] = model.encode_images(pixels, [image.grid])
        is_image[image.start : image.end] = True
    positions = torch.cat([positions, new], 1)
    return model(torch.tensor(tokens), positions, None, embeddings, is_image)


def greedy(model, tokens, images, count):
    """Greedy tokens of the plain model, which computes the whole sequence for each."""
    found = list(tokens)
    for _ in range(count):
        found.append(int(whole_logits(model, found, images, len(tokens))[-1].argmax()))
    return found[len(tokens) :]
