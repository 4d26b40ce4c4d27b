"""What the scheduler decides about images: which a step encodes, which embeddings stay, and that a
worker that follows the steps has what it reads.
"""

import random

import pytest
from step_results import step_results
from tiny_vision import IMAGE, MERGE, W, image_at

from atomc.runtime.requests.request import Request, overlapping
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.image_cache import ImageCache
from atomc.runtime.scheduling.image_limits import ImageLimits
from atomc.runtime.scheduling.pixel_store import PixelStore
from atomc.runtime.scheduling.prefix_cache import extend_keys
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.step import ImageRows, ScheduledStep
from atomc.runtime.server.engines.ipc import Submit

msgspec = pytest.importorskip("msgspec")
encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(ScheduledStep).decode
GRIDS = [(1, 2, 2), (1, 4, 4), (1, 4, 8), (1, 8, 8)]  # of 1, 4, 8 and 16 tokens


def limits(cache_tokens=16, max_patches=64):
    return ImageLimits(frozenset({IMAGE}), MERGE, W, 10, 10 * cache_tokens, max_patches)


def scheduler(num_blocks=40, max_num_batched_tokens=16, **of_images):
    return Scheduler(
        BlockPool(num_blocks, 4),
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=100,
        images=limits(**of_images),
    )


def request(name, *parts, count=4):
    """parts: tokens, and (seed, grid) of images."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
        else:
            images.append(image_at(len(tokens), part[0], part[1]))
            tokens += [IMAGE] * images[-1].length
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    return Request(name, tokens, params, images=tuple(images))


def finish(s, step, token=1):
    s.finish_step(step, *step_results(step, token))
    s.check()


def test_images_of_a_range_are_those_with_a_token_in_it():
    images = [image_at(2), image_at(6), image_at(12)]

    def starts(start, end):
        return [image.start for image in overlapping(images, start, end)]

    assert starts(0, 2) == [] and starts(0, 3) == [2] and starts(5, 6) == [2]
    assert starts(5, 7) == [2, 6] and starts(6, 10) == [6] and starts(10, 12) == []
    assert starts(0, 99) == [2, 6, 12] and starts(16, 99) == []


def test_chunks_say_which_rows_are_which_part_of_an_image():
    s = scheduler(max_num_batched_tokens=5)
    s.add(request("a", 7, 8, (1, GRIDS[1]), (2, GRIDS[1]), 9))
    first, second = (image.digest for image in s.requests["a"].images)
    found = []
    for _ in range(3):
        step = s.next_step()
        found.append((step.chunks[0].images, [image.digest for image in step.images]))
        finish(s, step)
    assert found == [
        ((ImageRows(first, 2, 0, 3),), [first]),
        ((ImageRows(first, 0, 3, 1), ImageRows(second, 1, 0, 4)), [second]),
        ((), []),
    ]
    assert s.next_step().chunks[0].images == ()


def test_a_chunk_ends_before_an_image_that_the_step_cannot_encode():
    s = scheduler(max_num_batched_tokens=64, max_patches=16)
    s.add(request("a", 7, (1, GRIDS[1]), 8, (2, GRIDS[1]), 9))
    s.add(request("b", (3, GRIDS[1]), 5))
    s.add(request("c", 5, 6))
    steps = []
    for _ in range(3):
        step = s.next_step()
        steps.append([(chunk.request_id, chunk.start, chunk.num_tokens) for chunk in step.chunks])
        finish(s, step)
    assert steps == [
        [("a", 0, 6), ("c", 0, 2)],
        [("a", 6, 5), ("c", 2, 1)],
        [("a", 11, 1), ("c", 3, 1), ("b", 0, 5)],
    ]


def test_a_request_whose_first_image_waits_is_passed_by_text_and_by_no_other_image():
    s = scheduler(max_num_batched_tokens=64, max_patches=16)
    s.add(request("a", 7, (1, GRIDS[1])))
    s.add(request("b", (2, GRIDS[1]), 5))
    s.add(request("c", 5, 6, (3, GRIDS[1])))
    s.add(request("d", 5, 6))
    admitted = []
    for _ in range(3):
        step = s.next_step()
        admitted.append([chunk.request_id for chunk in step.chunks if chunk.admission])
        assert all(request.computed for request in s.running)
        finish(s, step)
    assert admitted == [["a", "d"], ["b", "c"], []]


def test_an_image_that_is_computed_in_part_stays_until_its_last_token():
    s = scheduler(max_num_batched_tokens=10, cache_tokens=16, max_patches=128)
    s.add(request("a", (1, GRIDS[3]), 5))
    s.add(request("b", (2, GRIDS[1]), 5))
    step = s.next_step()
    assert [chunk.request_id for chunk in step.chunks] == ["a"] and len(step.images) == 1
    finish(s, step)
    # The cache has no room beside it: the other image waits for the last token of this one, and in
    # that step it is still read.
    step = s.next_step()
    assert [chunk.request_id for chunk in step.chunks] == ["a"]
    assert not step.dropped and not step.images
    finish(s, step)
    step = s.next_step()
    assert [chunk.request_id for chunk in step.chunks] == ["a", "b"]
    assert len(step.dropped) == len(step.images) == 1


def test_a_step_that_is_undone_encodes_again():
    s = scheduler()
    s.add(request("a", 5, (1, GRIDS[1]), 6))
    step = s.next_step()
    s.undo_step(step)
    s.check()
    again = s.next_step()
    assert again.images == step.images and again.dropped == (step.images[0].digest,)


def test_images_of_a_step_that_is_not_scheduled_are_not_held():
    cache = ImageCache(limits())
    cache.begin([])
    assert cache.take(image_at(0, 1)) and cache.held
    cache.begin([])
    assert not cache.held and cache.end() == ((), (image_at(0, 1).digest,))
    cache.check()


def test_room_is_made_only_if_it_suffices():
    cache = ImageCache(limits(cache_tokens=16, max_patches=1000))
    small = [image_at(0, seed) for seed in range(4)]
    cache.begin([])
    assert all(cache.take(image) for image in small)
    assert not cache.take(image_at(0, 9))  # all are of this step
    cache.end()
    cache.begin([small[0].digest])
    assert not cache.take(image_at(0, 9, GRIDS[3])) and len(cache.held) == 4
    assert cache.take(image_at(0, 9, GRIDS[2]))
    assert cache.end()[1] == tuple(sorted(image.digest for image in small[1:3]))
    cache.check()


def test_pixels_are_counted_once_for_equal_images():
    store = PixelStore(1000)
    image, other = image_at(0, 1), image_at(4, 2)
    store.add([image])
    (twin,) = store.add([image_at(0, 1)])
    assert twin.pixels is image.pixels and store.num_bytes == len(image.pixels) == 384
    assert store.has_room([other, other]) and not store.has_room([other, image_at(8, 3)])
    store.check([image, twin])
    with pytest.raises(AssertionError, match="lost or kept"):
        store.check([image])
    store.remove([image])
    assert store.num_bytes == 384
    store.remove([twin])
    assert not store.num_bytes and PixelStore(1).has_room([image])


def test_limits_and_a_submitted_image_are_the_same_after_a_journey():
    submit = Submit("a", [IMAGE] * 4, SamplingParams(), images=(image_at(0, 1),))
    assert msgspec.msgpack.decode(encode(submit), type=Submit) == submit
    assert msgspec.msgpack.decode(encode(limits()), type=ImageLimits) == limits()


def keys_of(images, tokens=(IMAGE,) * 12, block_size=4):
    request = Request("a", list(tokens), images=tuple(images))
    extend_keys(request, block_size)
    return request.keys


def test_block_keys_say_which_image_is_where():
    none, one = keys_of([]), keys_of([image_at(4, 1)])
    assert none[0] == one[0] and none[1] != one[1] and none[2] != one[2]
    assert keys_of([image_at(4, 1)]) == one
    other = keys_of([image_at(4, 2)])
    assert other[0] == one[0] and other[1] != one[1] and other[2] != one[2]
    moved = keys_of([image_at(5, 1)])
    assert moved[1] != one[1]
    # An image that ends in a block, and one that begins in it.
    pair, first = keys_of([image_at(2, 1), image_at(6, 2)]), keys_of([image_at(2, 1)])
    assert pair[0] == first[0] and pair[1] != first[1]
    # Keys that are extended later are those of all at once.
    keys = keys_of([image_at(6, 1)], [IMAGE] * 5)
    request = Request("a", [IMAGE] * 12, images=(image_at(6, 1),), keys=keys)
    extend_keys(request, 4)
    assert request.keys == keys_of([image_at(6, 1)])


class FollowingWorker:
    """Holds what the steps say, and asserts that it has what they read."""

    def __init__(self, cache_tokens, max_patches):
        self.cache_tokens, self.max_patches = cache_tokens, max_patches
        self.held = {}

    def launch(self, step):
        assert decode(encode(step)) == step, "a step is no plain data"
        for digest in step.dropped:
            self.held.pop(digest, None)
        for image in step.images:
            self.held[image.digest] = image.length
        assert sum(self.held.values()) <= self.cache_tokens
        assert sum(image.num_patches for image in step.images) <= self.max_patches
        for chunk in step.chunks:
            row = 0
            for image in chunk.images:
                assert image.digest in self.held, "embeddings that are read are not held"
                assert image.row >= row and image.length > 0
                assert image.first + image.length <= self.held[image.digest]
                row = image.row + image.length
            assert row <= chunk.num_tokens
            assert sum(image.length for image in chunk.images) == chunk.tokens.count(IMAGE)


def test_a_worker_that_follows_the_steps_has_what_it_reads():
    counters = [run_mix(random.Random(seed)) for seed in range(20)]
    assert sum(each.preemptions for each in counters) > 10
    assert sum(each.image_cache_hits for each in counters) > 50


def run_mix(rng):
    """Steps of random requests, of which some do not run, and some run and are repeated."""
    sizes = {"cache_tokens": rng.choice([16, 20, 40]), "max_patches": rng.choice([64, 100])}
    rows = rng.choice([1, 5, 16])
    s = scheduler(rng.choice([24, 26, 60]), rows, **sizes)
    worker = FollowingWorker(**sizes)
    in_flight, added, idle = [], 0, 0
    while added < 25 or s.requests:
        if added < 25 and rng.random() < 0.4:
            parts = [rng.randrange(1, 9) for _ in range(rng.randint(0, 3))]
            for _ in range(rng.randint(0, 3)):
                parts.append((rng.randrange(4), rng.choice(GRIDS)))
                parts += [rng.randrange(1, 9) for _ in range(rng.randint(0, 2))]
            s.add(request(str(added), *parts, 3, count=rng.randint(1, 25)))
            added += 1
        step = s.next_step()
        idle = 0 if step is not None or in_flight or not s.requests else idle + 1
        assert idle < 2, "nothing is scheduled"
        if step is not None:
            ran = rng.random() < 0.8
            if ran:
                worker.launch(step)
            if ran and rng.random() < 0.9:
                in_flight.append(step)
            else:
                s.undo_step(step)
        s.check()
        if s.requests and rng.random() < 0.03:
            name = rng.choice(list(s.requests))
            if rng.random() < 0.5:
                s.evict(name)
            s.abort(name)
            s.check()
        if in_flight and (len(in_flight) > 1 or rng.random() < 0.5 or step is None):
            finish(s, in_flight.pop(0), token=rng.randrange(1, 9))
    assert not s.pixels.num_bytes
    return s.counters
