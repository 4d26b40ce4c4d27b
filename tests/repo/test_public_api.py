"""What a program may rely on: the names of atomc, their documentation, and the changelog."""

import re
import tomllib
from pathlib import Path

import pytest

import atomc

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "ContractError",
    "LLM",
    "Options",
    "OptionsError",
    "Report",
    "Rewrite",
    "RunError",
    "SamplingParams",
    "__version__",
    "adopt",
    "explain",
    "ops",
    "parallelize",
    "prepare",
    "prepare_batching",
    "quantize",
    "register_experts",
    "register_kernel",
    "register_pass",
    "reports",
    "unprepare",
]


def test_the_public_names_are_these():
    assert sorted(atomc.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_exists_and_has_a_docstring(name):
    found = getattr(atomc, name)
    assert name in dir(atomc)
    assert isinstance(found, str) or len(found.__doc__ or "") > 20, name


def test_the_page_of_the_public_api_has_each_name_once():
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == PUBLIC


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'atomc' has no attribute 'compile'"):
        atomc.compile  # noqa: B018


def test_versions_agree_and_the_changelog_keeps_its_form():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == atomc.__version__
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *others = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", each) for each in others)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert kinds.issuperset(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert all(
        each.endswith(".") for each in re.findall(r"^- (.+(?:\n  .+)*)$", text, re.MULTILINE)
    )
