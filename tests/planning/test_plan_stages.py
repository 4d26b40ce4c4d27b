"""The plan of a pipeline: layers, bytes and time of each stage, and what stages send."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_plan_collectives import CONFIG

from atomc.cli import main
from atomc.parallel.process_group import PipelineStage
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import Pipeline, StageRow

ASKED = ["--platform", "h200", "--sequences", "4", "--context", "32"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.rotating
def test_each_stage_has_its_layers_bytes_and_time(folder: Path, capsys: Any) -> None:
    assert main(["explain", str(folder), *ASKED, "--pp", "2", "--json"]) == 0
    [report] = json.loads(capsys.readouterr().out)
    plan = report["plan"]
    pipeline = plan["pipeline"]
    first, last = pipeline["stages"]
    assert (first["first"], first["last"], first["also"]) == (0, 1, "embedding")
    assert (last["first"], last["last"], last["also"]) == (2, 2, "norm and head")
    # Four tokens of 64 values in bf16; the last stage sends no states.
    assert (first["sent"], last["sent"]) == (4 * 64 * 2, 0)
    assert first["sent_seconds"] == first["sent"] / 450e9

    whole = sum(x.nbytes for x in build_model(folder).module.parameters())
    assert 0 <= first["weights"] + last["weights"] - whole < 1000  # buffers of both
    assert first["per_token"] == 2 * last["per_token"]

    # The rest of the plan, and the report, are of the slowest stage: it has two of three layers.
    assert first["seconds"] > last["seconds"] and pipeline["planned"] == 0
    assert plan["layers"] == 2 and plan["memory"]["weights"] == first["weights"]
    assert plan["totals"]["seconds"]["step"] == first["seconds"]
    assert report["num_ops"]["paged_attention"] == 2


def test_the_time_of_a_step_is_that_of_all_stages_and_of_what_they_send() -> None:
    def row(index: int, seconds: float | None, sent: int, link: float | None) -> StageRow:
        return StageRow(index, index, index, "", 1, 1, seconds, sent, link)

    stages = [row(0, 2.0, 8, 0.5), row(1, 3.0, 0, None)]
    assert Pipeline(stages, 1, None, 16.0).seconds == 5.5
    assert Pipeline([row(0, 2.0, 8, None), stages[1]], 1, None, None).seconds is None
    assert Pipeline([row(0, None, 8, 0.5), stages[1]], 1, None, 16.0).seconds is None


def test_a_stage_of_several_devices_holds_a_part_of_its_layers(folder: Path) -> None:
    stage = PipelineStage(1, (0, 1))
    one, half = (build_model(folder, devices=n, stage=stage) for n in (1, 2))
    name = "model.layers.2.mlp.down_proj.weight"
    assert list(one.module.get_parameter(name).shape) == [64, 128]
    assert list(half.module.get_parameter(name).shape) == [64, 64]
    assert not any("layers.0" in name for name, _ in half.module.named_parameters())


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["--pp", "4"], "3 layers do not give 4 stages one each; at most 3 do"),
        (["--pp", "0"], "--pp 0: expected at least 1"),
        (["--pp", "2", "--measure"], "--measure times one device: leave out it or --pp 2"),
        (["--pp", "2", "--speculative", "mtp"], "--pp is not supported with --speculative mtp"),
    ],
)
def test_stages_that_cannot_be_planned_are_refused(
    folder: Path, capsys: Any, asked: list[str], why: str
) -> None:
    assert main(["explain", str(folder), *asked]) != 0
    assert why in capsys.readouterr().err
