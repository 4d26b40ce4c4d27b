"""Bugs in what sleeps, and in what wakes up."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str = "asleep_no") -> Bug:
    return Bug(f"{file}.py", old, new, f"tests/test_sleep.py -m '' -k {tests}")


BUGS = [
    bug("runtime/runner", "program.unbind()", "pass"),
    bug("runtime/runner", "self.draft.caches = []", "pass"),
    bug("runtime/runner", 'SequenceStates((), self._state_rows, "cpu"), []', "self._states, []"),
    bug("runtime/worker", "self.programs.hidden.unbind()", "pass"),
    bug("runtime/engine", "refuse_running(len(self.scheduler.requests))", "pass", "refused"),
    bug(
        "runtime/engine",
        "self.reset_prefix_cache()\n        self.executor.sleep()",
        "self.executor.sleep()",
    ),
    Bug(
        "runtime/ranks/rank.py",
        "worker.sleep()",
        "pass",
        "tests/test_ranks.py -m '' -k returns_the_memory",
    ),
    Bug(
        "runtime/server/engine_process.py",
        "self.engine.is_sleeping or not self",
        "not self",
        "tests/test_server_fields.py -k sleeps",
    ),
]
