"""Draft layers on several ranks: their drafts and the text are those of one process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from embeddings import embed
from fake_group import without_groups
from tiny_mtp import QWENS, tensors_of, tiny_model, write

from atomc.runtime.llm import LLM, SamplingParams

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module", autouse=True)
def no_groups_of_other_tests() -> Iterator[None]:
    with without_groups():
        yield


# No prefixes are shared: the draft layers' state of a shared row may be that of another request.
SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "num_blocks": 60,
    "enable_prefix_caching": False,
    "options": {"strict": True, "glue": "eager"},
    "progress": False,
}
DRAFTS = {"speculative": "mtp", "speculative_tokens": 3}
PROMPTS = [[1 + (7 * i + 3 * j) % 90 for j in range(2 + 9 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.5 * (i % 2), seed=i)
    for i in range(len(PROMPTS))
]
TWO_LAYERS = {"num_nextn_predict_layers": 2}
DENSE = TWO_LAYERS | {"first_k_dense_replace": 3}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stages": (DENSE, {"pp": 2}),
    "stages, chunks": (DENSE, {"pp": 2, "max_num_batched_tokens": 48}),
    "stages of two ranks, a tied embedding": (
        DENSE | {"tie_word_embeddings": True},
        {"pp": 2, "tp": 2},
    ),
    "stages, the form of Qwen": (
        QWENS["qwen3_5"]
        | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        {"pp": 2},
    ),
    "experts of two ranks": (TWO_LAYERS, {"tp": 2, "ep": True}),
    "own requests": (TWO_LAYERS, {"dp": 2, "ep": True}),
    "own requests of two ranks each": (TWO_LAYERS, {"dp": 2, "ep": True, "tp": 2}),
}
PER_CHANGE = ("stages, chunks", "own requests")


def checkpoint(path: Path, differs: dict[str, Any]) -> Path:
    layers = differs.get("num_nextn_predict_layers") or 1
    return write(path, tensors_of(tiny_model(layers, **differs)), **differs)


@pytest.mark.parametrize(
    ("differs", "ranks"),
    [
        pytest.param(*row, id=name, marks=() if name in PER_CHANGE else pytest.mark.slow)
        for name, row in ROWS.items()
    ],
)
def test_drafts_and_text_of_several_ranks_are_those_of_one(
    differs: dict[str, Any], ranks: dict[str, Any], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path / "model", differs)
    alone = {name: x for name, x in ranks.items() if name == "max_num_batched_tokens"}

    def text(**settings: Any) -> tuple[list[tuple[int, ...]], tuple[int, int, int]]:
        with LLM(path, **SETTINGS, **settings) as llm:
            found = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
            stats = llm.engine.stats()
            return found, (stats.drafts, stats.drafted, stats.accepted)

    expected, _ = text(**alone)
    of_one, counts = text(**alone, **DRAFTS)
    of_ranks, counts_of_ranks = text(**ranks, **DRAFTS)
    assert of_ranks == of_one == expected
    assert counts_of_ranks == counts and counts[2]
    assert counts[2] < counts[1] or differs.get("tie_word_embeddings")


@pytest.mark.rotating
def test_ranks_that_embed_take_part_in_the_draft_steps_of_others(tmp_path: Path) -> None:
    """The longer prompt is embedded on a rank while the other one drafts."""
    path = checkpoint(tmp_path / "model", TWO_LAYERS)
    settings = SETTINGS | DRAFTS | {"max_num_batched_tokens": 8}

    def results(**ranks: Any) -> tuple[list[int], list[list[float]]]:
        with LLM(path, **settings, **ranks) as llm:
            engine = llm.engine
            engine.prepare_pooling()
            params = SamplingParams(max_tokens=14, ignore_eos=True)
            engine.add(engine.request("a", PROMPTS[0], params))
            embeddings = embed(engine, PROMPTS[5:])
            tokens = [token for output in iterated(engine) for token in output.token_ids]
            return tokens, embeddings

    (tokens, [states]), (of_ranks, [states_of_ranks]) = results(), results(dp=2, ep=True)
    assert of_ranks == tokens and len(tokens) == 14
    assert states_of_ranks == pytest.approx(states)


def iterated(engine: Any) -> Iterator[Any]:
    while engine.has_work:
        yield from engine.step()
