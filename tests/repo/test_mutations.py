"""The list of bugs (tests/repo/mutations) fits the tree: `make test-mutations` can apply each of them."""

import shlex
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression
from mutations import ROOT, Bug, all_bugs, run

BUGS = all_bugs()


@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_a_bug_changes_one_place_and_names_tests_that_are_there(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, bug.old
    changed = text.replace(bug.old, bug.new)
    assert changed != text
    compile(changed, bug.file, "exec")
    files = [word.partition("::")[0] for word in shlex.split(bug.tests) if ".py" in word]
    assert files and all((ROOT / file).is_file() for file in files), bug.tests


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


def not_noticed(bugs: list[Bug], items: list[pytest.Item]) -> list[str]:
    """The tests of the bugs of which none is among these, but for bugs that say -m ''."""
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    return [
        tests
        for tests in sorted({bug.tests for bug in bugs if "-m" not in shlex.split(bug.tests)})
        if not any(
            selects(tests, item)
            for name in files_of(tests)
            for item in by_file.get(name.partition("::")[0], [])
        )
    ]


def test_make_test_runs_a_test_that_has_to_notice_a_bug(request: pytest.FixtureRequest) -> None:
    items = request.session.items
    files = {name.partition("::")[0] for bug in BUGS for name in files_of(bug.tests)}
    if request.config.option.keyword or not files <= {item.location[0] for item in items}:
        pytest.skip("a part of the tests is selected")
    assert not_noticed(BUGS, items) == []


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


def test_a_bug_that_only_removes_a_line_is_applied_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_tests(tree: Path, tests: str) -> tuple[int, str]:
        return (run.PASSED if "y = 2" in (tree / "file.py").read_text() else run.FAILED), ""

    (tmp_path / "file.py").write_text("x = 1\ny = 2\n")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "ENVIRONMENT", {})
    monkeypatch.setattr(run, "_import_what_no_bug_is_in", lambda: None)
    monkeypatch.setattr(run, "_tests", run_tests)
    monkeypatch.setattr("mutations.all_bugs", lambda: [Bug("file.py", "y = 2\n", "", "test.py")])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    assert run.main() == 0
    assert "file.py: without y = 2\n1 of 1 bugs caught" in capsys.readouterr().out
