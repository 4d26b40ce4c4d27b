"""Requests with images through the runtime: tokens are those of the plain model on each whole
sequence, whatever else runs.
"""

import random
from dataclasses import replace

import pytest
import torch
from step_results import step_results
from tiny_vision import (
    IMAGE,
    MAX_LEN,
    OPTIONS,
    VOCAB,
    D,
    HybridVision,
    TinyVision,
    W,
    compiled_once,
    greedy,
    image_at,
    prompt_of,
    started,
    tiny_vision,
    whole_logits,
)

from atomc.ops.inputs import ModelInputs
from atomc.runtime.engine import QueueFull
from atomc.runtime.execution.images.encoder import ImageEncoder
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.execution.input_batch import InputBatch
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import siblings
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.step import Admission, Chunk, ImagePixels, ImageRows, ScheduledStep

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]

SMALL, WIDE, LARGE = (1, 4, 4), (1, 2, 8), (1, 8, 8)  # of 4, 4 and 16 tokens
PIXEL_BYTES = 4 * W
TOKEN_BYTES = 2 * D * 8


def params(count=8, **more):
    return SamplingParams(max_tokens=count, ignore_eos=True, **more)


def request_of(engine, name, parts, count=8, **more):
    tokens, images = prompt_of(*parts)
    return engine.request(name, tokens, params(count), images=images, **more)


def run(engine, *requests):
    """The tokens of each request, or the message of its error."""
    found = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
            if output.error is not None:
                found[output.request_id] = output.error.message
        engine.check()
    assert engine.scheduler.pixels.num_bytes == 0
    return found


@pytest.fixture(scope="module")
def model():
    return tiny_vision()


@pytest.fixture(scope="module")
def engine():
    return started()


def expected(model, parts, count=8):
    return greedy(model, *prompt_of(*parts), count)


PROMPTS = {
    "text": (5, 6, 7),
    "an image": (5, (1, SMALL), 7, 8),
    "an image first, longer than a step": ((2, LARGE), 3, (3, SMALL), 9),
    "images side by side": (5, (4, WIDE), (5, SMALL), 6),
    "an image last": (5, 6, (6, (1, 2, 2))),
}


@pytest.mark.parametrize("rows", [1, 3, 16, 65])
def test_tokens_are_those_of_the_whole_sequence_for_any_size_of_chunks(model, rows):
    engine = started(max_num_batched_tokens=rows, max_num_seqs=min(rows, 4))
    requests = [request_of(engine, name, parts) for name, parts in PROMPTS.items()]
    assert run(engine, *requests) == {
        name: expected(model, parts) for name, parts in PROMPTS.items()
    }


BEGINNINGS = [
    [5, 6, 7, (0, LARGE), 9],
    [5, 6, 7, (1, LARGE), 9],
    [*range(1, 19), (2, SMALL), 3],
    [(3, WIDE), *range(1, 15)],
    [],
]


def random_parts(rng):
    """Prompts begin alike, and have few different images, so that blocks and embeddings are
    shared.
    """
    parts = list(rng.choice(BEGINNINGS))
    for _ in range(rng.randint(0, 2)):
        parts.append((rng.randrange(4), rng.choice([SMALL, SMALL, WIDE, LARGE, (2, 2, 2)])))
        parts += [rng.randrange(1, IMAGE - 1) for _ in range(rng.choice([0, 0, 1, 5]))]
    return [*parts, *(rng.randrange(1, IMAGE - 1) for _ in range(rng.randint(1, 9)))]


ENGINES = [
    {"max_num_batched_tokens": 16, "num_blocks": 9, "image_cache_bytes": 24 * TOKEN_BYTES},
    {"max_num_batched_tokens": 7, "num_blocks": 8, "max_image_patches": 64},
    {"max_num_batched_tokens": 33, "num_blocks": 7, "speculative_tokens": 2},
    {"max_num_batched_tokens": 24, "num_blocks": 40, "enable_prefix_caching": False},
    {
        "max_num_batched_tokens": 11,
        "num_blocks": 9,
        "scheduling_policy": "priority",
        "image_cache_bytes": 16 * TOKEN_BYTES,
        "max_image_patches": 64,
    },
]


