"""What README, CONTRIBUTING and docs/ print is true: Python blocks run, commands parse, files and
rewrites exist.
"""

import argparse
import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from atomc import kernels, passes
from atomc.cli import _parser, main
from atomc.cli.parser import foreign_flags
from atomc.ops.op import REGISTRY
from atomc.options import Options

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").glob("*.md")),
]
LONG = {"transformers.md", "compile.md"}  # whole models, which other tests compile as well


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.rotating] * (page.name in LONG), id=page.name)
        for page in PAGES
        if blocks(page, "python")
    ],
)
def test_python_blocks_run_one_after_another_and_print_what_they_say(
    page, tmp_path, capsys, monkeypatch
):
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
        pytest.importorskip("tokenizers")
    for provider in kernels.PROVIDERS:
        kernels.load(provider)
    for op in REGISTRY.values():  # a page may register more, which must not stay
        monkeypatch.setitem(vars(op), "kernels", list(op.kernels))
    code = "\n".join(blocks(page, "python"))
    name = f"page_{page.stem.lower()}"
    (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "options.toml").write_text(
        '[options]\nglue = "eager"\n'
    )  # the pages show no option that only tests want
    monkeypatch.setenv("ATOMC_OPTIONS", str(tmp_path / "options.toml"))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    printed = capsys.readouterr().out
    for promised in re.findall(r"^print\(.*  # (.*?)(?: \.\.\.|\.\.\.\)|$)", code, re.MULTILINE):
        assert promised.rstrip(" ;,") in printed, printed


PROGRAMS = sorted((ROOT / "bench").glob("*.py"))
COMMANDS = [
    pytest.param(command, id=command.strip())
    for page in PAGES
    if page.name != "rooms.md"  # sentences of docstrings
    for command in re.findall(
        r"(?:^|`)(atomc (?:generate|explain|audit|diff|serve|bench|doctor|place-experts(?= ))[^`#\n]*)",
        page.read_text(),
        re.MULTILINE,
    )
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    _parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize(
    "command", re.findall(r"`atomc (explain --[^`]+)`", (ROOT / "README.md").read_text())
)
def test_commands_of_the_readme_run_on_the_bundled_model(command, capsys):
    assert main(shlex.split(command)) == 0, capsys.readouterr().err


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("path", "program"),
    sorted(
        {
            command
            for page in [*PAGES, *(ROOT / "tests").rglob("test_*.py")]
            for command in re.findall(
                r"PYTHONPATH=(\S+) \S*python (tests/\S+\.py)", page.read_text()
            )
        }
    ),
)
def test_a_program_among_the_tests_imports_all_from_the_path_that_the_page_says(path, program):
    """Run whole, it would write a page that other tests read."""
    code = f"import runpy; runpy.run_path({program!r}, run_name='imported')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_commands_in_the_docstring_of_a_bench_program_stand_on_one_line_each(program):
    text = ast.get_docstring(ast.parse(program.read_text()), clean=False) or ""
    command = re.compile(rf" +(PYTHONPATH=\. )?python bench/{program.name}( |$)")
    for paragraph in re.findall(r"(?:^ +.*\n)+", text, re.MULTILINE):
        lines = paragraph.splitlines()
        if f"bench/{program.name}" in paragraph:
            assert [line for line in lines if not command.match(line)] == []
        for line in filter(command.match, lines):
            shlex.split(line, comments=True)


def flags(parser):
    inner = [
        parsers
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for parsers in action.choices.values()
    ]
    return {flag for action in parser._actions for flag in action.option_strings}.union(
        *map(flags, inner)
    )


def test_flags_exist():
    written = "".join(
        path.read_text()
        for folder in ("atomc/cli", "bench")
        for path in (ROOT / folder).glob("*.py")
    )
    known = flags(_parser()) | set(re.findall(r"--[a-z-]+", written))
    known |= set(foreign_flags("atomc serve"))
    named = {flag for page in PAGES for flag in re.findall(r"`(--[a-z][a-z-]+)", page.read_text())}
    assert sorted(named - known) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    text = page.read_text()
    named = re.findall(
        r"`((?:atomc|passes|models|runtime|tests|bench)/[\w/-]+(?:\.py|\.txt|\.json|/))`", text
    )
    run = re.findall(r"python (bench/\w+\.py)", text)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    linked = [
        (page.parent / link).resolve().relative_to(ROOT)
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    ]
    assert [str(path) for path in (*named, *run, *linked) if not (ROOT / path).exists()] == []


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall("^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_section_reach_it(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", prose)
    missing = [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in anchors((page.parent / file) if file else page)
    ]
    assert missing == []


def test_every_page_is_in_the_index():
    text = (ROOT / "docs/index.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"({page.name})" not in text] == [
        "index.md"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_ascii(page):
    assert page.read_text().isascii()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_fits_the_columns_that_lint_allows(page):
    code = "".join(blocks(page, "(?:py|python)"))
    assert [line for line in code.splitlines() if len(line) > 100] == []


def test_every_rewrite_has_its_place():
    text = (ROOT / "docs/rewrites.md").read_text()
    titles = {
        name for line in re.findall("^### (.*)$", text, re.MULTILINE) for name in line.split(", ")
    }
    names = {p.name for p in passes.PIPELINE}
    assert {p.name for p in passes.PIPELINE if p.rewrites} <= titles <= names


def test_every_option_is_in_the_table():
    text = (ROOT / "docs/options.md").read_text()
    options = set(re.findall(r"^\| `(\w+)` \| ", text, re.MULTILINE))
    assert options == set(Options.__dataclass_fields__)


def test_flags_of_vllm_have_the_hints_that_the_command_gives():
    text = (ROOT / "docs/from-vllm.md").read_text()
    same, _, other = text.partition("## Other names")
    rows = [
        f"| `{flag}` | " + re.sub(r"(?<![\w`])(--[a-z][\w-]+)", r"`\1`", hint) + " |"
        for flag, hint in sorted(foreign_flags("atomc serve").items())
    ]
    assert re.findall(r"^\| `-.*$", other, re.MULTILINE) == rows
    ours = flags(_parser())
    assert [flag for flag in re.findall(r"`(--[a-z-]+)`[,.]", same) if flag not in ours] == []


def test_speeds_of_the_recipes_are_in_the_results_they_name():
    text = (ROOT / "docs/recipes.md").read_text()
    number = r"([\d.,]+)"
    row = rf"^\| [^|]* \| {number} \| {number} \| {number} \| {number} \| `([\w.-]+)` \|$"
    rows = re.findall(row, text, re.MULTILINE)
    assert len(rows) == 10
    for alone, per_s, together, together_per_s, file in rows:
        measured = (ROOT / "bench/results" / file).read_text().split()
        assert {f"tpot_ms={alone}", f"tpot_ms={together}"} <= set(measured)
        assert per_s == f"{1000 / float(alone):,.0f}"
        assert together_per_s == f"{64000 / float(together):,.0f}"


def test_messages_in_troubleshooting_are_in_the_code():
    sources = [
        path
        for folder in ("atomc", "passes", "models", "runtime")
        for path in (ROOT / folder).rglob("*.py")
    ]
    # A literal may go on in the next line.
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", "\n".join(path.read_text() for path in sources))
    rows = re.findall(
        r"^\| (?:\d+ \| )?(.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE
    )
    messages = [
        message for cell in rows for message in re.findall(r"`` (.*?) ``|`([^`]* [^`]*)`", cell)
    ]
    pieces = [
        piece.strip(" ;:,()%") for message in messages for piece in "".join(message).split("...")
    ]
    assert [piece for piece in pieces if len(piece) > 5 and piece not in code] == []
