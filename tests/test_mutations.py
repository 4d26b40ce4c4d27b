"""The list of bugs (tests/mutations) fits the tree: `make test-mutations` can apply each of them."""

import shlex
from collections import Counter

import pytest
from mutations import ROOT, Bug, all_bugs

BUGS = all_bugs()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.file}: {' '.join(bug.new.split())}")
def test_a_bug_changes_one_place_and_names_tests_that_are_there(bug: Bug) -> None:
    text = (ROOT / bug.file).read_text()
    assert text.count(bug.old) == 1, bug.old
    changed = text.replace(bug.old, bug.new)
    assert changed != text
    compile(changed, bug.file, "exec")
    files = [word.partition("::")[0] for word in shlex.split(bug.tests) if ".py" in word]
    assert files and all((ROOT / file).is_file() for file in files), bug.tests


def test_no_bug_is_listed_twice() -> None:
    assert [bug for bug, count in Counter(BUGS).items() if count > 1] == []
