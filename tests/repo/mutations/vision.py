"""Bugs in models that read images, in their encoders, and in attention within packed sequences."""

from mutations import Bug


def bug(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/models/test_vision_models.py -k '{tests}'")


def mrope(old: str, new: str) -> Bug:
    return Bug("models/mrope.py", old, new, "tests/models/test_mrope.py")


def patches(old: str, new: str) -> Bug:
    return bug("models/vision_patches.py", old, new, "bit_for_bit")


def packed(file: str, old: str, new: str) -> Bug:
    return Bug(file, old, new, "tests/kernels/test_kernels.py -k '[varlen_attention-triton-'")


def lifted(old: str, new: str) -> Bug:
    return Bug(
        "passes/lift.py", old, new, "tests/passes/test_patch_embedding.py -k another_convolution"
    )


OURS = "embeddings_and_logits and ours and qwen3_vl"
STOCK = "embeddings_and_logits and stock and qwen3_vl"
BUGS = [
    mrope("position += max(h, w)", "position += t * h * w"),
    mrope("int(positions.max()) + 1 - num_tokens", "position - num_tokens"),
    patches("blocks.transpose(0, 2, 1, 3).reshape(-1)", "blocks.reshape(-1)"),
    patches("for frame in range(1, t + 1)", "for frame in (t,)"),
    patches("np.stack((share, 1 - share), -1)", "np.stack((1 - share, share), -1)"),
    patches("max(size - 1, 1)", "size"),
    bug("models/vision_patches.py", "array.flags.writeable = False", "pass", "computed_once"),
    bug("models/vision_patches.py", "[_frame(h, w, merge_size, table_side)] * t", "[_frame.__wrapped__(h, w, merge_size, table_side)] * t", "computed_once"),
    packed("atomc/kernels/triton/attention/varlen_attention.py", "causal=False", "causal=True"),
    packed("atomc/kernels/triton/attention/attention.py", "lowest_position = length - 1", "lowest_position = length"),
    packed("atomc/kernels/triton/attention/attention.py", "            last = length\n", "            last = last\n"),
    lifted('arguments["groups"] != 1\n        or ', ""),
    lifted('_any_but(0, arguments["padding"])', "False"),
    bug("models/mrope.py", "3 * self.section[axis] : 3", "self.section[axis] : 3", OURS),
    bug("models/qwen3_vl_vision.py", "self.levels.index(i)", "len(added)", OURS),
    bug("models/vision_language.py", "level.where(is_image.unsqueeze(-1), 0)", "level", OURS),
    bug("atomc/stock/vision.py", "visual_embeds.where(visual_pos_masks.unsqueeze(-1), 0)", "visual_embeds", STOCK),
    bug("atomc/stock/vision.py", "if reason := _why_unlike(type(text)):", "if reason := '':", "otherwise"),
    bug("atomc/encoder.py", "if self._refresh is not None:  # a user", "if not self._made:  # a user", "user_writes"),
    bug("atomc/quantization/kept_layers.py", " | _vision_encoders(model)", "", "stays_in_16_bits"),
    bug("runtime/execution/self_check.py", "set_attn_implementation(ours)", 'set_attn_implementation("atom")', "self_check"),
]  # fmt: skip
