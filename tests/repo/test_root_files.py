"""Files for contributors and for the hosts of the repository: what they run and name exists, and
what is generated is current.
"""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*_*.yml"))
FORMS += [ROOT / ".github/ISSUE_TEMPLATE/feature.yml"]
GUIDES = [
    f"add-{kind}" for kind in ("op", "rewrite", "model", "quantization", "endpoint", "control-call")
]


def tool(name: str) -> ModuleType:
    """A script of docs/tools."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/tools/{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands(workflow: Path) -> list[str]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_the_page_of_rooms_and_its_picture_are_current() -> None:
    assert tool("rooms").main(check=True) == 0, "run `make rooms`"


def test_a_room_that_moved_makes_the_page_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = tool("rooms")
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(rooms, "ROOT", ROOT)
    for name in ("rooms.md", "rooms.svg"):
        (tmp_path / "docs" / name).write_text((ROOT / "docs" / name).read_text())
    layers = [layer for layer in rooms.layers() if "audit" not in layer]
    monkeypatch.setattr(rooms, "layers", lambda: layers)
    assert "audit" not in rooms.picture() and ">audit<" in (ROOT / "docs/rooms.svg").read_text()
    assert rooms.main(check=True) == 1


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_targets_that_exist(workflow: Path) -> None:
    targets = [line.split()[1] for line in commands(workflow) if line.startswith("make ")]
    assert set(targets) <= TARGETS
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        assert job["timeout-minutes"] <= 90


def test_a_hosted_runner_runs_the_two_commands_of_the_readme() -> None:
    lines = commands(ROOT / ".github/workflows/readme.yml")
    assert {"make demo", "make test"} <= set(lines)
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", README, re.MULTILINE))
    flags = yaml.safe_load((ROOT / ".github/workflows/readme.yml").read_text())["env"]["PIP_ARGS"]
    assert f'PIP_ARGS="{flags}"' in README


def test_hooks_before_a_commit_run_the_tools_of_lint_and_the_rules_of_the_tree() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert [entry for entry in entries if "ruff check" in entry or "ruff format" in entry]
    assert "make test-tree" in entries and "test-tree" in TARGETS
    for script in re.findall(r"docs/\S+\.py", " ".join(entries)):
        assert (ROOT / script).exists()


def test_the_rules_of_the_tree_are_files() -> None:
    (names,) = re.findall(
        r"^TREE := \$\(addprefix (\S+),(.*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    prefix, files = names
    assert all((ROOT / f"{prefix}{file}").exists() for file in files.split())


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_of_an_issue_has_what_the_host_requires(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)
    for page in re.findall(r"docs/[\w-]+\.md", form.read_text(), re.IGNORECASE):
        assert (ROOT / page.replace("Docs", "docs")).exists()


def test_contributing_is_ten_sentences_and_a_page_for_each_kind_of_change() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    numbers = re.findall(r"^(\d+)\. ", text, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, 11)]
    assert text.index("1. ") < 30
    assert len(text.splitlines()) < 60
    assert [name for name in GUIDES if f"(docs/{name}.md)" not in text] == []


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_names_its_files_first(guide: str) -> None:
    text = (ROOT / f"docs/{guide}.md").read_text()
    assert re.search(r"^\| file \| what is added \|$", text, re.MULTILINE)
    assert len(text.splitlines()) < 170


def test_the_site_needs_what_the_extra_names_and_nothing_else_of_us() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["docs"] == ["mkdocs-material"]
    pins = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^mkdocs-material==", pins, re.MULTILINE)


def test_each_page_is_in_one_section_of_the_index() -> None:
    text = (ROOT / "docs/index.md").read_text()
    intro, *sections = re.split(r"^## .*$", text, flags=re.MULTILINE)
    assert "](" not in intro
    assert len(sections) > 3


def test_a_version_without_its_section_is_no_release(tmp_path: Path) -> None:
    notes = tool("notes")
    for name in ("pyproject.toml", "CHANGELOG.md", "atomc/__init__.py", "docs/release-notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert len(notes.faults("9.9.9", tmp_path)) == 4
    for name, old, new in (
        ("pyproject.toml", '\nversion = "', '\nversion = "9.9.9"\n# "'),
        ("atomc/__init__.py", '\n__version__ = "', '\n__version__ = "9.9.9"\n# "'),
        ("CHANGELOG.md", "## [Unreleased]\n", "## [Unreleased]\n\n## [9.9.9] - 2030-01-01\n"),
        ("docs/release-notes.md", "## 0.2.0\n", "## 9.9.9\n\nNew.\n\n## 0.2.0\n"),
    ):
        text = (tmp_path / name).read_text()
        assert old in text
        (tmp_path / name).write_text(text.replace(old, new, 1))
    assert notes.faults("9.9.9", tmp_path) == []


def test_the_first_release_has_its_notes() -> None:
    notes = tool("notes").sections((ROOT / "docs/release-notes.md").read_text())
    assert len(notes["0.2.0"]) > 1000
