"""Delete each part of each refusal of the kernels over AITER: tests must turn red.

    python tests/repo/mutations/run_refusals.py           # all
    python tests/repo/mutations/run_refusals.py latent    # those with this word in their file or text
    python tests/repo/mutations/run_refusals.py --list    # which there are

One run of the tests of these kernels says which part refuses in which test. Without a part, the
tests in which it refuses run, the shortest first, up to the first that turns red. Exits with 1 if
fewer than a share of the deletions (refusals.FLOOR) are noticed, or if tests fail as the tree is.
"""

import argparse
import builtins
import functools
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from mutations import refusals, run
from mutations.refusals import CHECK, IF, UNLESS, Deletion, Watch

# Number of a watch -> tests in which it refuses; test -> its seconds.
Refusing = dict[int, set[str]]
Seconds = dict[str, float]
CAUGHT = "caught"


class Watcher:
    """A plugin of pytest that notes which watched values refuse in which tests."""

    def __init__(self, path: str) -> None:
        self.path, self.test = path, ""
        self.refusing: Refusing = defaultdict(set)
        self.seconds: Seconds = defaultdict(float)
        vars(builtins).update({IF: self._if, UNLESS: self._unless, CHECK: self._check})

    def _if(self, number: int, value: object) -> object:
        if value:
            self.refusing[number].add(self.test)
        return value

    def _unless(self, number: int, value: object) -> object:
        if not value:
            self.refusing[number].add(self.test)
        return value

    def _check(self, number: int, check: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(check)
        def watched(*args: Any, **kwargs: Any) -> object:
            return self._if(number, check(*args, **kwargs))

        return watched

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.test = nodeid

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        refusing = {number: sorted(tests) for number, tests in self.refusing.items()}
        Path(self.path).write_text(json.dumps([refusing, self.seconds]))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="", help="selects by file and text")
    parser.add_argument("--list", action="store_true", help="shows the deletions only")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="that run tests (one for each core)"
    )
    return parser.parse_args()


def main(word: str, list: bool, workers: int) -> int:
    os.environ.update(run.ENVIRONMENT)
    sys.dont_write_bytecode = True
    by_file = refusals.all_deletions()
    selected = [
        part
        for parts in by_file.values()
        for part in parts
        if word in str(part.mutant) and str(part.mutant) not in refusals.SURVIVORS
    ]
    if list or not selected:
        print(*(part.mutant for part in selected), f"{len(selected)} deletions", sep="\n")
        return 0
    began = time.perf_counter()
    run._import_what_no_bug_is_in()
    with (
        tempfile.TemporaryDirectory(prefix="mutations-") as folder,
        ProcessPoolExecutor(
            workers, multiprocessing.get_context("fork"), run._copy, (folder,)
        ) as pool,
    ):
        numbers = _numbers(by_file)
        refusing, seconds = _watch_all(pool, by_file, numbers, folder)
        outcomes = _delete_all(pool, selected, numbers, refusing, seconds)
    caught = [*outcomes.values()].count(CAUGHT)
    minutes = (time.perf_counter() - began) / 60
    print(f"{caught} of {len(outcomes)} deletions of refusals caught, {minutes:.1f} minutes")
    return int(caught < refusals.FLOOR * len(outcomes))


def _numbers(by_file: dict[str, list[Deletion]]) -> dict[str, dict[Watch, int]]:
    """A number for each watch of each file."""
    numbers: dict[str, dict[Watch, int]] = {}
    total = 0
    for file, parts in by_file.items():
        watches = sorted({watch for part in parts for watch in part.watches})
        numbers[file] = {watch: total + i for i, watch in enumerate(watches)}
        total += len(watches)
    return numbers


def _watch_all(
    pool: ProcessPoolExecutor,
    by_file: dict[str, list[Deletion]],
    numbers: dict[str, dict[Watch, int]],
    folder: str,
) -> tuple[Refusing, Seconds]:
    """In which tests each watch refuses, and how long tests take."""
    texts = {
        file: refusals.watched((run.ROOT / file).read_text(), numbers[file]) for file in by_file
    }
    files = [
        path.relative_to(run.ROOT).as_posix() for path in sorted(run.ROOT.glob(refusals.TESTS))
    ]
    refusing: Refusing = defaultdict(set)
    seconds: Seconds = {}
    runs = [
        pool.submit(_watch, file, texts, str(Path(folder, f"{i}.json")))
        for i, file in enumerate(files)
    ]
    for done, watching in enumerate(as_completed(runs), 1):
        code, log, (tests_by_number, seconds_by_test) = watching.result()
        if code not in (run.PASSED, run.NO_TESTS):
            sys.exit(f"tests fail as the tree is:\n{log}")
        for number, tests in tests_by_number.items():
            refusing[int(number)] |= set(tests)
        seconds |= seconds_by_test
        run._show(done, len(runs))
    run._show_nothing()
    return refusing, seconds


def _watch(tests: str, texts: dict[str, str], path: str) -> tuple[int, str, Any]:
    """pytest's exit code, the end of what it printed, and what a Watcher notes."""
    originals = {file: Path(file).read_text() for file in texts}
    try:
        for file, text in texts.items():
            Path(file).write_text(text)
        code, log = run._tests(Path.cwd(), tests, run.HEALTHY_SECONDS, Watcher(path))
    finally:
        for file, text in originals.items():
            Path(file).write_text(text)
    return code, log, json.loads(Path(path).read_text()) if Path(path).exists() else [{}, {}]


def _delete_all(
    pool: ProcessPoolExecutor,
    selected: list[Deletion],
    numbers: dict[str, dict[Watch, int]],
    refusing: Refusing,
    seconds: Seconds,
) -> dict[Deletion, str]:
    """What became of each deletion, printed as it ends."""
    outcomes: dict[Deletion, str] = {}
    runs = {}
    for part in selected:
        mutant = part.mutant
        watches = [numbers[mutant.file][watch] for watch in part.watches]
        tests = set().union(*(refusing[number] for number in watches)) - {""}
        if tests:
            by_length = sorted(tests, key=lambda test: seconds.get(test, 0.0))
            limit = 60 + int(5 * sum(seconds.get(test, 0.0) for test in tests))
            text = mutant.applied_to((run.ROOT / mutant.file).read_text())
            runs[pool.submit(_delete, shlex.join(by_length), limit, mutant.file, text)] = part
        else:
            outcomes[part] = "IT REFUSES IN NO TEST"
            print(f"{outcomes[part]}  {mutant}", flush=True)
    for deleting in as_completed(runs):
        part = runs[deleting]
        code, log, duration = deleting.result()
        outcomes[part] = run.OUTCOMES.get(code, f"BROKEN\n{log}")
        run._show_nothing()
        print(f"{outcomes[part]:12} {duration:5.1f} s  {part.mutant}", flush=True)
        run._show(len(outcomes), len(selected))
    run._show_nothing()
    return outcomes


def _delete(tests: str, limit: int, file: str, changed: str) -> tuple[int, str, float]:
    return run._run(tests, limit, file, changed)


if __name__ == "__mp_main__":  # a rank that a test starts: what refuses there is not noted
    Watcher("")
if __name__ == "__main__":
    sys.exit(main(**vars(arguments())))
