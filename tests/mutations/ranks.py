"""Bugs in how several ranks run a model together."""

from mutations import Bug

RANKS = "tests/test_ranks.py"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"runtime/ranks/{file}.py", old, new, f"{RANKS} -k {tests}")


BUGS = [
    bug("agreement", "distributed.ReduceOp.MIN", "distributed.ReduceOp.MAX", "outputs_of_one"),
    bug("rank", "sample(_tensor(mask, num_rows))", "sample(None)", "outputs_of_one"),
    bug("interrupts", "signal.signal(signal.SIGINT, receive)", "pass", "ctrl_c"),
    bug("monitor", "(alike or not self.started)", "not self.started", "alike"),
]