class Alone:
    """Greedy tokens of the plain model by prompt."""

    def __init__(self, model):
        self.model, self.known = model, {}

    def tokens(self, parts, count):
        key = tuple(parts)
        if len(self.known.get(key, ())) < count:
            self.known[key] = expected(self.model, parts, count)
        return self.known[key][:count]


def check_mix(engine, alone, seed, request_of=request_of):
    rng = random.Random(seed)
    prompts = {
        f"{seed}-{i}": (random_parts(rng), rng.randint(1, 20)) for i in range(rng.randint(3, 8))
    }
    waiting = [
        request_of(engine, name, parts, count, priority=rng.randint(0, 2))
        for name, (parts, count) in prompts.items()
    ]
    aborted = {name for name in prompts if rng.random() < 0.1}
    found = {name: [] for name in prompts}
    for now in range(5000):
        while waiting and (rng.random() < 0.6 or not engine.has_work):
            engine.add(waiting.pop(0))
        if now % 7 == 6:
            engine.abort(rng.choice(sorted(aborted) or [""]))
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] += output.token_ids
        engine.check()
        if not waiting and not engine.has_work:
            break
    for name, (parts, count) in prompts.items():
        tokens = alone.tokens(parts, count)
        assert found[name] == (tokens[: len(found[name])] if name in aborted else tokens), parts


@pytest.fixture(scope="module")
def alone(model):
    return Alone(model)


@pytest.mark.parametrize("number", range(len(ENGINES)))
@pytest.mark.parametrize("mixes", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_a_mix_of_requests_gives_the_tokens_of_each_request_alone(alone, number, mixes):
    engine = started(**ENGINES[number])
    for seed in range(mixes):
        check_mix(engine, alone, len(ENGINES) * seed + number)
    stats = engine.stats()
    assert stats.images_encoded > mixes and stats.image_cache_hits
    if mixes == 10 and number != 3:
        assert stats.prefix_hits and stats.preemptions


@pytest.mark.slow
def test_state_per_sequence_its_snapshots_and_drafts_are_those_of_the_images():
    alone = Alone(tiny_vision(model=HybridVision))
    counts = {"max_num_batched_tokens": 16, "num_blocks": 12, "state_snapshots": 4}
    engine = started(HybridVision, speculative_tokens=2, max_image_patches=64, **counts)
    engine.scheduler.snapshots.least = engine.scheduler.snapshots.interval = 16
    for seed in range(20):
        check_mix(engine, alone, 100 + seed)
    stats = engine.stats()
    assert stats.images_encoded and stats.snapshot_hits and stats.preemptions


def test_equal_tokens_with_other_images_share_no_block_and_equal_images_do(model):
    engine = started(num_blocks=40)
    tail = [9] * 20

    def cached(seed, *parts):
        request = request_of(engine, "a", (*parts, (seed, LARGE), *tail))
        found = run(engine, request)["a"]
        assert found == expected(model, (*parts, (seed, LARGE), *tail))
        return request.num_cached

    assert cached(1) == 0
    assert cached(2) == 0
    assert cached(1) == 32
    # An image in the second block: the first one is shared, the image makes the difference.
    head = [8] * 18
    assert (cached(1, *head), cached(2, *head), cached(1, *head)) == (0, 16, 48)
    # The same image two tokens later is another prompt.
    assert cached(1, 8, 8) == 0


def test_embeddings_are_used_again_and_the_least_recently_used_make_room(model):
    engine = started(image_cache_bytes=8 * TOKEN_BYTES, enable_prefix_caching=False)

    def counts(*seeds):
        before = engine.stats()
        for seed in seeds:
            parts = (5, (seed, SMALL), 6)
            assert run(engine, request_of(engine, "a", parts))["a"] == expected(model, parts)
        after = engine.stats()
        return (
            after.images_encoded - before.images_encoded,
            after.image_cache_hits - before.image_cache_hits,
        )

    assert counts(1, 2) == (2, 0)
    assert counts(1, 2, 2) == (0, 3)
    assert counts(1, 3) == (1, 1)  # 2 was used before 1
    assert counts(1) == (0, 1)
    assert counts(2) == (1, 0)
    assert len(engine.executor.encoder._embeddings) == 2


def test_a_step_encodes_images_up_to_its_budget_and_others_go_on():
    engine = started(max_image_patches=32, max_num_batched_tokens=64)
    for i in range(3):
        engine.add(request_of(engine, str(i), (5, (i, SMALL), (i + 10, SMALL), 6)))
    engine.add(request_of(engine, "text", (1, 2, 3)))
    patches, texts, text_steps = [], [], 0
    while engine.has_work:
        step = engine.scheduler.next_step()
        if step is None:
            break
        patches.append(sum(image.num_patches for image in step.images))
        texts.append([chunk.request_id for chunk in step.chunks])
        text_steps += "text" in texts[-1]
        engine.scheduler.finish_step(step, *step_results(step, 1))
        engine.check()
        if len(texts) == 4:
            break
    assert patches == [32, 32, 32, 0] and text_steps == 4
    for name in ("0", "1", "2", "text"):
        engine.abort(name)


def test_an_encoder_that_fails_ends_only_the_requests_of_its_image(model, monkeypatch):
    engine = started(max_num_batched_tokens=64)
    encoder = engine.executor.encoder
    broken = prompt_of((1, SMALL))[1][0].pixels
    encode = encoder.encode

    def fails(pixels, grids):
        if broken in pixels.numpy().tobytes():
            raise ArithmeticError("no such image")
        return encode(pixels, grids)

    monkeypatch.setattr(encoder, "encode", fails)
    prompts = {"bad": (5, (1, SMALL), 7), "good": (5, (2, SMALL), 7), "text": (5, 6)}
    requests = [request_of(engine, name, parts) for name, parts in prompts.items()]
    found = run(engine, *requests)
    assert found.pop("bad") == (
        "the engine failed while encoding an image of its prompt: ArithmeticError; see its log"
    )
    assert found == {name: expected(model, prompts[name]) for name in found}
    # The image is encoded again when it is requested again.
    monkeypatch.setattr(encoder, "encode", encode)
    parts = prompts["bad"]
    assert run(engine, request_of(engine, "again", parts))["again"] == expected(model, parts)


def test_embeddings_that_are_nan_end_their_request_and_reach_no_other(model, monkeypatch):
    engine = started(max_num_batched_tokens=64)
    encoder = engine.executor.encoder
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda *given: encode(*given) * torch.nan)
    assert "NaN" in run(engine, request_of(engine, "a", (5, (1, SMALL), 7)))["a"]
    monkeypatch.setattr(encoder, "encode", encode)
    parts = (5, (1, SMALL), 7)
    assert run(engine, request_of(engine, "b", parts))["b"] == expected(model, parts)
    parts = (5, 6, 7, 8, 9, (2, SMALL), 7)
    assert run(engine, request_of(engine, "c", parts))["c"] == expected(model, parts)


