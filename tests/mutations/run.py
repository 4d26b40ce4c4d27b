"""Apply each bug to a copy of the tree, and run the tests that are to turn red.

    python tests/mutations/run.py [WORD]    WORD selects bugs by their file, text or tests

A process that has imported torch is forked for each run. Exits with 1 if a bug is not noticed, if
its tests cannot be run or do not end, or if they fail without a bug.
"""

import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATOMC_CACHE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
# pytest's exit codes, and that of a process that an alarm ended.
PASSED, FAILED, TIMED_OUT = 0, 1, -signal.SIGALRM
SECONDS = 600
WIDTH = 40


def main(word: str = "") -> int:
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests"))
    from mutations import all_bugs

    bugs = [bug for bug in all_bugs() if word in f"{bug.file} {bug.old} {bug.tests}"]
    began = time.perf_counter()
    _import_what_no_bug_is_in()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        without = {tests: "" for tests in dict.fromkeys(bug.tests for bug in bugs)}
        for number, tests in enumerate(without):
            _show(number, len(without), f"without a bug: {tests}")
            code, log = _tests(tree, tests)
            without[tests] = "" if code == PASSED else f"fails without a bug:\n{log}"
        for number, bug in enumerate(bugs):
            _show(number, len(bugs), str(bug))
            file = tree / bug.file
            text = file.read_text()
            start = time.perf_counter()
            file.write_text(text.replace(bug.old, bug.new))
            code, log = _tests(tree, bug.tests)
            file.write_text(text)
            outcomes = {PASSED: "NOT NOTICED", FAILED: "caught", TIMED_OUT: f"RUNS {SECONDS} s"}
            outcome = outcomes.get(code, f"BROKEN\n{log}")
            rows.append((without[bug.tests] or outcome, time.perf_counter() - start, bug))
    print(file=sys.stderr)
    for outcome, seconds, bug in rows:
        print(f"{outcome:12} {seconds:5.1f} s  {bug}")
    caught = sum(outcome == "caught" for outcome, _, _ in rows)
    minutes = (time.perf_counter() - began) / 60
    print(f"{caught} of {len(rows)} bugs caught in {minutes:.1f} minutes")
    return int(caught < len(rows))


def _import_what_no_bug_is_in() -> None:
    """What takes longest to import, as tests/conftest.py has it imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import pytest
    import torch._dynamo
    import torch._inductor.compile_fx

    assert pytest and torch._inductor.compile_fx
    sys.path.remove(str(ROOT / "tests"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutations"]:
        del sys.modules[name]


def _tests(tree: Path, tests: str) -> tuple[int, str]:
    """The exit code of pytest in a copy of the tree, and the end of what it printed."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if not child:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.chdir(tree)
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


def _show(done: int, total: int, what: str) -> None:
    bar = "#" * (WIDTH * done // total)
    print(
        f"\r\x1b[K[{bar:<{WIDTH}}] {done}/{total} {what[:60]}", end="", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
