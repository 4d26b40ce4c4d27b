"""Apply each bug to a copy of the tree, and run the tests that are to turn red.

    python tests/repo/mutations/run.py           # all
    python tests/repo/mutations/run.py lora      # those with this word in their file, text or tests

Each bug by hand must be caught. Of the mutants of a file (targets.py), a share: its floor. As many
run at once as there are cores, each in a process forked from one that has imported torch. Exits with
1 if a bug is not noticed or a file is below its floor, if tests cannot be run, or if they fail
without a bug.
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mutations import Bug
    from mutations.generate import Mutant
    from mutations.targets import Target

ROOT = Path(__file__).parents[3]
LEFT_OUT = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATOMC_CACHE": "0", "PYTHONDONTWRITEBYTECODE": "1"}
# pytest's exit codes, and that of a process that an alarm ended.
PASSED, FAILED, NO_TESTS, TIMED_OUT = 0, 1, 5, -signal.SIGALRM
HEALTHY_SECONDS = 600
OUTCOMES = {PASSED: "NOT NOTICED", FAILED: "caught", TIMED_OUT: "RUNS ON"}
PER_TARGET = 4
WIDTH = 40


class Trial(NamedTuple):
    """A change, the tests that are to notice it, and the row of the table that it is from."""

    change: "Bug | Mutant"
    tests: str
    target: "Target | None" = None

    def outcome(self, code: int, log: str) -> str:
        """A bug by hand breaks no import and no loop: a mutant may, and is noticed too."""
        if self.target and code not in (PASSED, NO_TESTS):
            return "caught"
        return OUTCOMES.get(code, f"BROKEN\n{log}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="", help="selects by file, text or tests")
    parser.add_argument("--seed", type=int, default=0, help="draws the mutants (0)")
    parser.add_argument(
        "--per-target", type=int, default=PER_TARGET, help=f"mutants of each row ({PER_TARGET})"
    )
    return parser.parse_args()


def trials(word: str, seed: int, per_target: int) -> list[Trial]:
    """The bugs by hand, and the mutants of each row that are not known to survive."""
    from mutations import all_bugs
    from mutations.generate import mutants, sample
    from mutations.targets import SURVIVORS, targets

    by_hand = [
        Trial(bug, bug.tests) for bug in all_bugs() if word in f"{bug.file} {bug.old} {bug.tests}"
    ]
    generated = []
    for target in targets():
        if word in f"{target.file} {target.tests}":
            text = (ROOT / target.file).read_text()
            all_mutants = mutants(target.file, text, target.functions)
            counted = [mutant for mutant in all_mutants if str(mutant) not in SURVIVORS]
            generated += [
                Trial(mutant, target.tests, target)
                for mutant in sample(counted, text, per_target, seed)
            ]
    return by_hand + generated


def main(word: str = "", seed: int = 0, per_target: int = PER_TARGET) -> int:
    os.environ.update(ENVIRONMENT)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "tests/repo"))
    selected = trials(word, seed, per_target)
    if not selected:
        sys.exit(f"no bug has {word!r} in its file, its text or its tests")
    began = time.perf_counter()
    outcomes = _outcomes(selected)
    minutes = (time.perf_counter() - began) / 60
    by_hand = [outcomes[trial] for trial in selected if not trial.target]
    caught = by_hand.count("caught")
    low = _show_shares(outcomes)
    print(
        f"{caught} of {len(by_hand)} bugs caught, {low} rows below their floor, --seed {seed}, {minutes:.1f} minutes"
    )
    return int(caught < len(by_hand) or low > 0)


def _outcomes(selected: list[Trial]) -> dict[Trial, str]:
    """What became of each, printed as it ends."""
    _import_what_no_bug_is_in()
    outcomes = {}
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ProcessPoolExecutor(
            mp_context=multiprocessing.get_context("fork"), initializer=_copy, initargs=(folder,)
        ) as workers,
    ):
        all_tests = dict.fromkeys(trial.tests for trial in selected)
        runs = {tests: workers.submit(_run, tests, HEALTHY_SECONDS) for tests in all_tests}
        healthy = {tests: run.result() for tests, run in runs.items()}
        changed = {}
        for trial in selected:
            code, log, seconds = healthy[trial.tests]
            if code != PASSED:
                outcomes[trial] = f"FAILS WITHOUT A BUG\n{log}"
                print(f"{outcomes[trial]}  {trial.tests}", flush=True)
            else:
                limit = 60 + int(5 * seconds)
                file = trial.change.file
                text = trial.change.applied_to((ROOT / file).read_text())
                changed[workers.submit(_run, trial.tests, limit, file, text)] = trial
        for run in as_completed(changed):
            trial = changed[run]
            code, log, seconds = run.result()
            outcomes[trial] = trial.outcome(code, log)
            _show_nothing()
            print(f"{outcomes[trial]:12} {seconds:5.1f} s  {trial.change}", flush=True)
            _show(len(outcomes), len(selected))
    _show_nothing()
    return outcomes


def _show_shares(outcomes: dict[Trial, str]) -> int:
    """Print how many mutants of each row were caught; the number of rows below their floor."""
    by_target: dict[Target, list[str]] = {}
    for trial, outcome in outcomes.items():
        if trial.target:
            by_target.setdefault(trial.target, []).append(outcome)
    low = 0
    for target, results in by_target.items():
        caught = results.count("caught")
        below = caught < target.floor * len(results)
        low += below
        print(f"{caught} of {len(results)}{' BELOW THE FLOOR' if below else ''}  {target}")
    return low


def _import_what_no_bug_is_in() -> None:
    """What takes longest to import, as tests/conftest.py has it imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import pytest
    import torch._dynamo
    import torch._inductor.compile_fx

    assert pytest and torch._inductor.compile_fx
    sys.path[:] = [path for path in sys.path if not path.startswith(str(ROOT / "tests/repo"))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutations"]:
        del sys.modules[name]


def _copy(folder: str) -> None:
    """Make a copy of the tree for this worker, and go there."""
    tree = Path(folder, str(os.getpid()))
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    os.chdir(tree)


def _run(tests: str, limit: int, file: str = "", changed: str = "") -> tuple[int, str, float]:
    """pytest's exit code, the end of what it printed, and its seconds, with a text in a file."""
    start = time.perf_counter()
    text = Path(file).read_text() if file else ""
    if file:
        Path(file).write_text(changed)
    try:
        return *_tests(Path.cwd(), tests, limit), time.perf_counter() - start
    finally:
        if file:
            Path(file).write_text(text)


def _tests(tree: Path, tests: str, limit: int, *plugins: object) -> tuple[int, str]:
    """The exit code of pytest in a copy of the tree, and the end of what it printed."""
    with tempfile.TemporaryFile("w+") as log:
        child = os.fork()
        if not child:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            sys.path.insert(0, str(tree))
            os.environ["PYTHONPATH"] = str(tree)
            os.setsid()
            signal.alarm(limit)
            import pytest

            options = ["-q", "-x", "-p", "no:cacheprovider", "--grid-seed", "0", "--rotation", "1"]
            code = pytest.main([*options, *shlex.split(tests)], plugins)
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
    sys.exit(main(**vars(arguments())))
