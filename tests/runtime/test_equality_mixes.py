"""Random mixes of requests on small checkpoints of models with state per sequence and of one that
reads images: chunks, shared prefixes, preemption, drafts and aborts change no token.
"""

import sys
from pathlib import Path

import pytest
import torch
from serving import COMPILED
from test_images import check_mix
from test_images_generate import prompt_of
from tiny_mtp import QWENS, tensors_of, tiny_model, write
from tiny_vl import theirs

from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.requests.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import equality

pytestmark = pytest.mark.xdist_group("equality_mixes")

# fp64, so that rounding decides about no token on any machine.
COMMON = {"dtype": "float64", "device": "cpu"}
OPTIONS = {"strict": True, "glue": "eager", "cache": True, "cache_dir": COMPILED}
LONGEST, BLOCK = 150, 16
ENGINES = [
    {"layout": "paged", "max_num_batched_tokens": 37, "num_blocks": 11, "state_snapshots": 4},
    {"layout": "paged", "max_num_batched_tokens": 256, "num_blocks": 11, "state_snapshots": 6,
     "scheduling_policy": "priority"},
    {"layout": "paged", "max_num_batched_tokens": 5, "num_blocks": 60, "state_snapshots": 6,
     "max_num_seqs": 2},
    {"layout": "paged", "max_num_batched_tokens": 90, "num_blocks": 12, "speculative_tokens": 3},
    {"layout": "paged", "max_num_batched_tokens": 64, "num_blocks": 40,
     "enable_prefix_caching": False},
]  # fmt: skip
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The folder of each kind's checkpoint."""
    folder = tmp_path_factory.mktemp("mixes")
    for kind, differs in QWENS.items():
        write(folder / kind, tensors_of(tiny_model(False, **differs)), **differs)
    theirs("qwen3_vl", torch.float64).save_pretrained(folder / "qwen3_vl")
    return {kind: str(folder / kind) for kind in (*QWENS, "qwen3_vl")}


def sharing(engine):
    """The engine with snapshots of prefixes of few tokens, too."""
    if engine.scheduler.snapshots is not None:
        engine.scheduler.snapshots.least = engine.scheduler.snapshots.interval = BLOCK
    return engine


@pytest.fixture(scope="module")
def alone(checkpoints):
    """Runs one request at a time on a model, by its kind."""
    known = {}

    def of(kind):
        if kind not in known:
            config = COMMON | {"model": checkpoints[kind], "enable_prefix_caching": False}
            options = OPTIONS | {"layout": "paged"}
            engine = Engine(EngineConfig(**config, num_blocks=200, options=options), progress=False)
            known[kind] = equality.Alone(engine)
        return known[kind]

    return of


# Two mixes per change, and fifty of each model.
MIXES = [
    (kind, number, mixes)
    for kind in ("qwen3_next", "qwen3_5")
    for number in range(len(ENGINES))
    for mixes in (2, 10)
    if mixes == 10 or (kind, number) == ("qwen3_5", 0)
]


@pytest.mark.parametrize(
    ("kind", "number", "mixes"),
    [pytest.param(*each, marks=() if each[-1] == 2 else SLOW) for each in MIXES],
)
def test_state_per_sequence_is_that_of_the_request_alone(checkpoints, alone, kind, number, mixes):
    setting, common = ENGINES[number], COMMON | {"model": checkpoints[kind]}
    engine = sharing(equality.engine_of(setting, common, OPTIONS, LONGEST))
    wrong = []
    for seed in range(number, mixes * len(ENGINES), len(ENGINES)):
        longest = engine.max_len - equality.LONGEST_ANSWER
        requests = equality.mix(seed, engine.vocab_size, longest, 6)
        got = equality.run_mix(engine, requests)
        wrong += equality.differences(alone(kind), requests, got, bound=0.0)
    assert wrong == []
    if mixes == 10:
        stats = engine.stats()
        few = setting["num_blocks"] < 20
        shares = setting.get("enable_prefix_caching", True)
        assert few <= (stats.preemptions > 0) and shares <= (stats.snapshot_hits > 0)


def request_of(engine, name, parts, count=8, **more):
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    prompt = prompt_of(parts)
    tokens, images = prompt["prompt_token_ids"], prompt["images"]
    return engine.request(name, tokens, params, images=images, **more)


class AloneWithImages:
    """Runs one request at a time, and remembers its tokens by the parts of its prompt."""

    def __init__(self, engine):
        self.engine, self.known = engine, {}

    def tokens(self, parts, count):
        if len(found := self.known.get(tuple(parts), [])) < count:
            self.engine.add(request_of(self.engine, "alone", parts, count))
            found = [
                token
                for _ in equality.until_done(self.engine)
                for output in self.engine.step()
                for token in output.token_ids
            ]
            self.known[tuple(parts)] = found
        return found[:count]


IMAGE_ENGINES = [
    {"max_num_batched_tokens": 16, "num_blocks": 9, "image_cache_bytes": 50_000},
    {"max_num_batched_tokens": 7, "num_blocks": 8, "max_image_patches": 64},
    {"max_num_batched_tokens": 33, "num_blocks": 7, "speculative_tokens": 2},
    {"max_num_batched_tokens": 24, "num_blocks": 40, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 11, "num_blocks": 9, "scheduling_policy": "priority"},
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(IMAGE_ENGINES)))
def test_images_of_a_mix_are_those_of_the_request_alone(checkpoints, alone, number):
    setting = COMMON | {"model": checkpoints["qwen3_vl"], "max_model_len": 96, "max_num_seqs": 4}
    config = EngineConfig(**setting | IMAGE_ENGINES[number], options=OPTIONS | {"layout": "paged"})
    engine = Engine(config, progress=False)
    lone = AloneWithImages(alone("qwen3_vl").engine)
    for seed in range(10):
        check_mix(engine, lone, len(IMAGE_ENGINES) * seed + number, request_of)
    stats = engine.stats()
    assert stats.images_encoded > 10 and stats.image_cache_hits
    if IMAGE_ENGINES[number]["num_blocks"] < 20:
        assert stats.prefix_hits and stats.preemptions