def test_a_step_that_fails_is_repeated_with_its_images(model, monkeypatch):
    engine = started()
    parts = (5, (1, LARGE), 7, (2, SMALL), 4)
    engine.add(request_of(engine, "a", parts))
    logits, number = engine.executor.runner.logits, 0

    def broken(step, **given):
        nonlocal number
        number += 1
        if number in (1, 3):
            raise RuntimeError("the device said no")
        return logits(step, **given)

    monkeypatch.setattr(engine.executor.runner, "logits", broken)
    found = []
    for _ in range(50):
        try:
            found += [token for output in engine.step() for token in output.token_ids]
        except RuntimeError as error:
            assert "said no" in str(error)
        engine.check()
    assert not engine.has_work and found == expected(model, parts)


def test_answers_to_one_prompt_share_their_images():
    engine = started(num_blocks=40)
    tokens, images = prompt_of(5, (1, SMALL), *[7] * 20)
    drawn = params(6, n=3, temperature=1.0, seed=1)
    requests = siblings(engine.request("a", tokens, drawn, images=images))
    assert all(request.images == images for request in requests)
    for request in requests:
        engine.add(request)
    assert engine.scheduler.pixels.num_bytes == len(images[0].pixels)
    before = engine.stats().images_encoded
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.stats().images_encoded - before == 1
    assert engine.scheduler.pixels.num_bytes == 0


