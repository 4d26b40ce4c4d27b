"""Draft layers of a model that reads images: they have its embeddings and positions."""

import hashlib

import numpy as np
import pytest
import torch
from tiny_mtp import fill
from tiny_vl import EXPERTS, HYBRID, IMAGE, TEXT, VIDEO, VISION

from atomc.loading.create_model import create_model
from atomc.models.mrope import mrope_positions
from atomc.models.vision_language import ImageDraftModel
from atomc.ops.inputs import ModelInputs
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.input_batch import InputBatch
from atomc.runtime.execution.views.hidden_states import WithHiddenStates
from atomc.runtime.requests.request import PromptImage
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.step import Admission, Chunk, ImageRows, ScheduledStep

pytestmark = [pytest.mark.xdist_group("mtp_images"), pytest.mark.usefixtures("compiled_once")]

CONFIGS = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", TEXT | HYBRID),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", TEXT | HYBRID | EXPERTS),
}
WIDTH = 96  # values of a patch
GRIDS = [(1, 4, 6), (1, 8, 4), (1, 2, 10)]


def tiny_model(kind="qwen3_5"):
    architecture, text = CONFIGS[kind]
    torch.manual_seed(0)
    model = create_model(
        {
            "architectures": [architecture],
            "model_type": kind,
            "text_config": {**text, "mtp_num_hidden_layers": 1},
            "vision_config": {**VISION, "depth": 2},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
        },
        torch.float64,
        draft_layers=1,
    )
    fill(model)
    for name, weight in model.named_parameters():
        if "visual" in name:
            weight.normal_(0, 0.3)
    return model


