"""Imports go one way. A module may import its own layer and those above it in LAYERS."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "atomc"

# From the lowest. A name stands for a module or for a whole folder below atomc/; where several fit, the
# longest decides. A new module goes into the lowest layer that holds all it imports.
LAYERS = [
    {"cgroup", "demo", "errors", "files", "tested_versions", "token_range"},
    {"options", "platform", "torch_compat", "trusted_folder"},
    {"ops"},
    {"graph", "vllm_plugin", "weights"},
    {"capture", "cost", "kernels", "report"},
    {"dumps", "rewriting", "testing"},
    {"cache", "passes", "replay"},
    {"audit"},
    {"compiler"},
    {"backend"},
    {"encoder", "program"},
    {"models"},
    {"quantization"},
    {"stock"},
    {"parallel", "prepare_model"},
    {"loading"},
    {
        "runtime.config_fields",
        "runtime.interrupts",
        "runtime.processes",
        "runtime.requests",
        "runtime.torch_modes",
    },
    {"runtime.execution.threads", "runtime.execution.timings", "runtime.execution.views"},
    {"runtime.config", "runtime.images", "runtime.sampling", "runtime.scheduling", "runtime.turns"},
    {"runtime.admission", "runtime.lora_adapters", "runtime.sleeping", "runtime.text"},
    {"runtime.constrained"},
    {"runtime.execution"},
    {"runtime.calls", "runtime.create_scheduler"},
    {"runtime.async_calls", "runtime.ranks"},
    {"runtime.start_executor"},
    {"runtime.engine"},
    {"runtime.bench", "runtime.llm"},
    {"runtime.server.engines", "runtime.server.flags", "runtime.server.parsers"},
    {"runtime.server.http"},
    {"runtime.server.config", "runtime.server.metrics"},
    {"runtime.server.service"},
    {"runtime.server.chat", "runtime.server.running_service", "runtime.server.status"},
    {
        "runtime.server.anthropic",
        "runtime.server.openai",
        "runtime.server.operations",
        "runtime.server.responses",
    },
    {"runtime.server.openapi"},
    {"runtime.server.app"},
    {"runtime.server.serve"},
    {"planning"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
# Passes ask `select` whether a kernel serves an op; models are plain PyTorch and know ops only.
HIDDEN = {"passes": {"kernels"}, "models": RANK.keys() - {"models", "ops", "files"}}
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


def room_of(name):
    """The name in LAYERS that fits a dotted name below atomc; "" for atomc itself, None for none."""
    parts = name.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in RANK), "" if not name else None)


def imported(text):
    """What a source imports of atomc at any depth, as (line, dotted name below atomc); "" for atomc
    itself.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            # `from atomc import Options` is a name of atomc, `from atomc import ops` a room.
            names = [
                module
                if module == "atomc" and not is_module(alias.name)
                else f"{module}.{alias.name}"
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "atomc":
                yield node.lineno, rest
            elif not head:
                raise AssertionError(
                    f"line {node.lineno}: relative import of {name.rpartition('.')[0]}: write atomc..."
                )


def is_module(name):
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def violations(path, text):
    """What is wrong with the imports of the module at `path` below atomc/, one sentence each."""
    importer = room_of(".".join(Path(path).with_suffix("").parts))
    if importer is None and Path(path).name == "__init__.py":
        importer = max(RANK, key=RANK.__getitem__)  # of a folder whose rooms are named
    if importer is None:
        return [f"{path}: add {Path(path).parts[0].removesuffix('.py')!r} to LAYERS"]
    sentences = []
    for line, name in imported(text):
        other = room_of(name)
        if other == "":
            sentences.append(
                f"{path}:{line}: import the module that defines the name, not atomc, which "
                "stands above all"
            )
        elif other is None:
            sentences.append(f"{path}:{line}: add {name.partition('.')[0]!r} to LAYERS")
        elif RANK[other] > RANK[importer]:
            sentences.append(
                f"{path}:{line}: {importer} must not import {other}, which stands above it"
            )
        elif other in HIDDEN.get(importer, ()):
            sentences.append(f"{path}:{line}: {importer} must not know {other}")
    return sentences


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
        (
            "runtime/scheduling/step.py",
            "from atomc.runtime.execution.worker import Worker",
            "runtime.scheduling must not import runtime.execution, which stands above it",
        ),
        (
            "runtime/server/http/responses.py",
            "from atomc.runtime.server import anthropic",
            "runtime.server.http must not import runtime.server.anthropic, which stands above it",
        ),
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


@pytest.mark.rotating
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
