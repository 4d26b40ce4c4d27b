"""Bugs in the drafts of a checkpoint's own draft layer, in either form."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/runtime/test_mtp.py -k '{tests}'")


def of_qwen(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/models/test_mtp_qwen.py -k '{tests}'")


def of_images(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/runtime/test_mtp_images.py -k '{tests}'")


def of_cache(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/runtime/execution/test_encoder_cache.py -k '{tests}'")


WHOLE = "over_the_whole_sequence and chunks"
STEPS = "draft_steps_begin"
WRITTEN = "computes_as_written and next"
IMAGES = "next_tokens_of_each_chunk"
BUGS = [
    bug("models/mtp.py", "return self.shared_head.norm(x_RD), x_RD", "return self.shared_head.norm(x_RD), self.shared_head.norm(x_RD)", "computes_as_written"),
    bug("runtime/execution/draft.py", "indices = indices + 1", "indices = indices + 0", WHOLE),
    bug("runtime/scheduling/chunks.py", "request.tokens[end] if end < known else 0", "0", WHOLE),
    bug(
        "runtime/scheduling/scheduler.py",
        "return min(num_tokens + self.lookahead, self.max_len)",
        "return num_tokens",
        "blocks_are_reserved",
    ),
    bug("runtime/execution/input_batch.py", ".cumprod(-1).sum(-1)", ".sum(-1) * 0", STEPS),
    bug("runtime/execution/input_batch.py", "written = drafting & (indices < ends)", "written = drafting", STEPS),
    bug("runtime/execution/input_batch.py", "following.append(chunk.next_token)", "following.append(0)", STEPS),
    bug(
        "runtime/execution/output_processor.py",
        "accepted(chunk.draft[: chunk.most_accepted], tokens)",
        "accepted(chunk.draft, tokens)",
        "exactly_its_average and 1.0",
    ),
    bug("runtime/scheduling/speculative.py", "number * self.tokens + first", "number * self.tokens", "not_on_the_batch"),
    bug("runtime/scheduling/chunks.py", "request.num_drafts += 1", "pass", "exactly_its_average and 2.4"),
    bug("runtime/engine.py", "salt = f\"pooled {salt or \'\'}\"", "pass", "pooled"),
    of_qwen("models/mtp.py", "torch.cat([embeddings_TD, self.pre_fc_norm_hidden(hidden_TD)], -1)", "torch.cat([self.pre_fc_norm_hidden(hidden_TD), embeddings_TD], -1)", WRITTEN),
    of_qwen("models/mtp.py", "embeddings_TD = self.pre_fc_norm_embedding(embeddings_TD)", "embeddings_TD = self.pre_fc_norm_hidden(embeddings_TD)", WRITTEN),
    of_qwen("models/mtp.py", "self.pre_fc_norm_hidden = OnePlusRMSNorm", "self.pre_fc_norm_hidden = RMSNorm", WRITTEN),
    of_qwen("models/mtp.py", "return normed_RD, normed_RD", "return normed_RD, x_RD", WRITTEN),
    of_qwen("models/mtp.py", "return normed_RD, normed_RD", "return x_RD, normed_RD", WRITTEN),
    of_qwen("models/mtp.py", '= ("model.norm",)', '= ("model.layers.1",)', "before_the_models_head"),
    of_qwen("models/mtp.py", 'field, 1), field, "mtp."', 'field, 0), field, "mtp."', "need_no_field"),
    of_qwen("models/mtp.py", 'only(text, "mtp_use_dedicated_embeddings", False)', "pass", "other_draft_layers"),
    of_qwen("atomc/loading/load_plan.py", "part[0] not in modules", "True", "without_the_draft_layer"),
    of_qwen("models/qwen3_next.py", "experts=bool(config.moe_layers)", "experts=False", "is_a_layer_of_the_model"),
    of_images("runtime/execution/input_batch.py", "following = self.embeddings[:rows].roll(-1, 0)", "following = self.embeddings[:rows]", IMAGES),
    of_images("runtime/execution/input_batch.py", "following = np.roll(mask, -1)", "following = mask.copy()", IMAGES),
    of_images("runtime/execution/input_batch.py", "following[bounds[1:] - 1] = False", "pass", IMAGES),
    of_cache("atomc/program.py", "        cache.store(loaded)", "        pass", "traces_no_encoder"),
    of_cache("atomc/cache/model_cache.py", '"arguments": list(traced.arguments)', '"arguments": [None] * len(traced.arguments)', "traces_no_encoder"),
    of_images("models/vision_language.py", "            x_TD, *_ = placed(x_TD, embeddings, is_image)", "            pass", "reads_the_embeddings"),
]  # fmt: skip
