"""The report of several ranks is that of the first, and says whether the others compiled the
same.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("zmq")
pytest.importorskip("msgspec")

from fake_group import without_groups

from atomc import demo
from atomc.report.records import KernelChoice, Site
from atomc.report.report_data import ReportData
from atomc.runtime.execution import compile_programs
from atomc.runtime.execution.reports import differences, what_runs
from atomc.runtime.llm import LLM

pytestmark = pytest.mark.xdist_group("ranks")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
}


def report(kernel: str = "triton", **given: Any) -> ReportData:
    return ReportData(
        "Model",
        sites=[Site("add_rms_norm", "layers.0", 0, "file.py:3", {"dtype": "bfloat16"})],
        kernels=[KernelChoice("linear", "layers.0.o_proj", "1 to 16", kernel)],
        num_ops={"linear": 4},
        **given,
    )


def test_times_notes_and_sources_are_not_compared() -> None:
    other = report(phases={"trace": 3.0}, notes=["1 thread"], cuda_graphs=[{"bytes": 7}])
    other.sites[0] = replace(other.sites[0], source="elsewhere.py:1")
    assert what_runs(report()) == what_runs(other)


@pytest.mark.parametrize(
    "other",
    [
        report(kernel="torch"),
        replace(report(), num_ops={"linear": 5}),
        replace(report(), sites=[]),
    ],
)
def test_kernels_rewrites_and_counts_are_compared(other: ReportData) -> None:
    assert what_runs(report()) != what_runs(other)


def test_each_rank_that_differs_has_a_sentence_with_what_it_has_instead() -> None:
    lines, other = what_runs(report()), what_runs(report(kernel="torch"))
    assert differences([0, 0, 0], [lines, other, lines]) == [
        "RANKS DIFFER: rank 1 has linear at layers.0.o_proj for 1 to 16 tokens by torch, where rank "
        "0 has linear at layers.0.o_proj for 1 to 16 tokens by triton; their results may not fit "
        "together: use the same version, options and GPUs for all ranks"
    ]
    [sentence] = differences([0, 0], [lines, lines[:-1]])
    assert "rank 1 has nothing, where rank 0 has 4 x linear" in sentence


def test_ranks_are_compared_with_the_first_one_of_their_stage() -> None:
    lines, other = what_runs(report()), what_runs(report(kernel="torch"))
    assert differences([0, 0, 1, 1], [lines, lines, other, other]) == []
    [sentence] = differences([0, 0, 1, 1], [lines, lines, other, lines])
    assert "rank 3 has" in sentence and "where rank 2 has" in sentence


@pytest.mark.rotating
def test_a_rank_that_compiles_something_else_is_in_the_log_and_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((Path(demo.PATH) / "config.json").read_text())
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **SIZES}))
    compiled = compile_programs.compile_model

    def otherwise(module: Any, options: Any, **given: Any) -> Any:
        return compiled(module, replace(options, passes={"silu_and_mul": False}), **given)

    monkeypatch.setattr(compile_programs, "compile_model", otherwise)  # of rank 0
    settings = {"max_model_len": 64, "max_num_seqs": 2, "num_blocks": 20, "progress": False}
    with (
        without_groups(),
        caplog.at_level(logging.ERROR, "atomc"),
        LLM(
            tmp_path, device="cpu", load_format="dummy", tp=2, options={"glue": "eager"}, **settings
        ) as llm,
    ):
        notes = [note for note in llm.program.report.notes if note.startswith("RANKS DIFFER")]
    [note] = notes
    assert note.startswith("RANKS DIFFER: rank 1 has ") and "silu_and_mul" in note
    assert note in caplog.text
