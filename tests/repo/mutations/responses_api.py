"""Bugs in the items of the Responses API and in the store of its responses."""

from mutations import Bug


def api(file: str, old: str, new: str, tests: str) -> Bug:
    path = f"runtime/server/{file}.py"
    return Bug(path, old, new, f"tests/runtime/server/protocols/test_responses.py -k '{tests}'")


BUGS = [
    api("service/response_store", "        self._kept.move_to_end(name)\n", "", "used_least_recently"),
    api("service/response_store", "self.num_bytes -= self._kept.pop(name)[1]", "self._kept.pop(name)", "used_least"),
    api("service/response_store", "        if num_bytes > self.max_bytes:\n            return\n", "", "drops_no_other"),
    api("service/response_store", " or len(self._kept) > self.max_responses:", ":", "bounds_the_number"),
    api("service/response_store", " or self._kept[name][0].caller != caller", "", "of_the_key"),
    api("responses/items", '(complete and kind != "function_call")', "complete", "items_of_one_turn"),
    api("responses/items", "            answer = None\n", "", "items_of_one_turn"),
    api("responses/events", "self.num_reasoning_tokens += self._num_tokens", "pass", "count_for_the_item"),
    api("responses/events", "        self._logprobs.clear()\n\n    def finish", "\n    def finish", "count_for_the_item"),
    api("responses/events", "        if not self._items:\n", "        if False:\n", "an_empty_message"),
]  # fmt: skip
