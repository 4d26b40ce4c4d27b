"""Workers get all tests, each group in one of them, and no groups pile up in their scheduler."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("xdist")

from group_scheduling import GroupScheduling

TESTS = [f"test_{number}" for number in range(40)] + [f"test_{number}@group" for number in "abcdef"]


class Worker:
    """What it was sent and has not run, by number."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.waiting: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled() -> tuple[Any, list[Worker]]:
    """A scheduler, and two workers with their first tests."""
    option = SimpleNamespace(loadscopereorder=True)
    config: Any = SimpleNamespace(option=option, getvalue=lambda name: ["popen", "popen"])
    scheduler, workers = GroupScheduling(config), [Worker("one"), Worker("two")]
    for worker in workers:
        scheduler.add_node(worker)  # type: ignore[arg-type]
        scheduler.add_node_collection(worker, TESTS)  # type: ignore[arg-type]
    scheduler.schedule()
    return scheduler, workers


def test_all_tests_run_once_and_groups_that_have_run_are_forgotten() -> None:
    scheduler, workers = scheduled()
    ran: dict[str, list[str]] = {"one": [], "two": []}
    while any(worker.waiting for worker in workers):
        for worker in filter(lambda worker: worker.waiting, workers):
            index = worker.waiting.pop(0)
            ran[worker.gateway.id].append(TESTS[index])
            scheduler.mark_test_complete(worker, index)
            assert sum(map(len, scheduler.assigned_work[worker].values())) <= 9
    assert sorted(ran["one"] + ran["two"]) == sorted(TESTS)
    assert {name.endswith("@group") for name in ran["two"]} == {False}
    assert scheduler.tests_finished and not scheduler.has_pending


def test_the_test_in_which_a_worker_ended_is_named() -> None:
    scheduler, (first, _) = scheduled()
    scheduler.mark_test_complete(first, first.waiting.pop(0))
    assert scheduler.remove_node(first) == TESTS[first.waiting[0]]
