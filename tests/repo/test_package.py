"""What is installed: an import that costs little, a wheel and an sdist with real files, make
targets that pin torch.
"""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from serving import COMPILED

from atomc.tested_versions import TESTED, series

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# They share what one worker has built.
wheel_test = pytest.mark.xdist_group("wheel")


def output(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package_files():
    """All files of the package, as paths below the root, with the links followed."""
    for folder, _, names in os.walk(ROOT / "atomc", followlinks=True):
        for name in names:
            if not name.endswith(".pyc"):
                yield str((Path(folder) / name).relative_to(ROOT))


@pytest.fixture(scope="module")
def imported_with_atomc():
    return output(sys.executable, "-c", "import sys, atomc; print(*sys.modules)", cwd=ROOT).split()


@pytest.mark.xdist_group("import")
@pytest.mark.parametrize(
    "heavy", ["transformers", "triton", "fastapi", "torch._inductor", "torch._dynamo"]
)
def test_importing_atomc_does_not_import(imported_with_atomc, heavy):
    assert "atomc" in imported_with_atomc and heavy not in imported_with_atomc


def test_text_is_generated_without_the_libraries_of_the_server():
    blocked = (
        "import sys; sys.modules.update(dict.fromkeys(['fastapi', 'msgspec', 'uvicorn', 'zmq']))"
    )
    run = (
        "from atomc.cli import main; sys.exit(main(['generate', '-p', 'Once', "
        "'--max-tokens', '2']))"
    )
    cached = os.environ | {"ATOMC_CACHE": "1", "ATOMC_CACHE_DIR": COMPILED}
    output(sys.executable, "-c", f"{blocked}; {run}", cwd=ROOT, env=cached)


def test_every_python_file_is_ascii():
    folders = ("atomc", "passes", "models", "runtime", "tests", "bench")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files and [str(path) for path in files if not path.read_bytes().isascii()] == []


def test_torch_is_pinned_to_a_tested_version_by_the_constraints_only():
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert all(series(pins[name]) in tested for name, tested in TESTED.items())
    assert f"torch>={TESTED['torch'][0]}" in PROJECT["project"]["dependencies"]
    extras = PROJECT["project"]["optional-dependencies"]
    assert f"transformers>={TESTED['transformers'][0]}" in extras["hf"]


def dry_run(folder, target):
    """The commands that make would run in a folder with nothing but our own files in it."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    settings = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return output("make", "-n", target, cwd=folder, env=settings).splitlines()


@pytest.mark.parametrize(("target", "pinned"), [("newest", False), ("oldest", True)])
def test_a_third_of_the_tests_runs_with_the_newest_and_the_oldest_versions(
    tmp_path, target, pinned
):
    lines = dry_run(tmp_path, f"test-{target}")
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2 and not any("--constraint" in line for line in installs)
    oldest = {f'"{name}=={TESTED[name][0]}.*"' for name in ("torch", "transformers")}
    assert {pin for pin in oldest if pin in installs[-1]} == (oldest if pinned else set())
    assert f".venv-{target}/bin/python -m pytest" in lines[-1] and "--third 0" in lines[-1]


@pytest.mark.parametrize("target", ["demo", "test", "test-libraries"])
def test_nothing_is_installed_without_the_constraints(tmp_path, target):
    setuptools, ours, *others = [
        line for line in dry_run(tmp_path, target) if "pip install" in line
    ]
    for line in (setuptools, ours, *others):
        assert "--constraint constraints.txt" in line
    assert "--no-build-isolation" in ours
    assert len(others) == (3 if target == "test-libraries" else 0)
    assert all(f"--no-deps --target {tmp_path}/.venv/libraries/" in line for line in others)


def test_the_demo_has_its_tokenizer_installed(tmp_path):
    assert any("--editable '.[hf]'" in line for line in dry_run(tmp_path, "demo"))


def test_warm_environment_asks_no_index(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    (tmp_path / ".venv/installed").touch()
    os.utime(tmp_path / ".venv/installed", (2**31, 2**31))
    assert dry_run(tmp_path, "demo") == [".venv/bin/atomc generate"]


def test_gpu_tests_run_with_the_python_that_is_there(tmp_path):
    entry_point, command = dry_run(tmp_path, "test-gpu")
    assert "egg_info" in entry_point
    assert command.split()[1:] == [
        "python3",
        "-m",
        "pytest",
        "tests",
        "-m",
        "gpu",
    ] and command.startswith("PYTHONPATH=.")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with our sdist and the wheel made from it. Needs no network."""
    pytest.importorskip("build", reason="the package `build` is not installed: pip install build")
    folder = tmp_path_factory.mktemp("built")
    # From a copy, because setuptools leaves build folders behind and several workers may be at it.
    source = folder / "source"
    source.mkdir()
    for name in ("atomc", "passes", "models", "runtime", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            output("cp", "-a", ROOT / name, source)
    output(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@wheel_test
def test_wheel_holds_every_file_of_the_package(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    assert set(package_files()) - names == set()
    assert {name.partition("/")[0] for name in names} == {
        "atomc",
        f"{wheel.name.split('-py3')[0]}.dist-info",
    }


@wheel_test
def test_sdist_holds_real_files_where_the_tree_has_links(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as content:
        members = {member.name.partition("/")[2]: member for member in content.getmembers()}
    assert set(package_files()) - set(members) == set()
    assert [name for name, member in members.items() if member.issym() or member.islnk()] == []


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A fresh environment with our wheel in it, and what is installed here behind it."""
    venv = tmp_path_factory.mktemp("installed")
    output(sys.executable, "-m", "venv", "--without-pip", venv)
    (wheel,) = built.glob("*.whl")
    python = venv / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    # Without PYTHONPATH, in which pip would see the metadata of this tree as an installed package.
    output(*pip, wheel, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    # No .pth file is read in a folder that a .pth file names, so the editable install of this tree
    # stays out.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "outside.pth").write_text(str(Path(torch.__file__).parents[1]))
    return python


COMPILE = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.RMSNorm(16), nn.Linear(16, 4)).eval()
x = torch.randn(3, 8)
with torch.inference_mode():
    torch.testing.assert_close(torch.compile(model, backend="atom")(x), model(x))

import atomc
print(atomc.__file__)
"""


@wheel_test
def test_installed_backend_compiles_without_the_checkout(installed, tmp_path):
    used = output(installed, "-I", "-c", COMPILE, cwd=tmp_path).splitlines()[-1]
    assert Path(used).is_relative_to(installed.parents[1])


LINKED = """
import atomc.models, atomc.passes, atomc.runtime
print(*[module.__file__ for module in (atomc.models, atomc.passes, atomc.runtime)])
"""


@wheel_test
def test_linked_folders_are_installed_as_real_ones(installed, tmp_path):
    files = [Path(name) for name in output(installed, "-I", "-c", LINKED, cwd=tmp_path).split()]
    assert [path.parent.name for path in files] == ["models", "passes", "runtime"]
    for path in files:
        assert (
            path.resolve().is_relative_to(installed.parents[1].resolve())
            and not path.parent.is_symlink()
        )


@wheel_test
def test_installed_command_generates_from_the_demo_model(installed, tmp_path):
    text = output(installed, "-I", installed.parent / "atomc", "generate", cwd=tmp_path)
    assert len(text.split()) > 3
