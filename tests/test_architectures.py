"""A dozen of the architectures of bench/architectures.py: compiled as eager, and served as
transformers generates.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

pytestmark = pytest.mark.xdist_group("architectures")  # the script runs once
SCRIPT = Path(__file__).parents[1] / "bench" / "architectures.py"
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


# What others serve as well: tests/test_several_models.py, tests/test_accuracy.py.
ELSEWHERE = ("llama", "mistral")


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory):
    """What the script writes of those whose tests run, by name."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    names = ",".join(
        item.callspec.params["name"] for item in request.session.items if item.path == request.path
    )
    done = subprocess.run(
        [sys.executable, SCRIPT, "--only", names, "--rows", file],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ELSEWHERE else ()) for name in SERVED],
)
def test_it_is_compiled_as_eager_and_served_as_transformers_generates(rows, name):
    assert (rows[name]["compiled"], rows[name]["served"]) == ("equal", "equal")


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_compiled_as_eager_and_refused_with_a_reason(rows, name):
    assert rows[name]["compiled"] == "equal"
    assert rows[name]["served"].startswith(REFUSED[name])
