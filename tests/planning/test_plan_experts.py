"""The plan of experts that are divided over devices: those of --tp with --ep, and those of --dp."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_experts import CONFIGS

from atomc.cli import main
from atomc.planning.device_model import build_model
from atomc.planning.plan_report import ExpertsRead, StepPlan, Workload
from atomc.planning.step_plan import plan_step
from atomc.platform import Platform

CONFIG = CONFIGS["qwen3_moe"]
T, E, K, H, I = 5, 4, 2, 128, 64  # noqa: E741
LAYERS, RANKS = CONFIG["num_hidden_layers"], 2
PRODUCTS = 2 * T * K * 3 * H * I  # of the tokens of one device


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def planned(folder: Path, **given: Any) -> StepPlan:
    return plan_step(build_model(folder, **given), Platform.named("h200"), Workload(T, T, 32))


def distinct(tokens: int) -> float:
    """Of the experts of a device."""
    return E * (1 - (1 - K / E) ** tokens) / RANKS


def test_devices_with_the_same_tokens_compute_their_share_of_the_experts(folder: Path) -> None:
    plan = planned(folder, devices=RANKS, ep=True)
    [row] = [row for row in plan.lines if row.op == "moe_experts"]
    assert row.flops == PRODUCTS / RANKS
    assert plan.mixture is not None and plan.communication is not None
    assert plan.mixture.read == [ExpertsRead(LAYERS, E // RANKS, K, pytest.approx(distinct(T)))]
    assert plan.communication.all_reduces == 2 * LAYERS + 1
    [note] = [note for note in plan.notes if "same tokens" in note]
    assert note.startswith(
        f"experts: all {RANKS} devices have the same tokens, of which none is sent"
    )


@pytest.mark.rotating
def test_devices_with_tokens_of_their_own_send_them_and_compute_those_of_all(folder: Path) -> None:
    plan = planned(folder, data_ranks=RANKS)
    rows = {row.op: row for row in plan.lines}
    assert rows["moe_experts"].flops == PRODUCTS
    assert plan.mixture is not None and plan.communication is not None
    assert plan.mixture.read == [
        ExpertsRead(LAYERS, E // RANKS, K, pytest.approx(distinct(RANKS * T)))
    ]
    sent = {row.kind: (row.calls, row.sent) for row in plan.communication.collectives}
    # To the other device: rows, ids in int32 and weights in fp32; then the results.
    to_experts, back = T * (H * 4 + K * (4 + 4)), T * H * 4
    assert sent == {"dispatch_tokens": (LAYERS, to_experts), "combine_tokens": (LAYERS, back)}
    assert plan.communication.sent == LAYERS * (to_experts + back)
    assert "in the time of these kernels" in plan.to_text()
    # All but the experts is whole.
    cuts = {row.parameter: row.how for row in plan.communication.cuts}
    assert {name for name, how in cuts.items() if how} == {
        f"model.layers.*.mlp.experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")
    }


def test_pairs_of_devices_with_the_same_tokens_send_them_to_those_of_other_pairs(
    folder: Path,
) -> None:
    plan = planned(folder, devices=2, ep=True, data_ranks=RANKS)
    [row] = [row for row in plan.lines if row.op == "moe_experts"]
    assert row.flops == PRODUCTS * RANKS / 4  # a quarter, of the tokens of both pairs
    assert plan.devices == 4 and plan.mixture is not None and plan.communication is not None
    assert [read.experts for read in plan.mixture.read] == [E // 4]
    assert plan.communication.all_reduces == 2 * LAYERS + 1
    kinds = {row.kind for row in plan.communication.collectives}
    assert {"dispatch_tokens", "combine_tokens", "all-reduce"} <= kinds
    assert not any("same tokens" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (["--ep"], "--ep divides the experts among devices: set --tp or --dp"),
        (["--dp", "2"], "--dp 2: a plan is of one engine"),
        (["--dp", "2", "--ep", "--pp", "2"], "--dp with --ep is not supported with --pp"),
        (["--dp", "2", "--ep", "--speculative", "mtp"], "--pp and --speculative mtp"),
        (["--dp", "3", "--ep"], "4 experts do not divide by 3; 1, 2 and 4 do"),
    ],
)
def test_experts_that_cannot_be_planned_are_refused(
    folder: Path, capsys: Any, asked: list[str], why: str
) -> None:
    assert main(["explain", str(folder), "--plan", *asked]) != 0
    assert why in capsys.readouterr().err
