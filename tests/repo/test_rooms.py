"""Rooms: a folder that holds no folders, or a file beside folders. They import each other one way, are
small, say in one sentence what they hold, and have tests.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "atomc"
MAX_FILES = 25
# One file each by nature: an op, a model.
LARGE = {"ops", "models"}
FOLDERS = sorted(
    path.parent.relative_to(PACKAGE)
    for top in PACKAGE.iterdir()
    if top.is_dir()
    for path in top.rglob("__init__.py")
)


def python_files(package: Path) -> Iterator[Path]:
    """All files of a package, also below folders that are links."""
    for path in sorted(package.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            yield from python_files(path)
        elif path.suffix == ".py" and path.name != "__init__.py":
            yield path


def room_of(path: Path, package: Path) -> str:
    """The folder of a file, or the file itself where folders stand beside it."""
    beside = any((other / "__init__.py").exists() for other in path.parent.iterdir())
    return str((path.with_suffix("") if beside else path.parent).relative_to(package))


def imported_files(path: Path, package: Path) -> Iterator[Path]:
    """The files of the package that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            head, *rest = name.split(".")
            file = package.joinpath(*rest).with_suffix(".py")
            if head == package.name and rest and file.is_file():
                yield file


def circle(package: Path) -> list[str]:
    """Rooms that import each other in a circle; [] if none do."""
    rooms: dict[str, set[str]] = {}
    for path in python_files(package):
        room = room_of(path, package)
        others = {room_of(file, package) for file in imported_files(path, package)}
        rooms.setdefault(room, set()).update(others - {room})
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_rooms_import_each_other_in_a_circle() -> None:
    assert circle(PACKAGE) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "package"
    for name, text in (
        ("low/__init__", ""),
        ("low/a", ""),
        ("low/b", "from package.high.c import C"),
        ("high/__init__", ""),
        ("high/c", "def f():\n    import package.low.a"),
    ):
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert set(circle(package)) == {"low", "high"}
    (package / "low/b.py").write_text("from package.low import a")
    assert circle(package) == []


def faults(folder: Path) -> list[str]:
    """What is wrong with a folder of the product, one sentence each."""
    files = [path for path in (PACKAGE / folder).iterdir() if path.suffix == ".py"]
    docstring = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text()))
    sentences = []
    if len(files) > MAX_FILES + 1 and str(folder) not in LARGE:
        sentences.append(f"{len(files) - 1} files, at most {MAX_FILES}")
    if not docstring:
        sentences.append("its __init__.py does not say what it holds")
    return sentences


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_is_small_and_says_what_it_holds(folder: Path) -> None:
    assert faults(folder) == []


def test_a_large_folder_without_a_sentence_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    (tmp_path / "heap").mkdir()
    (tmp_path / "heap/__init__.py").write_text("")
    for number in range(MAX_FILES):
        (tmp_path / f"heap/file_{number}.py").write_text("")
    assert faults(Path("heap")) == ["its __init__.py does not say what it holds"]
    (tmp_path / "heap/one_more.py").write_text("")
    (tmp_path / "heap/__init__.py").write_text('"""A heap."""')
    assert faults(Path("heap")) == ["26 files, at most 25"]


# Folders of the product whose tests stand with those of another.
TESTED_ELSEWHERE = {
    "audit": "report",
    "capture": "compiler",
    "cost": "planning",
    "demo": "runtime",
    "dumps": "report",
    "graph": "rewriting",
    "testing": "cli",
    "torch_compat": "compiler",
}


@pytest.mark.parametrize("name", sorted({folder.parts[0] for folder in FOLDERS} | {"demo"}))
def test_a_folder_of_the_product_has_tests(name: str) -> None:
    folder = ROOT / "tests" / TESTED_ELSEWHERE.get(name, name)
    assert list(folder.rglob("test_*.py"))
    assert not (ROOT / "tests" / name).exists() or name not in TESTED_ELSEWHERE


def test_the_scheduler_needs_no_torch() -> None:
    names = [
        "atomc." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in python_files(PACKAGE / "runtime/scheduling")
    ]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    done = subprocess.run(
        [sys.executable, "-c", code + 'print("torch" in sys.modules)', *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names alone: of two, it collects one."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []
