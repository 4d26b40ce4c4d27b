"""A dozen of the architectures of bench/architectures.py: compiled as eager, and served as
transformers generates; and some of bench/counts.py: what is recognized in them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("architectures")  # each script runs once
BENCH = Path(__file__).parents[2] / "bench"
SERVED = {
    "gpt2": "learned positions",
    "opt": "learned positions behind an offset",
    "llama": "rotary positions",
    "gpt_neox": "a part of each head rotated, parallel attention and MLP",
    "gemma2": "capped scores, a window in every other layer",
    "mistral": "a window in every layer",
    "mixtral": "experts",
    "gpt_oss": "sinks and experts",
    "cohere": "LayerNorm without bias, scaled logits",
}
REFUSED = {
    "bloom": "refused: BloomForCausalLM does not support a custom attention",  # ALiBi
    "bert": "refused: BertLMHeadModel has no attention layer with a layer_idx and a head_dim",
    "marian": "refused: MarianForCausalLM computes something else in the runtime than by itself",
}


# Per change. Others serve most of the rest as well: tests/compiler/test_several_models.py,
# tests/compiler/test_accuracy.py, tests/parallel/test_stages.py, and tests/models/test_moe_models.py, which has the mixtures.
NOW = ("gpt2", "marian")


# Norms, adds before norms, rotations, gates and attentions of two layers: ours and transformers'.
COUNTS = {
    "gpt2": (5, 5, 0, 0, 2),
    "opt": (5, 5, 0, 0, 2),
    "gptj": (3, 2, 4, 0, 2),
    "cohere": (3, 2, 4, 2, 2),
    "olmo": (5, 4, 4, 2, 2),
    "gpt_oss": (5, 4, 4, 2, 2),
    "llama": (5, 4, 4, 2, 2),
    "mixtral": (5, 4, 4, 2, 2),
    "gemma3n_text": (24, 2, 4, 4, 2),
    "hunyuan_v1_dense": (9, 4, 4, 2, 2),
    "modernbert-decoder": (6, 4, 4, 2, 2),
}
COUNTED_NOW = ("cohere",)


# Each is made by one worker.
OF_ROWS, OF_COUNTS = map(pytest.mark.xdist_group, ("rows of architectures", "counts"))


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    return written(BENCH / "architectures.py", request, tmp_path_factory)


@pytest.fixture(scope="module")
def counts(request, tmp_path_factory):
    return written(BENCH / "counts.py", request, tmp_path_factory)


def written(script, request, tmp_path_factory):
    """What a script writes of those whose tests run and use this fixture, by name."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    names = ",".join(
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames
    )
    done = subprocess.run(
        [sys.executable, script, "--only", names, "--rows", file],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}


@pytest.mark.rotating
@OF_ROWS
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in NOW else pytest.mark.slow) for name in SERVED],
)
def test_it_is_compiled_as_eager_and_served_as_transformers_generates(rows, name):
    assert (rows[name]["compiled"], rows[name]["served"]) == ("equal", "equal")


@pytest.mark.rotating
@OF_ROWS
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in NOW else pytest.mark.slow) for name in REFUSED]
)
def test_it_is_compiled_as_eager_and_refused_with_a_reason(rows, name):
    assert rows[name]["compiled"] == "equal"
    assert rows[name]["served"].startswith(REFUSED[name])


@pytest.mark.rotating
@OF_COUNTS
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in COUNTED_NOW else pytest.mark.slow) for name in COUNTS],
)
def test_as_much_is_recognized_as_modules_run(counts, name):
    assert tuple(counts[name]["expected"].values()) == COUNTS[name]
    assert counts[name]["found"] == counts[name]["expected"], counts[name]["differences"]


@OF_COUNTS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"), [("granite_swa", "no other reader of add"), ("rwkv", "runs no softmax")]
)
def test_what_is_not_recognized_has_a_reason(counts, name, reason):
    assert counts[name]["found"] != counts[name]["expected"]
    assert any(reason in why for *_, why in counts[name]["differences"])
