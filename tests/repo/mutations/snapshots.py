"""Bugs in what the runtime does with state per sequence: snapshots, drafts, rows."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/runtime/test_state_snapshots.py -k '{tests}'")


ALONE = "start_from_snapshots_give and some"
DRAFTS = "rejected_give and some"
BUGS = [
    bug("runtime/execution/runner.py", "self._states.copy(step.copies_before)\n        if", "if", ALONE),
    bug("runtime/execution/runner.py", "self._states.copy(step.copies_before)\n        if", "if", "embeddings"),
    bug("runtime/execution/sequence_states.py", "for stacked in self._stacked:", "for stacked in self._stacked[:1]:", "copy_moves"),
    bug("runtime/execution/sequence_states.py", "(run[0] + run[2], run[1] + run[2])", "(source, run[1] + run[2])", "copy_moves"),
    bug("runtime/scheduling/chunks.py", "request.computed = chunk.start\n            request.state_from", "request.computed -= count\n            request.state_from", DRAFTS),
    bug("runtime/scheduling/chunks.py", "            request.state_from = self.state_rows.before_draft(request.slot)\n", "", DRAFTS),
    bug("runtime/scheduling/chunks.py", "return None if row == request.state_from else row", "return row", "rejected_draft_goes_back"),
    bug("runtime/scheduling/request_queues.py", "request.slot = request.state_from = None", "request.slot = None", "preempted_request_forgets"),
    bug("runtime/scheduling/scheduler.py", "            request.draft = ()  # the state after it", "            pass  # the state after it", "place_of_a_draft"),
    bug("runtime/scheduling/scheduler.py", "None if failed else request, chunk.end", "request, chunk.end", "fails_in_a_step"),
    bug("runtime/scheduling/snapshots.py", "if cached == count:", "if cached:", "all_blocks_before"),
    bug("runtime/scheduling/snapshots.py", "snapshot.used, request.state_from = True, snapshot.row", "request.state_from = snapshot.row", "another_request_used"),
    bug("runtime/scheduling/snapshots.py", "            self._by_key.move_to_end(key)\n        request", "        request", "least_recently"),
    bug("runtime/scheduling/snapshots.py", "request.last_snapshot = end", "pass", "moves_along"),
    bug("runtime/scheduling/state_rows.py", "return self.slots + SPARE_SLOTS + slot", "return self.slots + slot", "rows_of_states"),
    bug("runtime/scheduling/scheduler.py", "                self.snapshots.drop(chunk.snapshot)\n", "                pass\n", "step_that_is_undone"),
    bug("runtime/scheduling/prefix_sharing.py", "                self.snapshots.evict(key)\n", "                pass\n", "nan"),
    bug("runtime/scheduling/scheduler.py", "count = min([count, *ahead])", "pass", "answers_of_one_prompt"),
    bug("runtime/scheduling/snapshots.py", "known = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._seen), 0)", "known = 0", "third_prompt"),
    bug("runtime/scheduling/snapshots.py", "if end - last >= self.least:", "if end > last:", "too_few_tokens"),
    bug("runtime/scheduling/snapshots.py", "self.evict(request.moving_snapshot, unused=True)", "pass", "moves_along"),
    bug("runtime/scheduling/step.py", "copies.append((source, chunk.state_kept))", "copies.append((chunk.slot, chunk.state_kept))", "what_a_step_copies"),
    bug("runtime/execution/capacity.py", "left = room - rows.total * bytes_per_sequence", "left = room - rows.slots * bytes_per_sequence", "beside_the_slots"),
    bug("runtime/execution/graphs.py", "for again in ((0, drafts) if rewinds else (0,))", "for again in (0,)", "graphs_of_their_own"),
    bug("runtime/engine.py", "if request.pending <= 1 + redone and", "if", "bounded"),
]  # fmt: skip
