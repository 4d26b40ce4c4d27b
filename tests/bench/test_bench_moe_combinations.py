"""`python bench/moe_combinations.py`: the table of pairs, and one pair checked and timed."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench_script import loaded

from atomc.kernels.moe import SCHEMES

PARTS = loaded("moe_parts")
EXPERTS, PREPARE, REFUSED = PARTS.EXPERTS, PARTS.PREPARE, PARTS.REFUSED
SMALL = [
    "--tokens",
    "3",
    "--experts-count",
    "4",
    "--choices",
    "2",
    "--hidden",
    "160",
    "--inner",
    "96",
]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return loaded("moe_combinations")


def pair(prepare: str, experts: str, *rest: str) -> list[str]:
    return [
        *SMALL,
        "--prepare",
        prepare,
        "--experts",
        experts,
        "--repeat",
        "1",
        "--device",
        "cpu",
        *rest,
    ]


def test_without_arguments_every_pair_is_legal_or_has_a_reason(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    said = {
        tuple(line.split()[:2]): line for line in lines if " legal " in line or "illegal" in line
    }
    here = {(prepare, experts) for prepare in PREPARE for experts in EXPERTS}
    refused = {
        (name, "any")[:: 1 if part.kind == "prepare" else -1] for name, part in REFUSED.items()
    }
    assert said.keys() == here | refused
    assert "legal for none, fp8, fp8_block, int8" in said["no_ep", "reference"]
    assert "grouped takes the standard format" in said["batched_all_to_all", "grouped"]
    assert (
        "legal for none; grouped supports the schemes none, not fp8"
        in said["all_to_all", "grouped"]
    )
    legal = sum(" legal " in line for line in said.values())
    pairs = (len(PREPARE) + 4) * (len(EXPERTS) + 6)
    assert lines[-1] == f"{legal} of {pairs} pairs are legal"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "names", [("all_to_all", "reference"), ("batched_reference", "naive_batched")]
)
def test_a_legal_pair_is_checked_and_timed(
    bench: ModuleType,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    names: tuple[str, str],
    scheme: str,
) -> None:
    bench.main(pair(*names, "--scheme", scheme, "--json", str(tmp_path / "found.json")))
    assert "rank 0 of 1: right, error " in capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["right"] and found["ms"] > 0 and found["error"] <= found["tolerance"]


def test_a_wrong_result_ends_with_an_exit_code(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    part = EXPERTS["naive_batched"].part
    apply = part.apply
    monkeypatch.setattr(
        part, "apply", lambda self, output, *rest: (apply(self, output, *rest), output.mul_(1.1))
    )
    with pytest.raises(SystemExit) as ended:
        bench.main(pair("batched_reference", "naive_batched"))
    assert ended.value.code == 1
    assert "WRONG, error 0.1 " in capsys.readouterr().out


def test_a_profile_names_the_steps_of_the_parts(bench: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    bench.main(pair("no_ep", "grouped", "--profile", str(file)))
    named = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert {"no_ep.prepare_no_receive", "grouped.apply", "no_ep.finalize"} <= named
    assert "aten::_grouped_mm" in named


@pytest.mark.parametrize(
    ("names", "more", "reason"),
    [
        (
            ("no_ep", "naive_batched"),
            (),
            "illegal: no_ep returns activations in the standard format",
        ),
        (("no_ep", "cutlass_fp8"), (), "illegal: cutlass_fp8 is not adapted: "),
        (("no_ep", "grouped"), ("--scheme", "int8"), "illegal: grouped supports the schemes none"),
        (
            ("none", "grouped"),
            (),
            "there is no prepare part 'none': choose from no_ep, all_to_all, ",
        ),
        (
            ("batched_reference", "naive_batched"),
            ("--chunk-rows", "2"),
            "chunk_rows=2 must be None",
        ),
        (("no_ep", "grouped"), ("--activation", "relu"), "activation of experts 'relu' is not one"),
    ],
)
def test_a_pair_that_cannot_run_ends_with_the_reason(
    bench: ModuleType, names: tuple[str, str], more: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(pair(*names, *more))
    assert reason in str(ended.value.code)


def test_half_of_a_pair_is_an_error(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--prepare", "no_ep"])
    assert "--prepare and --experts name a pair" in capsys.readouterr().err


def test_weights_of_squares_have_a_scale_for_each(bench: ModuleType) -> None:
    weight = torch.randn(2, 160, 200)
    codes, scale = bench.quantized(weight, "fp8_block")
    assert scale is not None and scale.shape == (2, 2, 2)
    wide = scale.repeat_interleave(128, 1)[:, :160].repeat_interleave(128, 2)[:, :, :200]
    assert ((codes.float() * wide - weight).abs() <= weight.abs() / 16 + 1e-2).all()
