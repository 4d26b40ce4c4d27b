"""Bugs in how threads and event loops share an LLM, and in what is refused before a start."""

from mutations import Bug

TESTS = "tests/runtime/test_turns.py -k"
WRONG = "tests/runtime/test_wrong_values.py -k"
BUGS = [
    Bug("runtime/turns.py", "        self._try_deferred()\n\n    def step_until", "        pass\n\n    def step_until", f"{TESTS} collected"),
    Bug("runtime/turns.py", "                    if interrupts is not None:\n                        interrupts.deliver()\n            finally:", "            finally:", f"{TESTS} another_runs"),
    Bug("runtime/turns.py", "if self.closed and not closed_too:", "if False:", f"{TESTS} close"),
    Bug("runtime/interrupts.py", "        interrupts.restore()\n", "        pass\n", f"{TESTS} signals"),
    Bug("runtime/async_calls.py", "                    call.fail(error)\n\n", "                    pass\n\n", f"{TESTS} event_loops"),
    Bug("runtime/calls.py", "error = self.error = None", "pass", f"{TESTS} dropped"),
    Bug("runtime/engine.py", "        self._in_flight.popleft()  #", "        pass  #", f"{TESTS} results"),
    Bug("runtime/engine.py", "partial(_grammar_compiler, config, loaded)", "lambda: _grammar_compiler(self.config, loaded)", f"{TESTS} dropped"),
    Bug("runtime/execution/loading/hub.py", "    read_config(folder)\n", "", f"{WRONG} 'no and config'"),
    Bug("runtime/execution/worker.py", "        _check_names(Options.of(config.options))\n", "", f"{WRONG} weight_is_read"),
    Bug("runtime/config.py", "        check_choices(self)\n", "", f"{WRONG} other_value"),
]  # fmt: skip
