"""bench/recording.py: what changed between two recordings is found, and sentences are told from the
rest.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import recording

REPORT = {
    "error": {},
    "graphs": [
        {
            "matches": {"add_rms_norm": 2},
            "notes": ["a note"],
            "kernels": [
                {
                    "op": "linear",
                    "chosen": "torch",
                    "refused": [["triton", "there is no GPU"], ["onednn", "no bf16"]],
                }
            ],
            "near": [
                {
                    "rewrite": "qk_norm_rope",
                    "kind": "dtype",
                    "expected": "float32",
                    "found": "bfloat16",
                }
            ],
        }
    ],
}
DUMP = '"""graph_0 after captured."""\n\ndef forward(x):\n    return x\n'
TOKENS = {"engine 0, mix 0": {"0-0": [1, 2, 3]}}


def written(folder: Path, report: Any = REPORT, dump: str = DUMP, tokens: Any = TOKENS) -> Path:
    where = folder / "demo" / "cpu"
    (where / "graph_0").mkdir(parents=True)
    (where / "graph_0" / "00_captured.py").write_text(dump)
    (where / "report.json").write_text(json.dumps(report))
    (where / "baseline.json").write_text(
        json.dumps({"graphs": [{"rewrites": {"add_rms_norm": 2}}]})
    )
    (folder / "demo" / "tokens.json").write_text(json.dumps(tokens))
    return folder


def changed(tmp_path: Path, **differs: Any) -> list[str]:
    """The kinds of what differs, in a recording that differs so from another."""
    found, files = recording.compare(written(tmp_path / "a"), written(tmp_path / "b", **differs))
    assert files == {"dump": 1, "report": 1, "counts": 1, "tokens": 1}
    return [difference.kind for difference in found]


def report_with(path: list[Any], value: Any) -> Any:
    report = copy.deepcopy(REPORT)
    at: Any = report["graphs"][0]  # type: ignore[index]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return report


def test_equal_recordings_have_no_difference(tmp_path: Path) -> None:
    assert changed(tmp_path) == []


def test_a_changed_dump_and_changed_tokens_are_found(tmp_path: Path) -> None:
    assert changed(
        tmp_path,
        dump=DUMP.replace("return x", "return x + 1"),
        tokens={"engine 0, mix 0": {"0-0": [1, 2, 4]}},
    ) == ["dump", "tokens"]


def test_a_dump_that_only_one_has_is_found(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b")
    (b / "demo" / "cpu" / "graph_0" / "01_lower.py").write_text(DUMP)
    found, _ = recording.compare(a, b)
    assert [(d.kind, d.first, d.second) for d in found] == [("dump", "absent", "there")]


@pytest.mark.parametrize(
    ("path", "value", "kinds"),
    [
        (["matches", "add_rms_norm"], 1, ["report"]),
        (["near", 0, "kind"], "shape", ["report"]),
        (["near", 0, "found"], "half precision", ["sentence"]),
        (["kernels", 0, "chosen"], "onednn", ["report"]),
        (
            ["kernels", 0, "refused"],
            [["triton", "no GPU here"], ["onednn", "no bf16"]],
            ["sentence"],
        ),
        (["kernels", 0, "refused"], [["triton", "there is no GPU"]], ["report"]),
        (["notes"], ["another note"], ["sentence"]),
        (["near", 0, "code"], "new", []),
    ],
)
def test_sentences_are_told_from_other_data(
    tmp_path: Path, path: list[Any], value: Any, kinds: list[str]
) -> None:
    assert changed(tmp_path, report=report_with(path, value)) == kinds


def test_a_folder_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="hold no recording"):
        recording.compare(tmp_path, tmp_path)
