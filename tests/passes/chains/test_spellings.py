"""Every spelling of tests/_support/spellings/ is recognized with eager's values, or has a near miss that says
why not; docs/rewrites.md has their table.

Run as a program, it writes that table: PYTHONPATH=.:tests/_support .venv/bin/python tests/passes/chains/test_spellings.py
"""

import re
from pathlib import Path

import pytest
import torch
from rewriting import explained
from spellings import TOLERANCE, Spelling, families, table

PAGE = Path(__file__).parents[3] / "docs/rewrites.md"
START, END = "<!-- spellings: start -->\n", "<!-- spellings: end -->\n"
# A spelling runs in one of its dtypes per change, by turns.
CASES = [
    pytest.param(
        spelling,
        dtype,
        id=f"{family}-{spelling.text}-{dtype}".replace(" ", ""),
        marks=() if (i + j) % len(spelling.dtypes) == 0 else pytest.mark.slow,
    )
    for family, found in families().items()
    for i, spelling in enumerate(found)
    for j, dtype in enumerate(spelling.dtypes)
]


def between(text: str) -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, rest = text.split(START)
    inside, after = rest.split(END)
    return before, inside, after


@pytest.mark.parametrize(("spelling", "dtype"), CASES)
def test_a_spelling_is_recognized_with_eagers_values_or_says_why_not(
    spelling: Spelling, dtype: torch.dtype
) -> None:
    tolerance = TOLERANCE[dtype] if spelling.tolerance is None else spelling.tolerance
    report = explained(spelling.function, *spelling.inputs(dtype), tolerance=tolerance)
    why = report.why(spelling.rewrite)
    if spelling.reason:
        assert re.search(spelling.reason, why), why
        assert report.matches.get(spelling.rewrite, 0) == 0, why
    else:
        assert report.matches.get(spelling.rewrite, 0) == spelling.sites, why
        assert f"fired at {spelling.sites} site" in why


def test_the_page_has_the_table_of_spellings() -> None:
    assert between(PAGE.read_text())[1] == "\n" + table() + "\n"


if __name__ == "__main__":
    before, _, after = between(PAGE.read_text())
    PAGE.write_text(before + START + "\n" + table() + "\n" + END + after)
