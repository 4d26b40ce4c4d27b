"""The bugs by hand and the table of generated ones (tests/repo/mutations) fit the tree: `make
test-mutations` can apply each of them.
"""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from mutations import ROOT, Bug, all_bugs, refusals, run
from mutations.generate import mutants, sample
from mutations.targets import FLOORS, SURVIVORS, Target, targets

BUGS = all_bugs()
TARGETS = targets()


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_changes_one_place_and_names_tests_that_are_there(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, bug.old
    changed = bug.applied_to(text)
    assert changed != text
    compile(changed, bug.file, "exec")
    assert has_its_files(bug)


def has_its_files(row: Bug | Target) -> bool:
    files = [name.partition("::")[0] for name in files_of(row.tests)]
    return bool(files) and all((ROOT / file).is_file() for file in files)


def test_each_row_of_the_table_has_its_functions_its_tests_and_mutants() -> None:
    for target in TARGETS:
        text = (ROOT / target.file).read_text()
        assert sample(mutants(target.file, text, target.functions), text, 1, seed=0), target
        assert has_its_files(target), target
    assert [str(target) for target, count in Counter(TARGETS).items() if count > 1] == []
    files = {target.file for target in TARGETS}
    assert FLOORS.keys() <= files
    assert {label.partition(":")[0] for label in SURVIVORS} <= files


def files_of(tests: str) -> list[str]:
    """The files and tests among arguments of pytest."""
    return [word for word in shlex.split(tests) if ".py" in word]


@cache
def wanted(tests: str) -> tuple[list[str], Expression | None]:
    """What arguments of pytest ask for: files and tests, and words of names."""
    words = shlex.split(tests)
    expression = Expression.compile(words[words.index("-k") + 1]) if "-k" in words else None
    return files_of(tests), expression


def selects(tests: str, item: pytest.Item) -> bool:
    """Whether these arguments of pytest select a test, slow or not."""
    files, words = wanted(tests)
    return any(item.nodeid.partition("[")[0].startswith(name) for name in files) and (
        words is None or words.evaluate(KeywordMatcher.from_item(item))
    )


def not_noticed(rows: Sequence[Bug | Target], items: list[pytest.Item]) -> list[str]:
    """The tests of the bugs of which none is among these, but for bugs that say -m ''."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("slow", "rotating"))):
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    return [
        tests
        for tests in sorted({row.tests for row in rows if "-m" not in shlex.split(row.tests)})
        if not any(
            selects(tests, item)
            for name in files_of(tests)
            for item in by_file.get(name.partition("::")[0], [])
        )
    ]


def test_make_test_runs_a_test_that_has_to_notice_a_bug(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    rows: list[Bug | Target] = [*BUGS, *TARGETS]
    files = {name.partition("::")[0] for row in rows for name in files_of(row.tests)}
    if request.config.option.keyword or not files <= {item.location[0] for item in items}:
        pytest.skip("a part of the tests is selected")
    assert not_noticed(rows, items) == []


def test_a_bug_without_such_a_test_is_found(request: pytest.FixtureRequest) -> None:
    file = Path(__file__).relative_to(ROOT)
    noticed, overlooked, other = (
        Bug("", "", "", f"{file}{rest}") for rest in (" -k is_found", " -k is_lost", "::test_other")
    )
    bugs, items = [noticed, overlooked, other], [request.node]
    assert not_noticed(bugs, items) == [overlooked.tests, other.tests]
    request.node.add_marker(pytest.mark.slow)
    assert not_noticed(bugs, items) == [noticed.tests, overlooked.tests, other.tests]


def test_no_bug_is_listed_twice() -> None:
    assert [bug for bug, count in Counter(BUGS).items() if count > 1] == []


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return a < b", ["return a >= b"]),
        ("return a is not b", ["return a is b"]),
        ("return a + b", ["return a - b"]),
        ("return a and b or c", ["return a or b or c", "return a and b and c"]),
        ("return not a", ["return (a)"]),
        ("return x if a else y", ["return (y) if a else (x)"]),
        ("return f(a, b)", ["return f(b, a)"]),
        ("return f(a, b, c=d)", ["return f(b, a, c=d)", "return f(a, b)"]),
        ("return f(a, *b)", []),
        ("return min(a)", ["return max(a)"]),
        ("return 3", ["return 4"]),
        ("return 0.25", ["return 0.5"]),
        ("return True", ["return False"]),
        ("if a: return b", ["if not (a): return b", "if False: return b"]),
        ("if a == b: return c", ["if a != b: return c", "if False: return c"]),
        ("f(a)", ["pass"]),
        ("a.b = c", ["pass"]),
        ("a += b", ["pass", "a -= b"]),
        ("a = b", []),
        ("raise ValueError('of 3', a < b)", []),
        ("log.info('%s', a + b)", []),
        ("assert a < b", []),
        ("return zip(*a, strict=True)", []),
        ("'''From 1 to 3.'''", []),
        ("return f'{a + 1}'", []),
    ],
)
def test_mutants_of_a_line(line: str, changed: list[str]) -> None:
    text = f"@decorated(1)\ndef function(a: Literal[1]) -> Literal[2]:\n    {line}\n"
    applied = [mutant.applied_to(text) for mutant in mutants("file.py", text)]
    assert sorted(applied) == sorted(text.replace(line, new) for new in changed)


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        (
            "if a or b: return Refusal(1)",
            ["if None or b: return Refusal(1)", "if a or None: return Refusal(1)"],
        ),
        ("if a and b: return Refusal(1)", ["if None: return Refusal(1)"]),
        (
            "if not (a and b): return Refusal(1)",
            ["if not (True and b): return Refusal(1)", "if not (a and True): return Refusal(1)"],
        ),
        ("if r := (f(a) or g(b)): return r", []),
        (
            "if reason := (f(a) or g(b)): return reason",
            [
                "if reason := (None or g(b)): return reason",
                "if reason := (f(a) or None): return reason",
            ],
        ),
        ("if a <= b <= c: return None", ["if (b <= c): return None", "if (a <= b): return None"]),
        (
            "if (a, b) == (c, d): return None",
            ["if (b == d): return None", "if (a == c): return None"],
        ),
        ("if a: return None", []),
        ("if a: return f(b)", ["if a: return None"]),
        ("return Refusal(1)", ["pass"]),
        ("return Refusal(1) if a else None", ["return Refusal(1) if None else None"]),
        ("return None if a else Refusal(1)", ["return None if True else Refusal(1)"]),
        ("return strided(q=q, k=k)", ["return None", "return strided(k=k)", "return strided(q=q)"]),
        ("for x in (a, b): f(x)", ["for x in (b, ): f(x)", "for x in (a, ): f(x)"]),
        ("return None", []),
    ],
)
def test_parts_of_a_refusal_are_deleted_one_by_one(lines: str, changed: list[str]) -> None:
    text = f"def refuse(a) -> Refusal | None:\n    {lines}\n"
    parts = refusals.deletions("x.py", text)
    applied = [part.mutant.applied_to(text) for part in parts]
    assert sorted(applied) == sorted(text.replace(lines, new) for new in changed)
    numbers = {watch: i for part in parts for i, watch in enumerate(sorted(part.watches))}
    compile(refusals.watched(text, numbers), "x.py", "exec")


def test_checks_and_names_of_a_chain_are_deleted_one_by_one() -> None:
    text = 'refuses = first_refusal(f, named("q k", g, lambda a: a))\n'
    applied = [part.mutant.applied_to(text) for part in refusals.deletions("x.py", text)]
    assert applied == [
        text.replace("(f,", "(lambda: None,"),
        text.replace('named("q k", g, lambda a: a)', "lambda: None"),
        text.replace("q k", "k"),
        text.replace("q k", "q"),
    ]


def test_a_watched_text_says_what_refuses() -> None:
    text = "def refuse(a, b) -> bool:\n    return a > 1 and not b\n"
    parts = refusals.deletions("x.py", text)
    watches = sorted({watch for part in parts for watch in part.watches})
    numbers = {watch: i for i, watch in enumerate(watches)}
    refused: list[tuple[int, bool]] = []

    def note(number: int, value: bool) -> bool:
        refused.append((number, value))
        return value

    names: dict[str, Any] = {refusals.IF: note, refusals.UNLESS: note}
    exec(refusals.watched(text, numbers), names)
    assert names["refuse"](2, False) and not names["refuse"](0, False)
    assert refused == [(0, True), (1, False), (0, False)]


def test_survivors_are_deletions_of_today() -> None:
    labels = {str(part.mutant) for parts in refusals.all_deletions().values() for part in parts}
    assert refusals.SURVIVORS.keys() <= labels


SOURCE = """\
def first(a, b=1):
    return a + b

class Owner:
    def second(self, a):
        if a > 1:
            return 2
        self.a = a
        return f(a, 3)
"""


def test_mutants_are_those_of_the_named_functions() -> None:
    labels = [str(mutant) for mutant in mutants("x.py", SOURCE, frozenset({"first"}))]
    assert labels == [
        "x.py: first: def first(a, b=1): -> def first(a, b=2):",
        "x.py: first: return a + b -> return a - b",
    ]
    with pytest.raises(ValueError, match=r"x\.py has no function third"):
        mutants("x.py", SOURCE, frozenset({"first", "third"}))


def test_a_sample_takes_functions_by_turns_and_stays_when_other_lines_change() -> None:
    drawn = sample(mutants("x.py", SOURCE), SOURCE, 2, seed=0)
    assert {mutant.function for mutant in drawn} == {"first", "Owner.second"}
    longer = f"import f\n\n\n{SOURCE}\n\ndef third():\n    pass\n"
    again = sample(mutants("x.py", longer), longer, 2, seed=0)
    assert [str(mutant) for mutant in again] == [str(mutant) for mutant in drawn]
    samples = [sample(mutants("x.py", SOURCE), SOURCE, 3, seed) for seed in range(20)]
    assert len({str(mutant) for drawn in samples for mutant in drawn}) > 3


def exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, healthy: str, **arguments: Any
) -> int:
    """What the command exits with, if its tests pass where the texts given are in the file."""

    def run_tests(tree: Path, tests: str, limit: int) -> tuple[int, str]:
        text = (tree / "file.py").read_text()
        return (
            run.PASSED if all(part in text for part in healthy.split("...")) else run.FAILED
        ), ""

    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "ENVIRONMENT", {})
    monkeypatch.setattr(run, "_import_what_no_bug_is_in", lambda: None)
    monkeypatch.setattr(run, "_tests", run_tests)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    return run.main(**arguments)


def test_a_bug_that_only_removes_a_line_is_applied_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text("x = 1\ny = 2\n")
    monkeypatch.setattr("mutations.all_bugs", lambda: [Bug("file.py", "y = 2\n", "", "test.py")])
    monkeypatch.setattr("mutations.targets.targets", lambda: [])
    assert exit_code(monkeypatch, tmp_path, "y = 2") == 0
    assert "file.py: without y = 2\n1 of 1 bugs caught" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("floor", "survivors", "code", "share"),
    [
        (0.5, (), 0, "2 of 4  file.py\n"),
        (0.75, (), 1, "2 of 4 BELOW THE FLOOR  file.py\n"),
        (
            0.75,
            ("return f(a, 3) -> return f(3, a)", "return f(a, 3) -> return f(a, 4)"),
            0,
            "2 of 2",
        ),
    ],
)
def test_a_file_whose_mutants_survive_fails_under_its_floor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    floor: float,
    survivors: tuple[str, ...],
    code: int,
    share: str,
) -> None:
    source = "def first(a, b):\n    a += b\n    return f(a, 3)\n"
    (tmp_path / "file.py").write_text(source)
    monkeypatch.setattr("mutations.all_bugs", lambda: [])
    monkeypatch.setattr(
        "mutations.targets.targets", lambda: [Target("file.py", "test.py", frozenset())]
    )
    monkeypatch.setattr("mutations.targets.FLOORS", {"file.py": floor})
    labels = dict.fromkeys(f"file.py: first: {label}" for label in survivors)
    monkeypatch.setattr("mutations.targets.SURVIVORS", labels)
    assert exit_code(monkeypatch, tmp_path, "a += b", per_target=9) == code
    assert share in capsys.readouterr().out
