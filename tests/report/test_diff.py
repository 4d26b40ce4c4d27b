"""Comparing dumps: names and numbers of nodes do not matter; ops, attributes, shapes, modules and
who reads what do.
"""

import re

import pytest
import torch
from test_report import Model, X

from atomc.cli import main
from atomc.compiler.explain import explain
from atomc.dumps.diff import differences

pytestmark = pytest.mark.xdist_group("diff")
EAGER = {"strict": True, "glue": "eager"}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Folders of dumps, each made once."""
    made = {}

    def folder(name, model=None, x=X, **options):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            model = (model or Model(3)).requires_grad_(False)
            dynamic = options.pop("dynamic", None)
            explain(
                model, x, options={**EAGER, "dump": str(made[name]), **options}, dynamic=dynamic
            )
        return made[name]

    return folder


def graph_of(dump):
    """Of a process that dumps several times into one place the graphs are numbered on."""
    (graph,) = dump.glob("graph_*")
    return graph


def edited(dump, folder, *changes):
    """A copy of a dump, with (stage, old, new) replaced."""
    for file in sorted(graph_of(dump).glob("*.py")):
        text = file.read_text()
        for stage, old, new in changes:
            if file.stem.endswith(stage):
                assert old in text
                text = text.replace(old, new, 1)
        (folder / file.name).write_text(text)
    return folder


def test_two_dumps_of_one_model_are_equal(dumps):
    assert differences(dumps("one"), dumps("other")) == []


def test_names_of_nodes_and_symbols_of_sizes_do_not_matter(dumps, tmp_path):
    first = dumps("dynamic", dynamic=True)
    for file in graph_of(first).glob("*.py"):
        text = re.sub(
            r"\b(mul|add|linear|rms_norm|mean)_?(\d*)\b(?=[,) ])", r"other_\1_\2", file.read_text()
        )
        text = re.sub(r"\bs(\d+)\b", r"u\1", text)
        assert text != file.read_text()
        (tmp_path / file.name).write_text(text)
    assert differences(graph_of(first), tmp_path) == []


def test_a_model_edit_is_shown_where_it_shows_first_and_once_for_all_layers(dumps):
    found = differences(dumps("one"), dumps("odd", Model(3, odd=(0, 1, 2))))
    assert found[0].startswith("rms_norm changed only the first")
    at = found.index("after captured:")
    assert (
        found[at + 1]
        == "  - aten.mean.dim(_, [-1], True)  float32[5, 1]  layers.*.norm (x3, layers 0-2)"
    )
    assert (
        "  + aten.mean.dim(_, [-2], True)  float32[1, 32]  layers.*.norm (x3, layers 0-2)" in found
    )
    assert found[-1].startswith("later stages also differ: ")


def test_of_one_layer_the_layer_is_named(dumps):
    found = differences(dumps("one"), dumps("odd in 1", Model(3, odd=(1,))))
    assert "  - aten.mean.dim(_, [-1], True)  float32[5, 1]  layers.1.norm" in found


def test_every_stage_is_shown_if_asked_for(dumps):
    found = differences(dumps("one"), dumps("odd in 1", Model(3, odd=(1,))), every_stage=True)
    assert {"after captured:", "after rms_norm:", "after add_rms_norm:", "after lower:"} <= set(
        found
    )


def test_a_pass_that_is_off_is_told(dumps):
    found = differences(dumps("one"), dumps("without", passes={"add_rms_norm": False}))
    assert "add_rms_norm changed only the first" in found and "after captured:" not in found
    assert any(re.match(r"  - \S*add_rms_norm", line) for line in found)


def test_who_reads_what_is_compared_where_all_lines_are_alike(dumps, tmp_path):
    text = next(graph_of(dumps("one")).glob("*_lower.py")).read_text()
    silu = re.search(r"silu_and_mul\((\w+), (\w+)\)", text).groups()
    swapped = edited(
        dumps("one"), tmp_path, ("lower", f"({silu[0]}, {silu[1]})", f"({silu[1]}, {silu[0]})")
    )
    found = differences(graph_of(dumps("one")), swapped)
    assert found[0] == "after lower:" and len(found) == 3
    assert re.search(r"silu_and_mul\(_, _\).*layers\.0: reads .* instead of ", found[1])


def test_an_input_is_told_by_what_the_program_calls_it(dumps, tmp_path):
    text = next(graph_of(dumps("one")).glob("*_captured.py")).read_text()
    line = next(line for line in text.splitlines() if line.endswith("layers.0.norm.weight"))
    changed = edited(
        dumps("one"), tmp_path, ("captured", line, line.replace("layers.0.norm", "layers.0.other"))
    )
    found = differences(graph_of(dumps("one")), changed)
    read = "reads input model.layers.0.other.weight instead of input model.layers.0.norm.weight"
    assert any(read in text for text in found)


def test_another_shape_and_another_number_of_graphs_are_told(dumps, tmp_path):
    assert any(
        "[7, 32]" in line
        for line in differences(dumps("one"), dumps("longer", x=torch.randn(7, 32)))
    )
    for number in (0, 1):
        (tmp_path / f"graph_{number}").mkdir()
        edited(dumps("one"), tmp_path / f"graph_{number}")
    assert differences(dumps("one"), tmp_path) == ["2 graphs instead of 1"]


def test_single_files_are_compared(dumps):
    captured = next(graph_of(dumps("one")).glob("*_captured.py"))
    lowered = next(graph_of(dumps("one")).glob("*_lower.py"))
    assert differences(captured, captured) == [] and len(differences(captured, lowered)) > 5


def test_many_differences_are_cut(dumps):
    found = differences(dumps("one"), dumps("deep", Model(9, odd=(1, 4, 7)), torch.randn(8, 32)))
    assert max(len(line) for line in found) < 300 and len(found) < 60


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = (", "is not a dump"),
        ("x = 3", "needs INPUTS and forward"),
        (None, "does not contain a dump: expected graph_0"),
    ],
)
def test_what_is_no_dump_is_refused(tmp_path, text, sentence, capsys):
    if text is not None:
        (tmp_path / "00_captured.py").write_text(text)
    assert main(["diff", str(tmp_path), str(tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_the_command_exits_with_1_if_dumps_differ(dumps, capsys):
    one, other, odd = (
        str(folder)
        for folder in (dumps("one"), dumps("other"), dumps("odd", Model(3, odd=(0, 1, 2))))
    )
    assert main(["diff", one, other]) == 0 and capsys.readouterr().out == "equal\n"
    assert main(["diff", one, odd]) == 1 and "after captured:" in capsys.readouterr().out
    assert (
        main(["diff", one, "nowhere"]) == 2 and "nowhere does not exist" in capsys.readouterr().err
    )
