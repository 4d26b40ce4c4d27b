"""Bugs in the scheduler: who runs next, with which blocks, snapshots, images and ranks."""

from mutations import Bug

SCHEDULER = "tests/runtime/scheduling/test_scheduler.py"
IMAGE_CACHE = "tests/runtime/scheduling/test_image_cache.py"
SNAPSHOTS = "tests/runtime/test_state_snapshots.py"
DATA_PARALLEL = "tests/runtime/scheduling/test_data_parallel.py"
IMAGES = "tests/runtime/test_images.py"
BUDGET = "tests/runtime/scheduling/test_prompt_budget.py"
DRAFTS = "tests/runtime/test_mtp.py"
LORA = "tests/runtime/execution/test_lora.py"


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(f"runtime/scheduling/{file}.py", old, new, tests)


BUGS = [
    bug(
        "blocks",
        "return -(-num_tokens // self.block_size)",
        "return num_tokens // self.block_size",
        "tests/runtime/scheduling/test_blocks.py tests/runtime/scheduling/test_scheduler.py",
    ),
    bug(
        "blocks",
        "self.ref_counts[block] += 1",
        "self.ref_counts[block] = 1",
        "tests/runtime/scheduling/test_blocks.py tests/runtime/scheduling/test_scheduler.py",
    ),
    bug(
        "blocks",
        "for block in reversed(table.blocks):",
        "for block in reversed(table.blocks[1:]):",
        "tests/runtime/scheduling/test_blocks.py tests/runtime/scheduling/test_scheduler.py",
    ),
    bug(
        "chunks",
        "start, end = request.computed, request.computed + count",
        "start, end = request.computed, request.computed + count + 1",
        SCHEDULER,
    ),
    bug("chunks", "first - start, first - image.start,", "first - start, 0,", IMAGE_CACHE),
    bug(
        "chunks",
        "request.tokens[end] if end < num_known else 0",
        "0",
        f"{DRAFTS} -k 'over_the_whole_sequence and chunks'",
    ),
    bug("chunks", "request.num_drafts += 1", "pass", f"{DRAFTS} -k 'exactly_its_average and 2.4'"),
    bug(
        "chunks",
        "request.computed = chunk.start\n            request.state_from",
        "request.computed -= count\n            request.state_from",
        f"{SNAPSHOTS} -k 'rejected_give and some'",
    ),
    bug(
        "chunks",
        "            request.state_from = self.state_rows.row_before_draft(request.slot)\n",
        "",
        f"{SNAPSHOTS} -k 'rejected_give and some'",
    ),
    bug(
        "chunks",
        "return None if row == request.state_from else row",
        "return row",
        f"{SNAPSHOTS} -k 'rejected_draft_goes_back'",
    ),
    bug(
        "data_parallel",
        "key=lambda rank: len(rank.requests)",
        "key=lambda rank: 0",
        f"{DATA_PARALLEL} -k fewest",
    ),
    bug(
        "data_parallel",
        "        if prompt != of_last:\n",
        "        if True:\n",
        f"{DATA_PARALLEL} -k choices",
    ),
    bug(
        "data_parallel",
        "list(islice(of_chunks, len(part.chunks)))",
        "list(tokens)",
        f"{DATA_PARALLEL} -k random",
    ),
    bug(
        "data_parallel",
        "list(islice(of_rows, part.num_decoding))",
        "list(decoded)",
        f"{DATA_PARALLEL} -k random",
    ),
    bug(
        "data_parallel",
        "(waiting := len(self.waiting))",
        "(waiting := 0)",
        f"{DATA_PARALLEL} -k queue",
    ),
    bug("image_cache", "        self._kept.add(digest)\n", "", IMAGE_CACHE),
    bug("image_cache", "set(kept) if self.held else set()", "set()", IMAGE_CACHE),
    bug("image_cache", "        self._dropped.update(dropped)\n", "", IMAGE_CACHE),
    bug("image_cache", "            self._patches -= image.num_patches\n", "", IMAGE_CACHE),
    bug(
        "image_cache", "        self.held.move_to_end(digest)\n", "", f"{IMAGES} -k least_recently"
    ),
    bug(
        "image_cache",
        "return max(image.start - start, 0)",
        "return image.start - start or 1",
        IMAGE_CACHE,
    ),
    bug(
        "prefix_cache",
        "overlapping(request.images, start, end) if request.images else ():",
        "():",
        f"{IMAGES} -k 'share_no_block'",
    ),
    bug(
        "prefix_cache",
        "[image.start, len(image.digest)]",
        "[0, len(image.digest)]",
        f"{IMAGE_CACHE} -k keys",
    ),
    bug(
        "prefix_cache",
        'b"" if request.lora is None else b"lora %d " % request.lora.identity',
        'b""',
        f"{LORA} -k 'one_load'",
    ),
    bug(
        "prefix_sharing",
        "            request.shares_prefix = False\n",
        "",
        "tests/runtime/scheduling/test_scheduler.py tests/runtime/test_state_snapshots.py -k reset_forgets",
    ),
    bug(
        "prefix_sharing",
        "keys = request.keys[: (len(request.tokens) - 1) // self.pool.block_size]",
        "keys = request.keys[: len(request.tokens) // self.pool.block_size]",
        SCHEDULER,
    ),
    bug("prefix_cache", "request.lora.identity", "request.lora.number", f"{LORA} -k 'one_load'"),
    bug(
        "prefix_sharing",
        "                self.snapshots.evict(key)\n",
        "                pass\n",
        f"{SNAPSHOTS} -k 'nan'",
    ),
    bug("request_queues", "_free_slots.append(request.slot)", "_free_slots.append(0)", SCHEDULER),
    bug(
        "request_queues",
        "request.slot = request.state_from = None",
        "request.slot = None",
        f"{SNAPSHOTS} -k 'preempted_request_forgets'",
    ),
    bug(
        "scheduler",
        "        self.images.clear()\n\n    def evict",
        "\n    def evict",
        f"{IMAGES} -k that_is_updated",
    ),
    bug("scheduler", "request.computed = 0\n", "request.computed = 1\n", SCHEDULER),
    bug("scheduler", "self.images.undo(step.images, step.dropped)", "pass", IMAGE_CACHE),
    bug(
        "scheduler",
        "        self.pixels.remove(request.images)\n",
        "",
        f"{IMAGES} -k 'size_is_limited'",
    ),
    bug(
        "scheduler",
        "                self.images.forget(image.digest)",
        "                pass",
        f"{IMAGES} -k 'nan or encoder_that_fails'",
    ),
    bug(
        "scheduler",
        "return min(num_tokens + self.lookahead, self.max_len)",
        "return num_tokens",
        f"{DRAFTS} -k 'blocks_are_reserved'",
    ),
    bug(
        "scheduler",
        "            request.draft = ()  # the state after it",
        "            pass  # the state after it",
        f"{SNAPSHOTS} -k 'place_of_a_draft'",
    ),
    bug(
        "scheduler",
        "row, None if failed else request,",
        "row, request,",
        f"{SNAPSHOTS} -k 'fails_in_a_step'",
    ),
    bug(
        "scheduler",
        "            self.snapshots.drop(row)\n",
        "            pass\n",
        f"{SNAPSHOTS} -k 'step_that_is_undone'",
    ),
    bug(
        "scheduler",
        "(start + 1) % block_size in borders and",
        "False and",
        f"{SCHEDULER} -k 'behind_a_window or Machine'",
    ),
    bug(
        "scheduler",
        "and start < request.max_length - 1",
        "and start < request.max_length",
        f"{SCHEDULER} -k 'before_the_tokens or Machine'",
    ),
    bug(
        "scheduler",
        "count = min([count, *ahead])",
        "pass",
        f"{SNAPSHOTS} -k 'answers_of_one_prompt'",
    ),
    bug(
        "snapshots",
        "request.shares_prefix and not end",
        "not end",
        "tests/runtime/scheduling/test_scheduler.py tests/runtime/test_state_snapshots.py -k reset_forgets",
    ),
    bug("snapshots", "if cached == count:", "if cached:", f"{SNAPSHOTS} -k 'all_blocks_before'"),
    bug(
        "snapshots",
        "snapshot.used, request.state_from = True, snapshot.row",
        "request.state_from = snapshot.row",
        f"{SNAPSHOTS} -k 'another_request_used'",
    ),
    bug(
        "snapshots",
        "            self._by_key.move_to_end(key)\n        request",
        "        request",
        f"{SNAPSHOTS} -k 'least_recently'",
    ),
    bug("snapshots", "request.last_snapshot = end", "pass", f"{SNAPSHOTS} -k 'moves_along'"),
    bug(
        "snapshots",
        "num_seen = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._seen), 0)",
        "num_seen = 0",
        f"{SNAPSHOTS} -k 'third_prompt'",
    ),
    bug(
        "snapshots",
        "if end - last >= self.least:",
        "if end > last:",
        f"{SNAPSHOTS} -k 'too_few_tokens'",
    ),
    bug(
        "snapshots",
        "self.evict(request.moving_snapshot, unused=True)",
        "pass",
        f"{SNAPSHOTS} -k 'moves_along'",
    ),
    bug(
        "speculative",
        "number * self.tokens + first",
        "number * self.tokens",
        f"{DRAFTS} -k 'not_on_the_batch'",
    ),
    bug(
        "state_rows",
        "return self.slots + SPARE_SLOTS + slot",
        "return self.slots + slot",
        f"{SNAPSHOTS} -k 'rows_of_states'",
    ),
    bug(
        "stats",
        "min(getattr(stats, name)",
        "max(getattr(stats, name)",
        "tests/runtime/server/engines/test_server_dp.py -k stats_of_engines",
    ),
    bug(
        "chunks",
        "self.prompts -= chunk.num_prompt_tokens",
        "pass",
        f"{SCHEDULER} -k 'leaves_room or Machine'",
    ),
    bug("prompt_budget", "self._padded(least)", "least", f"{BUDGET} -k filled"),
    bug("prompt_budget", "self._padded(rows + 1))", "rows)", f"{BUDGET} -k expected"),
    bug(
        "prompt_budget",
        "SLOPE_WEIGHT * share**3",
        "share",
        f"{BUDGET} -k small_steps",
    ),
    bug(
        "step",
        "self.parts[rank]._replace(size=self.padded_size)",
        "self.parts[rank]",
        f"{DATA_PARALLEL} -k 'pad or empty'",
    ),
    bug(
        "step",
        "slice(first, first + self.parts[rank].num_samples)",
        "slice(0, self.parts[rank].num_samples)",
        f"{DATA_PARALLEL} -k mask",
    ),
    bug(
        "step",
        "copies.append((source, chunk.state_kept))",
        "copies.append((chunk.slot, chunk.state_kept))",
        f"{SNAPSHOTS} -k 'what_a_step_copies'",
    ),
    bug("chunks", "self.budget -= chunk.num_tokens", "self.budget -= 1", SCHEDULER),
]
