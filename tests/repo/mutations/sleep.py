"""Bugs in what sleeps, and in what wakes up."""

from mutations import Bug

TESTS = "tests/runtime/test_sleep.py -k"
# With a draft layer and state per sequence.
ALL_KINDS = "tests/runtime/test_sleep.py -m '' -k 'asleep_no and drafts'"

BUGS = [
    Bug("runtime/execution/runner.py", "program.unbind()", "pass", f"{TESTS} asleep_no"),
    Bug("runtime/execution/runner.py", "self.draft.caches = []", "pass", ALL_KINDS),
    Bug(
        "runtime/execution/runner.py",
        'SequenceStates((), self._state_rows, "cpu"), []',
        "self._states, []",
        ALL_KINDS,
    ),
    Bug(
        "runtime/execution/worker.py", "self.programs.hidden.unbind()", "pass", f"{TESTS} asleep_no"
    ),
    Bug(
        "runtime/engine.py",
        "refuse_running(len(self.scheduler.requests))",
        "pass",
        f"{TESTS} what_cannot",
    ),
    Bug(
        "runtime/engine.py",
        "self.reset_prefix_cache()\n        self.executor.sleep()",
        "self.executor.sleep()",
        f"{TESTS} asleep_no",
    ),
    Bug(
        "runtime/ranks/rank.py",
        "worker.sleep()",
        "pass",
        "tests/runtime/ranks/test_ranks.py -m '' -k returns_the_memory",
    ),
    Bug(
        "runtime/server/engines/engine_process.py",
        "self.engine.is_sleeping or not self",
        "not self",
        "tests/runtime/server/test_server_fields.py -k sleeps",
    ),
]
