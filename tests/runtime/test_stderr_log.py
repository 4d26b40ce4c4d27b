"""The log of servers: complete if something reads it, and harmless if nothing does."""

import os
import subprocess
import sys
import time

import pytest

from atomc.runtime.processes import stderr_log

SETUP = """
import logging, os, sys, time, warnings
from atomc.runtime.processes.stderr_log import exit_process, log_to_stderr
log_to_stderr("%(levelname)s %(message)s")
log = logging.getLogger("atomc.server")
"""
NOTE = " lines of the log were dropped: nothing read it\n"


def start(program, **more):
    return subprocess.Popen(
        [sys.executable, "-c", SETUP + program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("end", ["", "exit_process(3)", "sys.exit(3)"])
def test_all_lines_are_written_in_order_before_the_end(end, blocking):
    process = start(f"""
os.set_blocking(2, {blocking})
for i in range(900): log.error("line %d \\u00fc" + 200 * "x", i)
{end}
""")
    time.sleep(0.2)
    _, lines = process.communicate(timeout=60)
    assert lines.splitlines() == [f"ERROR line {i} \u00fc{200 * 'x'}" for i in range(900)]
    assert process.returncode == (3 if "exit" in end else 0)


def test_tracebacks_and_warnings_are_lines():
    process = start("warnings.warn('careful')\ntry: 1 / 0\nexcept Exception: log.exception('bad')")
    _, lines = process.communicate(timeout=60)
    assert "UserWarning: careful" in lines and "ERROR bad\nTraceback" in lines
    assert lines.endswith("ZeroDivisionError: division by zero\n")


def test_a_pipe_that_nothing_reads_blocks_nothing_and_its_lines_are_counted():
    lines = 3 * stderr_log.MAX_WAITING
    program = f"""
for i in range({lines}): log.error("%d " + 200 * "x", i)
print("done", flush=True)
sys.stdin.readline()
log.error("last")
"""
    process = start(program)
    assert process.stdout.readline() == "done\n"
    first = process.stderr.readline()
    process.stdin.write("\n")
    process.stdin.close()
    written = [first, *process.stderr]
    assert process.wait(60) == 0
    assert written.pop() == "ERROR last\n"
    numbers = [int(line.split()[1]) for line in written if line.startswith("ERROR")]
    notes = [line for line in written if not line.startswith("ERROR")]
    dropped = [int(note.removesuffix(NOTE)) for note in notes]
    assert sorted(set(numbers)) == numbers and dropped and all(dropped)
    assert len(numbers) + sum(dropped) == lines and len(numbers) >= stderr_log.MAX_WAITING


@pytest.mark.rotating
@pytest.mark.parametrize("end", ["", "exit_process(0)"])
def test_a_process_ends_although_nothing_reads_its_log(end):
    process = start(f"for i in range(900): log.error(400 * 'x')\n{end}")
    assert process.wait(60) == 0
    process.communicate()


def test_a_closed_pipe_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    program = [sys.executable, "-c", SETUP + "for i in range(9): log.error('x')\nprint('done')"]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=writing, timeout=60, check=True)
    os.close(writing)
    assert done.stdout == b"done\n"
