"""Apply each bug to a copy of the tree, and run the tests that are to turn red.

    python tests/repo/mutations/run.py           # all
    python tests/repo/mutations/run.py lora      # those with this word in their file, text or tests

As many at once as there are cores, each in a process forked from one that has imported torch. Exits
with 1 if a bug is not noticed, if its tests cannot be run or do not end, or if they fail without a
bug.
"""

import argparse
import contextlib
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[3]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATOMC_CACHE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
# pytest's exit codes, and that of a process that an alarm ended.
PASSED, FAILED, TIMED_OUT = 0, 1, -signal.SIGALRM
SECONDS = 600
OUTCOMES = {PASSED: "NOT NOTICED", FAILED: "caught", TIMED_OUT: f"RUNS {SECONDS} s"}
WIDTH = 40


def asked() -> str:
    """The word of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "word", nargs="?", default="", help="selects bugs by their file, text or tests"
    )
    return str(parser.parse_args().word)


def main(word: str = "") -> int:
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests/repo"))
    from mutations import all_bugs

    bugs = [bug for bug in all_bugs() if word in f"{bug.file} {bug.old} {bug.tests}"]
    if not bugs:
        sys.exit(f"no bug has {word!r} in its file, its text or its tests")
    began = time.perf_counter()
    _import_what_no_bug_is_in()
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ProcessPoolExecutor(
            mp_context=multiprocessing.get_context("fork"), initializer=_copy, initargs=(folder,)
        ) as workers,
    ):
        healthy = {
            tests: workers.submit(_run, tests) for tests in dict.fromkeys(b.tests for b in bugs)
        }
        changed = {workers.submit(_run, bug.tests, bug.file, bug.old, bug.new): bug for bug in bugs}
        _show(0, len(bugs))
        for run in as_completed(changed):
            code, log, seconds = run.result()
            outcome = OUTCOMES.get(code, f"BROKEN\n{log}")
            code, log, _ = healthy[changed[run].tests].result()
            outcomes.append(outcome if code == PASSED else f"FAILS WITHOUT A BUG\n{log}")
            _show_nothing()
            print(f"{outcomes[-1]:12} {seconds:5.1f} s  {changed[run]}", flush=True)
            _show(len(outcomes), len(bugs))
    caught = outcomes.count("caught")
    minutes = (time.perf_counter() - began) / 60
    _show_nothing()
    print(f"{caught} of {len(bugs)} bugs caught in {minutes:.1f} minutes")
    return int(caught < len(bugs))


def _import_what_no_bug_is_in() -> None:
    """What takes longest to import, as tests/conftest.py has it imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import pytest
    import torch._dynamo
    import torch._inductor.compile_fx

    assert pytest and torch._inductor.compile_fx
    sys.path[:] = [path for path in sys.path if not path.startswith(str(ROOT / "tests"))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutations"]:
        del sys.modules[name]


def _copy(folder: str) -> None:
    """Make a copy of the tree for this worker, and go there."""
    tree = Path(folder, str(os.getpid()))
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    os.chdir(tree)


def _run(tests: str, file: str = "", old: str = "", new: str = "") -> tuple[int, str, float]:
    """pytest's exit code, the end of what it printed, and its seconds, with a text replaced."""
    start = time.perf_counter()
    text = Path(file).read_text() if file else ""
    if file:
        Path(file).write_text(text.replace(old, new))
    try:
        return *_tests(Path.cwd(), tests), time.perf_counter() - start
    finally:
        if file:
            Path(file).write_text(text)


def _tests(tree: Path, tests: str) -> tuple[int, str]:
    """The exit code of pytest in a copy of the tree, and the end of what it printed."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if not child:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            os.setsid()
            signal.alarm(SECONDS)
            import pytest

            code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)])
            sys.stdout.flush()
            os._exit(int(code))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what a test that did not end has started
        log.seek(0)
        return code, log.read()[-2000:]


def _show(done: int, total: int) -> None:
    bar = "#" * (WIDTH * done // total)
    print(f"\r\x1b[K[{bar:<{WIDTH}}] {done}/{total}", end="", file=sys.stderr, flush=True)


def _show_nothing() -> None:
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(asked()))