def test_equal_pixels_are_held_once_and_their_size_is_limited(model):
    engine = started(image_queue_bytes=2 * 16 * PIXEL_BYTES)

    def request(name, seed):
        return request_of(engine, name, (5, (seed, SMALL), 7))

    first, second = request("a", 1), request("b", 1)
    assert first.images[0].pixels is not second.images[0].pixels
    engine.add(first)
    engine.add(second)
    assert first.images[0].pixels is second.images[0].pixels
    engine.add(request("c", 2))
    with pytest.raises(QueueFull, match="images of 3 requests take 768 bytes, the queue takes no"):
        engine.add(request("d", 3))
    engine.abort("c")
    engine.add(request("e", 3))
    engine.check()
    for name in "abe":
        engine.abort(name)
    assert engine.scheduler.pixels.num_bytes == 0 and not engine.scheduler.requests


def test_requests_with_different_salts_share_no_image(model):
    engine = started(enable_prefix_caching=False)

    def count(salt):
        before = engine.stats().images_encoded
        request = request_of(engine, f"of {salt}", (5, (1, SMALL), 7), salt=salt)
        assert run(engine, request)[request.id] == expected(model, (5, (1, SMALL), 7))
        return engine.stats().images_encoded - before

    assert [count(salt) for salt in (None, "a", "b", "a", "b", None)] == [1, 1, 1, 0, 0, 0]
    first, second, third = (
        request_of(engine, name, (5, (1, SMALL), 7), salt=name[0]) for name in ("a1", "b", "a2")
    )
    for request in (first, second, third):
        engine.add(request)
    assert first.images[0].pixels is third.images[0].pixels
    assert first.images[0].pixels is not second.images[0].pixels
    engine.check()


GOOD = image_at(1)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"start": 3}, "it has the tokens 3 to 6, expected some of 0 to 5: images are in order"),
        ({"start": -1}, "it has the tokens -1 to 2, expected some of 0 to 5"),
        (
            {"start": 0},
            "token 7 is among its tokens in the prompt, expected the model's image token (59, 60)",
        ),
        ({"length": 3}, "it has 3 tokens, expected 4 for 1 x 4 x 4 patches in squares of 2 x 2"),
        ({"pixels": b"123"}, "it has 3 bytes of pixels, expected 384: 16 patches of 6 values"),
        ({"grid": (1, 3, 4)}, "its grid is 1 x 3 x 4 patches, expected positive numbers"),
        ({"grid": (0, 4, 4)}, "its grid is 0 x 4 x 4 patches, expected positive numbers"),
    ],
)
def test_an_image_that_does_not_fit_its_prompt_is_refused(engine, changes, why):
    tokens = [7, *[IMAGE] * 4, 8]
    with pytest.raises(ValueError) as error:
        engine.add(engine.request("a", tokens, params(), images=[replace(GOOD, **changes)]))
    assert f"image 0 of 1: {why}" in str(error.value)
    assert not engine.has_work


def test_images_that_overlap_or_are_too_large_are_refused(engine):
    tokens = [IMAGE] * 30
    with pytest.raises(
        ValueError, match="image 1 of 2: it has the tokens 2 to 5, expected some of 4"
    ):
        engine.add(engine.request("a", tokens, images=[image_at(0), image_at(2)]))
    small = started(max_image_patches=16, image_cache_bytes=8 * TOKEN_BYTES)
    large = image_at(0, grid=LARGE)
    with pytest.raises(ValueError, match="64 patches, at most 16 are encoded in a step"):
        small.add(small.request("a", tokens, images=[large]))
    small = started(image_cache_bytes=8 * TOKEN_BYTES)
    with pytest.raises(ValueError, match="embeddings take 4096 bytes, the cache of embeddings has"):
        small.add(small.request("a", tokens, images=[large]))


def test_a_model_without_an_encoder_refuses_images():
    llm = LLM(device="cpu", options={"glue": "eager"}, num_blocks=20, progress=False)
    with pytest.raises(ValueError, match=r"the prompt has images, and .* has no vision encoder"):
        llm.generate([{"prompt_token_ids": [IMAGE] * 4, "images": [image_at(0)]}])


def test_llm_takes_token_ids_with_images(model):
    with compiled_once() as module:
        llm = LLM(module, options=OPTIONS, num_blocks=40, max_num_seqs=4, progress=False)
    parts = (5, (1, SMALL), 7)
    tokens, images = prompt_of(*parts)
    prompt = {"prompt_token_ids": tokens, "images": images}
    one, text = llm.generate([prompt, [5, 6, 7]], params())
    assert list(one.token_ids) == expected(model, parts)
    assert list(text.token_ids) == expected(model, (5, 6, 7))
    (same,) = llm.generate(prompt, params())
    assert same.token_ids == one.token_ids


