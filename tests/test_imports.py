"""Imports go one way. A module may import its own layer and those above it in LAYERS."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "atomc"

# From the lowest. A name stands for atomc/<name>.py or for the whole folder. A new module goes into
# the lowest layer that holds all it imports.
LAYERS = [
    {
        "atomic_file",
        "demo",
        "file_of_flag",
        "json_file",
        "json_types",
        "cgroup",
        "errors",
        "tested_versions",
        "token_range",
    },
    {"platform", "options", "trusted_folder", "torch_compat"},
    {"ops"},
    {"graph", "weights", "vllm_plugin"},
    {"cost", "report", "kernels", "capture"},
    {"rewriting", "dumps", "testing"},
    {"cache", "passes"},
    {"audit"},
    {"compiler"},
    {"refusal", "backend"},
    {"program", "encoder"},
    {"quantization", "models", "parallel"},
    {"runtime", "prepare_model"},
    {"planning"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Passes ask `select` whether somebody serves an op; models are plain PyTorch and know ops only
# (their
# loader: quantization, files, weights, memory and what an exception of torch means, too).
HIDDEN = {
    "passes": {"kernels"},
    "models": RANK.keys()
    - {
        "models",
        "ops",
        "parallel",
        "quantization",
        "weights",
        "json_file",
        "json_types",
        "cgroup",
        "torch_compat",
    },
}
# They hand out names of all layers, lazily.
EXEMPT = {"__init__.py", "__main__.py"}


def sources():
    """Every module of the package, with the folders that are linked in, as a path below atomc/."""
    folders = [PACKAGE]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.suffix == ".py":
                yield path.relative_to(PACKAGE)


def imported(text):
    """The modules of atomc that a source imports at any depth, as (line, name below atomc); "" for
    atomc itself.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "atomc":
            names = [
                f"atomc.{alias.name}" if alias.name in RANK else "atomc" for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "atomc":
                yield node.lineno, rest.partition(".")[0]
            elif not head:
                raise AssertionError(
                    f"line {node.lineno}: relative import of {name}: write atomc..."
                )


def violations(path, text):
    """What is wrong with the imports of the module at `path` below atomc/, one sentence each."""
    own = Path(path).parts[0].removesuffix(".py")
    if own not in RANK:
        return [f"{path}: add {own!r} to LAYERS"]
    found = []
    for line, other in imported(text):
        if other == "":
            found.append(
                f"{path}:{line}: import the module that defines the name, not atomc, which "
                "stands above all"
            )
        elif other not in RANK:
            found.append(f"{path}:{line}: add {other!r} to LAYERS")
        elif RANK[other] > RANK[own]:
            found.append(f"{path}:{line}: {own} must not import {other}, which stands above it")
        elif other in HIDDEN.get(own, ()):
            found.append(f"{path}:{line}: {own} must not know {other}")
    return found


@pytest.mark.parametrize("path", [path for path in sources() if str(path) not in EXEMPT], ids=str)
def test_imports_go_one_way(path):
    assert violations(path, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    "path, text, wrong",
    [
        (
            "ops/op.py",
            "from atomc.rewriting.rewrite import Rewrite",
            "ops must not import rewriting, which stands above it",
        ),
        (
            "ops/op.py",
            "def f():\n    import atomc.backend",
            "ops must not import backend, which stands above it",
        ),
        (
            "ops/op.py",
            "from atomc import ops, cli",
            "ops must not import cli, which stands above it",
        ),
        (
            "passes/fuse/a.py",
            "from atomc.kernels.triton import norm",
            "passes must not know kernels",
        ),
        (
            "kernels/triton/a.py",
            "import atomc.passes as p",
            "kernels must not import passes, which stands above it",
        ),
        ("models/llama.py", "from atomc.platform import Platform", "models must not know platform"),
        ("backend.py", "from atomc import Options", "import the module that defines the name"),
        ("brand_new.py", "", "add 'brand_new' to LAYERS"),
        ("ops/op.py", "import atomc.brand_new", "add 'brand_new' to LAYERS"),
    ],
)
def test_an_import_the_wrong_way_is_found(path, text, wrong):
    (found,) = violations(path, text)
    assert wrong in found


def test_a_relative_import_is_refused():
    with pytest.raises(AssertionError, match=r"line 1: relative import of \.near"):
        violations("ops/op.py", "from .near import thing")


def test_an_import_of_the_own_or_a_lower_layer_is_allowed():
    assert (
        violations("models/llama.py", "from atomc import ops\nfrom atomc.models.layers import MLP")
        == []
    )
    assert (
        violations(
            "runtime/execution/runner.py", "from atomc.ops import Step\nimport atomc.backend"
        )
        == []
    )


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] in ("atomc", "passes", "models", "runtime"):
            raise
print(*sorted({"passes", "models", "runtime"} & {name.partition(".")[0] for name in sys.modules}))
"""


def test_no_module_is_imported_under_a_second_name():
    names = [
        "atomc." + ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in sources()
        if path.name != "__main__.py" and str(path) not in EXEMPT
    ]
    # From the root, where a bare `import models` would find the folder.
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
