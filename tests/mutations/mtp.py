"""Bugs in the drafts of a checkpoint's own draft layer."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/test_mtp.py -k '{tests}'")


WHOLE = "over_the_whole_sequence and chunks"
STEPS = "draft_steps_begin"
BUGS = [
    bug("models/mtp.py", "return logits, x_RD", "return logits, self.layer.shared_head.norm(x_RD)", WHOLE),
    bug("runtime/draft.py", "indices = indices + 1", "indices = indices + 0", WHOLE),
    bug("models/mtp.py", 'reads = ("model.norm",)', 'reads = ("model.layers.1",)', WHOLE),
    bug("runtime/scheduler.py", "request.tokens[end] if end < known else 0", "0", WHOLE),
    bug(
        "runtime/scheduler.py",
        "return min(num_tokens + self.lookahead, self.max_len)",
        "return num_tokens",
        "blocks_are_reserved",
    ),
    bug("runtime/batch.py", ".cumprod(-1).sum(-1)", ".sum(-1) * 0", STEPS),
    bug("runtime/batch.py", "written = drafting & (indices < ends)", "written = drafting", STEPS),
    bug("runtime/batch.py", "following.append(chunk.next_token)", "following.append(0)", STEPS),
    bug(
        "runtime/sampling/output_processor.py",
        "accepted(chunk.draft[: chunk.most_accepted], tokens)",
        "accepted(chunk.draft, tokens)",
        "exactly_its_average and 1.0",
    ),
    bug("runtime/speculative.py", "number * self.tokens + first", "number * self.tokens", "not_on_the_batch"),
    bug("runtime/scheduler.py", "request.num_drafts += 1", "pass", "exactly_its_average and 2.4"),
    bug("runtime/engine.py", "salt = f\"pooled {salt or \'\'}\"", "pass", "pooled"),
]  # fmt: skip