def test_prompt_log_probabilities_and_pooling_read_images(model):
    engine = started(num_blocks=40)
    parts = (5, (1, LARGE), 7, 9)
    tokens, images = prompt_of(*parts)
    engine.add(engine.request("a", tokens, params(1, prompt_logprobs=1), images=images))
    scores = None
    while engine.has_work:
        for output in engine.step():
            scores = output.prompt_logprobs
    reference = whole_logits(model, tokens, images).log_softmax(-1)
    for position, score in enumerate(scores[1:]):
        value = float(reference[position, tokens[position + 1]])
        assert score.logprob == pytest.approx(value, abs=1e-4)

    found = {}
    for name, given in (("images", images), ("none", ())):
        engine.add(engine.request(name, tokens, pooling="last", images=given))
        while engine.has_work:
            for output in engine.step():
                found[name] = output.embedding
    hidden = tiny_vision()
    hidden.lm_head = torch.nn.Identity()
    assert list(found["images"]) == pytest.approx(
        whole_logits(hidden, tokens, images)[-1].tolist(), abs=1e-5
    )
    assert list(found["none"]) != pytest.approx(list(found["images"]), abs=1e-2)


def test_decode_steps_run_the_program_without_embeddings():
    engine = started()
    before = dict(engine.stats().steps)
    run(engine, request_of(engine, "a", (5, (1, SMALL), 7)))
    steps = engine.stats().steps
    of_images = "eager: on a CPU, with images"
    assert steps[of_images] - before.get(of_images, 0) == 1
    assert steps["eager: on a CPU"] - before.get("eager: on a CPU", 0) == 7
    fields = {given.field for _, given in engine.program._step_inputs}
    assert not fields & {"embeddings", "is_image"}
    assert {"embeddings", "is_image"} <= {
        given.field for _, given in engine.executor.programs.steps["images"]._step_inputs
    }


def test_a_batch_has_positions_of_three_axes_and_the_rows_of_images():
    batch = InputBatch(
        rows=10, sequences=4, columns=4, block_size=4, merge_size=2,
        takes=ModelInputs(embeddings=(3, torch.float32), mrope=True),
    )  # fmt: skip
    admission = Admission(SamplingParams(), 0, 9, frozenset(), images=((2, (1, 4, 4)),))
    image = ImageRows(b"x", 1, 0, 3)
    first = Chunk("a", 2, (7, 1, 1, 1), 1, ((0, (3, 4)),), admission=admission, images=(image,))
    text = Chunk("b", 0, (5, 6), 4, ((0, (1, 2)),))
    step = batch.step(batch.write(ScheduledStep((first, text)), num_rows=8))
    assert step.positions.is_contiguous() and step.positions.tolist() == [
        [1, 2, 2, 2, 4, 5, 0, 0],
        [1, 2, 2, 3, 4, 5, 0, 0],
        [1, 2, 3, 2, 4, 5, 0, 0],
    ]
    assert step.is_image.tolist() == [False, True, True, True, *[False] * 4]
    assert step.groups[0].slots.tolist() == [13, 14, 15, 16, 8, 9, -1, -1]
    assert step.embeddings.shape == (8, 3)
    # The rest of the image, and text after it, which goes on behind the longer side of the grid.
    rest = Chunk("a", 2, (1, 8, 9), 5, ((2, (9,)),), images=(ImageRows(b"x", 0, 3, 1),))
    addresses = step.embeddings.data_ptr(), step.is_image.data_ptr()
    step = batch.step(batch.write(ScheduledStep((rest,))))
    assert step.positions.tolist() == [[2, 4, 5], [3, 4, 5], [3, 4, 5]]
    assert step.is_image.tolist() == [True, False, False]
    assert (step.embeddings.data_ptr(), step.is_image.data_ptr()) == addresses
    # Another request in the slot has no images.
    other = Chunk("c", 2, (5,), 6, ((0, (1, 2)),), admission=admission._replace(images=()))
    assert batch.step(batch.write(ScheduledStep((other,)))).positions.tolist() == [[6]] * 3


