"""Models that DTensor or transformers divided over processes are compiled as they are."""

import multiprocessing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import dtensor_ranks as ranks
from dtensor_ranks import BIASES, LAYERS, LLAMA, MOE
from tensor_parallel_ranks import Case, logits, whole

pytestmark = pytest.mark.xdist_group("dtensors")
RANKS = 2


class Runs:
    """What two processes wrote, which run a table of programs when the first of them is read."""

    def __init__(self, folder: Path):
        self.folder = folder

    @cache  # noqa: B019 - lives as long as the module's tests
    def of(self, *names: str) -> Path:
        folder = self.folder / names[0]
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=ranks.run, args=(rank, RANKS, folder, [*names]), daemon=True)
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=600)
            process.kill()  # if it still waits for the other one
        return folder

    def __call__(self, name: str) -> list[dict[str, Any]]:
        """The results of each rank."""
        found = []
        tables = (ranks.PER_CHANGE, ranks.ROTATING, ranks.SLOW)
        folder = self.of(*next(table for table in tables if name in table))
        for rank in range(RANKS):
            path = folder / f"{name}-{rank}.pt"
            assert path.exists(), "the process ended before this program, or still runs it"
            result = torch.load(path)
            assert not isinstance(result, str), result
            found.append(result)
        return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("dtensors"))


def error(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).abs().max() / expected.abs().max())


OF_BIASES, OF_EXPERTS = (
    Case("llama", "transformers", BIASES),
    Case("qwen3_moe", "transformers", MOE),
)
MODELS = {
    "transformers": LLAMA,
    "parallelize_module": LLAMA,
    "transformers, biases": OF_BIASES,
    "transformers, qwen3_moe": OF_EXPERTS,
    "transformers, qwen3_moe by expert": OF_EXPERTS,
    "parallelize_module, biases": OF_BIASES,
    "parallelize_module, DTensor of logits": LLAMA,
}


@pytest.mark.rotating
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ranks.SLOW)) for name in MODELS],
)
def test_a_divided_model_computes_what_it_does_eager_and_on_one_process(
    name: str, runs: Runs
) -> None:
    expected = logits(whole(MODELS[name]))
    first, second = runs(name)
    assert first["num_ops"] == second["num_ops"]
    for result in (first, second):
        assert result["treated"], result["why_not"]
        assert error(result["compiled"], result["eager"]) < 1e-4
        assert error(result["compiled"], expected) < 1e-4
        assert result["compiled"].argmax(-1).equal(expected.argmax(-1))
    assert first["compiled"].equal(second["compiled"])


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "gathers"),
    [
        ("transformers", 1),
        ("parallelize_module", 1),
        pytest.param("parallelize_module, biases", 1, marks=pytest.mark.slow),
        pytest.param("parallelize_module, DTensor of logits", 0, marks=pytest.mark.slow),
    ],
)
def test_each_sum_joins_the_norm_behind_it(name: str, gathers: int, runs: Runs) -> None:
    """2L + 1 sums: of attention and MLP of each layer, and of the embedding."""
    ops = runs(name)[0]["num_ops"]
    assert ops["allreduce_add_rms_norm"] == 2 * LAYERS
    # The plan of transformers 5.17 leaves the embedding whole: no sum is before the first norm.
    of_5_17 = name == "transformers" and ranks.transformers.__version__.startswith("5.17.")
    assert ops["rms_norm" if of_5_17 else "allreduce_rms_norm"] == 1
    assert not {"all_reduce", "add_rms_norm", *([] if of_5_17 else ["rms_norm"])} & ops.keys()
    assert ops.get("all_gather", 0) == gathers


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("name", "linears"),
    [
        # On a CPU transformers leaves its parts in the memory of the whole weights.
        ("transformers", 7 * LAYERS + 1),
        # q, k and v are one, gate and up, too.
        ("parallelize_module", 4 * LAYERS + 1),
    ],
)
def test_what_one_process_computes_alone_is_recognized(name: str, linears: int, runs: Runs) -> None:
    ops = runs(name)[0]["num_ops"]
    assert (ops["attention"], ops["silu_and_mul"], ops["rope"]) == (LAYERS, LAYERS, 2 * LAYERS)
    assert ops["linear"] == linears