def image(seed, start):
    grid = GRIDS[seed % len(GRIDS)]
    count = grid[1] * grid[2]
    pixels = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    digest = hashlib.sha256(repr(grid).encode() + pixels.tobytes()).digest()
    return PromptImage(start, count // 4, grid, pixels.tobytes(), digest)


def prompt_of(*parts):
    """Numbers are tokens; a tuple (seed,) is an image."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            images.append(image(part[0], len(tokens)))
            tokens += [IMAGE] * images[-1].length
    return tokens, images


PROMPTS = [
    prompt_of(5, 6, (0,), 7, 8),
    prompt_of((1,), 7, (2,), (3,), 9, 9),
    prompt_of(3, 1, 4, 1, 5),
]


class Eager:
    """The model and its draft layer over a whole sequence that begins with a prompt."""

    def __init__(self, model, tokens, images):
        self.model, self.draft = model, model.draft_models(1)[0]
        self.states = WithHiddenStates(model, self.draft.reads)
        placed = [(one.start, one.grid) for one in images]
        self.positions, self.delta = mrope_positions(placed, len(tokens), model.merge_size)
        self.is_image = torch.zeros(len(tokens), dtype=torch.bool)
        self.embeddings = torch.zeros(len(tokens), 64, dtype=torch.float64)
        for one in images:
            pixels = torch.tensor(np.frombuffer(one.pixels, np.float32)).view(-1, WIDTH)
            self.is_image[one.start : one.end] = True
            found = model.encode_images(pixels.double(), [one.grid])
            self.embeddings[one.start : one.end] = found

    def over(self, tokens):
        """Ids, positions, embeddings and mask of these tokens, which begin with the prompt."""
        new = len(tokens) - len(self.is_image)
        further = torch.arange(len(self.is_image), len(tokens)) + self.delta
        return (
            torch.tensor(tokens),
            torch.cat([self.positions, further.repeat(3, 1)], 1),
            torch.cat([self.embeddings, self.embeddings.new_zeros(new, 64)]),
            torch.cat([self.is_image, self.is_image.new_zeros(new)]),
        )

    def logits(self, tokens):
        ids, positions, *images = self.over(tokens)
        return self.states(ids, positions, torch.arange(len(ids)), *images)

    def drafts(self, tokens, count):
        """The draft after these tokens: the draft layer over all of them, then over its own."""
        ids, positions, embeddings, is_image = self.over(tokens)
        hidden, following = self.logits(tokens)[1][:-1], ids[1:]
        images, found = (embeddings[1:], is_image[1:]), []
        for _ in range(count):
            rows = torch.arange(len(following))
            at = positions[:, : len(rows)]
            logits, last = self.draft(following, at, hidden, rows[-1:], *images)
            found.append(int(logits[0].argmax()))
            hidden = torch.cat([hidden, last[-1:]])
            following = torch.cat([following, logits.argmax(-1)])
            positions = torch.cat([positions, positions[:, -1:] + 1], 1)
            images = tuple(torch.cat([one, torch.zeros_like(one[:1])]) for one in images)
        return found


def started(model, **config):
    given = {"max_num_seqs": 4, "num_blocks": 60, "max_num_batched_tokens": 64} | config
    options = {"strict": True, "glue": "eager", "layout": "paged"}
    return Engine(
        EngineConfig(speculative="mtp", speculative_tokens=3, options=options, **given),
        module=model,
        progress=False,
    )


def test_a_draft_model_reads_the_embeddings_of_images():
    model = tiny_model()
    draft = model.draft_models(1)[0]
    assert type(draft) is ImageDraftModel and draft.reads == ("model.language_model.norm",)
    assert draft.embed_tokens is model.model.language_model.embed_tokens
    ids, hidden = torch.tensor([3, IMAGE, 4]), torch.randn(3, 64, dtype=torch.float64)
    positions, rows = torch.arange(3).repeat(3, 1), torch.arange(3)
    mask = torch.tensor([False, True, False])
    embeddings = torch.full((3, 64), torch.nan, dtype=torch.float64)
    embeddings[1] = draft.embed_tokens.weight[7]
    found, _ = draft(ids, positions, hidden, rows, embeddings, mask)
    as_text, _ = draft(torch.tensor([3, 7, 4]), positions, hidden, rows)
    torch.testing.assert_close(found, as_text)


def test_a_draft_step_has_the_embeddings_of_the_next_tokens_of_each_chunk():
    batch = InputBatch(
        rows=10, sequences=4, columns=4, block_size=4, drafts=2, merge_size=2,
        takes=ModelInputs(embeddings=(1, torch.float32), mrope=True),
    )  # fmt: skip
    grids = ((0, (1, 4, 4)),)
    admission = Admission(SamplingParams(), 0, 6, frozenset(), images=grids)
    whole = Chunk(
        "a", 0, (1, 1, 1, 1, 8), 0, ((0, (1, 2)),), num_samples=1, num_output_rows=1,
        admission=admission, images=(ImageRows(b"x", 0, 0, 4),),
    )  # fmt: skip
    part = Chunk(
        "b", 1, (1, 1, 1), 0, ((0, (3,)),), admission=admission, next_token=1,
        images=(ImageRows(b"x", 0, 0, 3),),
    )  # fmt: skip
    shape = batch.write(ScheduledStep((whole, part)), num_rows=9)
    batch.row_inputs["embeddings"][:, 0] = torch.arange(10)
    batch.keep_samples(torch.tensor([9]))
    step, _ = batch.draft_step(shape, torch.zeros(9, 1), images=True)
    assert step.input_ids[:8].tolist() == [1, 1, 1, 8, 9, 1, 1, 1]
    rows = step.is_image.nonzero()[:, 0].tolist()
    # The last row of "b" is before an image token whose embedding no row of the step has.
    assert rows == [0, 1, 2, 5, 6] and step.embeddings[rows, 0].tolist() == [1, 2, 3, 6, 7]
    assert step.positions[:, :5].tolist() == [[0, 0, 0, 0, 2], [0, 0, 1, 1, 2], [0, 1, 0, 1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_drafts_and_tokens_of_prompts_with_images_are_those_of_the_whole_sequence(kind):
    model = tiny_model(kind)
    one = started(model, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    requests, eager, seen = {}, {}, dict.fromkeys(range(len(PROMPTS)), 0)
    for i, (tokens, images) in enumerate(PROMPTS):
        requests[f"{i}"] = one.request(f"{i}", tokens, params, images=images)
        eager[f"{i}"] = Eager(model, tokens, images)
        one.add(requests[f"{i}"])
    while one.has_work:
        for output in one.step():
            assert output.error is None
        for request in one.scheduler.running:
            if request.draft:
                expected = eager[request.id].drafts(request.tokens, len(request.draft))
                assert list(request.draft) == expected, (request.id, request.length)
                seen[int(request.id)] += 1
    assert min(seen.values()) > 2
    for name, request in requests.items():
        check_greedy(eager[name], request.num_prompt, request.tokens)
    stats = one.stats()
    assert 0 < stats.acceptance_rate < 1 and stats.images_encoded == 4


def check_greedy(eager, num_prompt, tokens):
    logits = eager.logits(tokens)[0]
    assert logits.argmax(-1)[num_prompt - 1 : -1].tolist() == tokens[num_prompt:]


@pytest.mark.slow
def test_chunks_of_images_preemption_and_snapshots_change_no_token():
    model = tiny_model()
    one = started(model, max_num_batched_tokens=20, num_blocks=8, state_snapshots=4)
    one.scheduler.snapshots.least = one.scheduler.snapshots.interval = 16
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    # Together, and then twice the one that has a block to share.
    for prompts in (PROMPTS + PROMPTS, PROMPTS[1:2], PROMPTS[1:2]):
        requests = []
        for i, (tokens, images) in enumerate(prompts):
            requests.append(one.request(f"{i}", tokens, params, images=images))
            one.add(requests[-1])
        while one.has_work:
            assert all(output.error is None for output in one.step())
            one.check()
        for request, (tokens, images) in zip(requests, prompts, strict=True):
            check_greedy(Eager(model, tokens, images), len(tokens), request.tokens)
    stats = one.stats()
    assert stats.accepted and stats.snapshot_hits and stats.preemptions
