"""Bugs in what clients of the server notice: streams, resets of the prefix cache, batch files."""

from mutations import Bug

SCHEDULER = "tests/runtime/scheduling/test_scheduler.py tests/runtime/test_state_snapshots.py -k reset_forgets"
BATCH = "runtime/server/openai/run_batch.py"

TRACES = "tests/runtime/server/test_traces.py -k below_the_clients"

ROLLOUTS = "tests/runtime/test_rollouts.py -k"
GIVEN = "runtime/execution/views/user_module.py"
CLOSED = "tests/runtime/constrained/test_closed_schema.py"

BUGS = [
    Bug("runtime/engine.py", "and self.executor.check()", "and self.executor.check() is None", f"{ROLLOUTS} optimizer"),
    Bug(GIVEN, "            with evaluation_mode(self._module):\n                yield", "            yield", f"{ROLLOUTS} dropout"),
    Bug(GIVEN, "if id(parameter) not in known:", "if False:", f"{ROLLOUTS} other_storage"),
    Bug("runtime/constrained/closed_schema.py", "not one.excludes(other)", "one", CLOSED),
    Bug("runtime/constrained/closed_schema.py", "waiting += _combined_parts(applied)", "pass", CLOSED),
    Bug("runtime/server/service/generation.py", "            self._raise_error(output)\n", "", "tests/runtime/server/test_generation.py"),
    Bug("runtime/torch_modes.py", "torch.autocast(kind, enabled=False)", "torch.no_grad()", f"{ROLLOUTS} change_no_request"),
    Bug("runtime/torch_modes.py", "torch.inference_mode(False)", "torch.no_grad()", f"{ROLLOUTS} inside_and_outside"),
    Bug("runtime/engine.py", "if not self.scheduler.requests and", "if not self.has_work and", f"{ROLLOUTS} stop_token"),
    Bug(GIVEN, "return before != self._writes", "return False", f"{ROLLOUTS} optimizer"),
    Bug("runtime/execution/worker.py", "for program in self.programs.all", "for program in self.programs.of_steps", f"{ROLLOUTS} pooled"),
    Bug("runtime/scheduling/scheduler.py", "        self.images.clear()\n\n    def evict", "\n    def evict", "tests/runtime/test_images.py -k that_is_updated"),
    Bug(GIVEN, "self._borrowed.own.set_in", "self._borrowed.ours.set_in", f"{ROLLOUTS} own_attention"),
    Bug("runtime/server/service/traces.py", "context=self._propagator.extract(dict(headers)),", "", TRACES),
    Bug("runtime/server/service/traces.py", "self._provider.shutdown()", "pass", TRACES),
    Bug("runtime/server/service/traces.py", "- round(request.seconds * 1e9)", "", TRACES),
    Bug("runtime/server/service/sampling.py", "if one not in requested:", "if True:", "tests/runtime/server/test_server.py -k say_the_same"),
    Bug("runtime/server/chat/chat.py", "    return mode.structured", "    return structured or mode.structured", "tests/runtime/server/protocols/test_responses.py -k forced_call_needs"),
    Bug("runtime/server/http/responses.py", "            self._close()", "", "tests/runtime/server/http/test_event_stream.py"),
    Bug("runtime/server/http/request_body.py", "            await discard()\n", "", "tests/runtime/server/http/test_unread_body.py"),
    Bug("runtime/server/http/request_body.py", "if complete or not", "if not", "tests/runtime/server/http/test_unread_body.py"),
    Bug("runtime/scheduling/prefix_sharing.py", "            request.shares_prefix = False\n", "", SCHEDULER),
    Bug("runtime/scheduling/snapshots.py", "request.shares_prefix and not end", "not end", SCHEDULER),
    Bug(BATCH, "self.num_failed += status != 200", "pass", "tests/runtime/server/protocols/test_batch.py -k internal_error"),
    Bug(BATCH, " and not isinstance(error, EngineLost)", "", "tests/runtime/server/protocols/test_batch.py -k waits_while"),
]  # fmt: skip