@pytest.mark.slow
def test_a_bias_that_is_added_to_the_sum_stays_before_the_norm(runs: Runs) -> None:
    """transformers adds it on every process, behind the sum; DTensor divides it before."""
    ops = runs("transformers, biases")[0]["num_ops"]
    assert ops["all_reduce"] == ops["add_rms_norm"] == 2 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"),
    [("transformers, qwen3_moe", LAYERS), ("transformers, qwen3_moe by expert", 0)],
)
def test_experts_that_each_process_has_a_part_of_are_recognized(
    name: str, experts: int, runs: Runs
) -> None:
    ops = runs(name)[0]["num_ops"]
    assert ops["topk_route"] == LAYERS and ops.get("moe_experts", 0) == experts
    # Of attention and of the experts, whose sum is behind a view.
    assert ops["allreduce_add_rms_norm"] == 2 * LAYERS and "all_reduce" not in ops


@pytest.mark.slow
def test_a_text_that_grows_has_the_tokens_of_eager(runs: Runs) -> None:
    for result in runs("generated"):
        assert result["treated"], result["why_not"]
        assert result["compiled"].equal(result["eager"])
        assert result["num_ops"]["allreduce_add_rms_norm"] == 2 * LAYERS


BLOCKS = {
    "sum and norm": {"allreduce_add_rms_norm": 1, "rms_norm": 1, "linear": 2},
    # DTensor adds a part of the bias on each process.
    "biases": {"allreduce_add_rms_norm": 1, "rms_norm": 1, "linear": 1},
    "scaled sum": {"all_reduce": 1, "add_rms_norm": 1, "rms_norm": 1, "linear": 2},
    # What is exchanged is rows: a gather before the first layer, and a sum of which each process
    # keeps its rows.
    "sequence": {"add_rms_norm": 1, "rms_norm": 1, "linear": 2},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.rotating] * (name in ranks.ROTATING))
        for name in BLOCKS
    ],
)
def test_layouts_of_a_block(name: str, runs: Runs) -> None:
    for result in runs(name):
        assert result["treated"], result["why_not"]
        assert error(result["eager"], result["expected"]) < 1e-4
        assert error(result["compiled"], result["expected"]) < 1e-4
        assert result["num_ops"] == BLOCKS[name]


def test_a_graph_takes_and_returns_dtensors(runs: Runs) -> None:
    for result in runs("all of DTensors"):
        assert error(result["compiled"], result["eager"]) < 1e-4
        assert result["types"] == ("DTensor", "DTensor")
        eager, compiled = result["placements"]
        assert eager == compiled


def test_weights_that_are_written_later_are_read(runs: Runs) -> None:
    for result in runs("weights change"):
        assert error(result["compiled"], result["eager"]) < 1e-4
        assert error(result["before"], result["eager"]) > 1e-2


REFUSED = {
    "autocast": "autocast changes the dtypes of their operations",
    "dynamic DTensor": "returns a DTensor of a dynamic size",
}


@pytest.mark.rotating
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_said_with_what_to_do(name: str, runs: Runs) -> None:
    for result in runs(name):
        assert REFUSED[name] in result["error"]
        assert "load the model whole and call atomc.parallelize(model, tp=group)" in result["error"]
        assert not result["treated"]


@pytest.mark.slow
def test_what_is_refused_is_compiled_by_inductor(runs: Runs) -> None:
    for result in runs("falls back"):
        assert not result["treated"] and REFUSED["autocast"] in result["why_not"]
        assert error(result["compiled"].float(), result["eager"].float()) < 2e-2
