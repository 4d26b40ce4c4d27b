"""Bugs in the limits of sampled tokens, in resets of the prefix cache, metrics and batch files."""

from mutations import Bug

PARAMS = "tests/test_generate_params.py"
FIELDS = "tests/test_server_fields.py"
SCHEDULER = "tests/test_scheduler.py tests/test_state_snapshots.py -k reset_forgets"
ALLOWED, BATCH = "runtime/allowed_tokens.py", "runtime/server/batch.py"

BUGS = [
    Bug(ALLOWED, "tokens[-length:]", "tokens[:length]", f"{PARAMS} -k bad_words"),
    Bug(ALLOWED, "*draft[:row]", "*draft[:0]", f"{PARAMS} -k bad_words"),
    Bug(ALLOWED, 'for prefix in ("", " ")', 'for prefix in ("",)', f"{PARAMS} -k bad_words"),
    Bug("runtime/token_masks.py", "            row += chunk.num_samples\n", "            row += 1\n", f"{PARAMS} -k 'only_allowed or bad_words'"),
    Bug("runtime/token_masks.py", "- allowed.num_context, request.num_prompt)", "- allowed.num_context, 0)", f"{PARAMS} -k bad_words_follow"),
    Bug("runtime/request_state.py", "self.allowed is not None and self.allowed.depends_on_output", "False", f"{PARAMS} -k bad_words"),
    Bug("runtime/prompt_truncation.py", "tokens[-kept:]", "tokens[:kept]", f"{PARAMS} -k long_prompts"),
    Bug("runtime/prefix_sharing.py", "            request.shares_prefix = False\n", "", SCHEDULER),
    Bug("runtime/snapshots.py", "request.shares_prefix and not end", "not end", SCHEDULER),
    Bug("runtime/server/metrics.py", '        "request_queue_time_seconds",\n        "spec', '        "spec', f"{FIELDS} -k metrics"),
    Bug(BATCH, "self.num_failed += status != 200", "pass", "tests/test_batch.py -k internal_error"),
    Bug(BATCH, "            self._places.release()\n", "            pass\n", "tests/test_batch.py -k waits_while"),
    Bug(BATCH, " and not isinstance(error, EngineLost)", "", "tests/test_batch.py -k waits_while"),
]  # fmt: skip