def test_draft_steps_have_positions_of_their_own_for_rope_and_for_blocks():
    batch = InputBatch(
        rows=16,
        sequences=4,
        columns=4,
        block_size=4,
        drafts=3,
        takes=ModelInputs(mrope=True),
        merge_size=2,
    )
    admission = Admission(SamplingParams(), 0, 6, frozenset(), images=((0, (1, 4, 4)),))
    chunk = Chunk(
        "a", 1, (1, 1, 1, 1, 8, 9), 0, ((0, (5, 2)),), num_samples=1, num_output_rows=1,
        admission=admission,
    )  # fmt: skip
    shape = batch.write(ScheduledStep((chunk,)))
    batch.keep_samples(torch.tensor([4]))
    step, indices = batch.draft_step(shape, torch.zeros(6, 8))
    assert step.positions.tolist()[0] == [0, 0, 0, 0, 2, 3] and indices.tolist() == [5]
    step = batch.next_draft_step(shape, torch.tensor([4]), indices + 1, torch.zeros(1, 8))
    assert step.positions.tolist() == [[4]] * 3
    assert step.groups[0].slots.tolist() == [2 * 4 + 2] and step.seq_lens.tolist() == [7]


def test_an_encoder_that_returns_another_shape_is_an_error_with_both():
    model = tiny_vision()
    encoder = ImageEncoder(model.encode_images, ImageModel.of(model), torch.device("cpu"))
    image = image_at(0)
    pixels = ImagePixels(b"a", image.length + 1, image.grid, image.pixels)
    with pytest.raises(
        ValueError, match=r"the vision encoder returned \[4, 32\], expected \[5, 32\]"
    ):
        encoder.embeddings([pixels])


def test_on_a_cpu_each_step_has_memory_of_its_own():
    model = tiny_vision()
    encoder = ImageEncoder(model.encode_images, ImageModel.of(model), torch.device("cpu"))
    images = [image_at(0, seed) for seed in range(2)]
    found = [
        encoder._pixels([ImagePixels(b"", image.length, image.grid, image.pixels)])
        for image in images
    ]
    assert [pixels.numpy().tobytes() for pixels in found] == [image.pixels for image in images]


def test_rows_that_are_no_tokens_of_images_are_zero():
    model = tiny_vision()
    encoder = ImageEncoder(model.encode_images, ImageModel.of(model), torch.device("cpu"))
    image = image_at(0)
    rows = ImageRows(image.digest, 1, 1, 3)
    chunk = Chunk("a", 0, (7, IMAGE, IMAGE, IMAGE, 8), 0, (), images=(rows,))
    pixels = ImagePixels(image.digest, image.length, image.grid, image.pixels)
    step = ScheduledStep((chunk,), images=(pixels,))
    encoder.update(step)
    into = torch.full((6, 2 * D), torch.nan, dtype=torch.float64)
    encoder.place(step, [None], into)
    assert torch.equal(into[1:4], encoder.embeddings([pixels])[1:])
    assert not into[0].any() and not into[4].any() and into[5].isnan().all()


def test_the_largest_image_that_is_measured_has_as_many_patches_as_a_step():
    grids = []

    class Measured(TinyVision):
        def encode_images(self, pixels, grids_):
            grids.extend(grids_)
            return super().encode_images(pixels, grids_)

    model = tiny_vision(model=Measured)
    ImageEncoder(model.encode_images, ImageModel.of(model), torch.device("cpu")).encode_largest(
        1000
    )
    ((t, h, w),) = grids
    assert t == 1 and 900 < h * w <= 1000 and not h % 2 and not w % 2


def test_vocabulary_and_length_of_the_tiny_model_hold_the_prompts():
    assert IMAGE < VOCAB and all(
        len(prompt_of(*parts)[0]) + 8 < MAX_LEN for parts in PROMPTS.values()
    )


def test_an_encoder_that_is_updated_encodes_images_again_and_their_prefixes_are_forgotten():
    engine, parts = started(), (1, 2, 3, (7, LARGE), 5, 6)
    weight, before = engine.module.vision.weight, engine.module.vision.weight.clone()
    first = run(engine, request_of(engine, "a", parts))["a"]
    weight.mul_(-3)
    try:
        second = run(engine, request_of(engine, "b", parts))["b"]
        assert second == expected(engine.module, parts) != first
    finally:
        weight.copy_(before)
