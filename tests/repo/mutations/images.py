"""Bugs in the scheduling of images, their embeddings, positions and prefix keys."""

from mutations import Bug

DECISIONS = "tests/runtime/scheduling/test_image_cache.py"


def served(file: str, old: str, new: str, tests: str) -> Bug:
    return Bug(file, old, new, f"tests/runtime/test_images.py -k '{tests}'")


def encoder(old: str, new: str, tests: str) -> Bug:
    return Bug(
        "runtime/execution/images/encoder_graphs.py",
        old,
        new,
        f"tests/runtime/execution/test_encoder_graphs.py -k '{tests}'",
    )


def graphs(old: str, new: str, tests: str) -> Bug:
    return Bug(
        "runtime/execution/runner.py",
        old,
        new,
        f"tests/runtime/execution/test_image_graphs.py -k '{tests}'",
    )


BUGS = [
    # Equal tokens with other images share blocks; the same image elsewhere does.
    served("runtime/scheduling/prefix_cache.py", "overlapping(images, start, end):", "():", "share_no_block"),
    Bug("runtime/scheduling/prefix_cache.py", "[image.start, len(image.digest)]", "[0, len(image.digest)]", f"{DECISIONS} -k keys"),
    Bug("runtime/requests/prompt_image.py", "bisect_right(images, start,", "bisect_left(images, start,", DECISIONS),
    # Embeddings that a chunk reads are dropped, or never made.
    Bug("runtime/scheduling/image_cache.py", "        self._kept.add(digest)\n", "", DECISIONS),
    Bug("runtime/scheduling/image_cache.py", "set(kept) if self.held else set()", "set()", DECISIONS),
    Bug("runtime/scheduling/image_cache.py", "        self._dropped.update(dropped)\n", "", DECISIONS),
    Bug("runtime/scheduling/image_cache.py", "            self._patches -= image.num_patches\n", "", DECISIONS),
    Bug("runtime/scheduling/image_cache.py", "        self.held.move_to_end(digest)\n", "", "tests/runtime/test_images.py -k least_recently"),
    Bug("runtime/scheduling/scheduler.py", "self.images.undo(step.images, step.dropped)", "pass", DECISIONS),
    Bug("runtime/scheduling/chunks.py", "first - start, first - image.start,", "first - start, 0,", DECISIONS),
    Bug("runtime/scheduling/image_cache.py", "return max(image.start - start, 0)", "return image.start - start or 1", DECISIONS),
    served("runtime/scheduling/scheduler.py", "        self.pixels.remove(request.images)\n", "", "size_is_limited"),
    # Rows and positions.
    served("runtime/execution/images/encoder.py", "        into[: step.num_tokens].zero_()\n", "", "zero"),
    served("runtime/execution/rope_positions.py", "        self.deltas[slot] = 0\n", "", "three_axes"),
    served("runtime/execution/rope_positions.py", "positions.numpy(), delta", "positions.numpy(), 0", "any_size and 16"),
    served("runtime/execution/input_batch.py", "(indices + at[\"draft_deltas\"][:sequences])", "indices", "draft_steps"),
    served("runtime/execution/input_batch.py", "self.rope is None else at[\"indices\"])[last]", "self.rope is None else step.positions[0])[last]", "draft_steps"),
    # The pinned memory of pixels.
    served("runtime/execution/images/encoder.py", "        self._copied.synchronize()\n", "", "pinned_memory"),
    served("runtime/execution/images/encoder.py", "            pinned.record_copy()\n", "            pass\n", "pinned_memory"),
    served("runtime/execution/images/encoder.py", "if self._memory.numel() < rows * width:", "if True:", "pinned_memory"),
    # CUDA graphs of steps with images.
    graphs("self.image_program, self.image_graphs,", "self.image_program, self.graphs,", "any_size and 16"),
    graphs("self.draft_graphs = self.image_graphs = None", "self.draft_graphs = None", "asleep"),
    graphs("            self.input_batch.embeddings[rows : shape.rows].zero_()", "            pass", "padding"),
    graphs("captured.sort(key=lambda shape: shape.wanted)", "pass", "no_decode"),
    graphs("and not self.image_program.syncing", "", "waits_for"),
    graphs("[s for s in captured if s.rows > s.sequences and not s.is_decode]", "captured", "no_decode"),
    graphs("if self.graphs is None else why_syncing(program.syncing)", "", "waits_for"),
    Bug("runtime/execution/graphs.py", "agree(budget - pool.bytes) <= 0", "agree(budget) <= 0", "tests/runtime/execution/test_image_graphs.py -k captured_first"),
    # CUDA graphs of the encoder.
    encoder("self._pixels[: len(pixels)].copy_(pixels)", "pass", "came_twice"),
    encoder("return graph.captured.replay().clone()", "return graph.captured.replay()", "came_twice"),
    encoder("            self.captured.move_to_end(key)\n", "", "few_graphs"),
    encoder("            graph.last_call = self._calls\n", "", "few_graphs"),
    encoder("            self._seen.popitem(last=False)\n", "            pass\n", "few_graphs"),
    encoder("self.pool.bytes + size > self.budget", "self.pool.bytes > self.budget", "large_images"),
    encoder("if self.why_not or len(pixels)", "if len(pixels)", "cannot_be_captured"),
    Bug("atomc/encoder.py", "if self._refresh is not None:\n            return", "if False:\n            return", "tests/runtime/execution/test_encoder_graphs.py -k others_may_write"),
    encoder("_Graph(captured, patches, self._calls)", "_Graph(captured, None, self._calls)", "is_held"),
    Bug("runtime/execution/worker.py", "            self.encoder.drop_graphs()\n", "", "tests/runtime/execution/test_encoder_graphs.py -k sleeps"),
    # One request hurts another.
    served("runtime/execution/images/encoder.py", "            self._encode_alone(step.images, error)", "            raise", "encoder_that_fails"),
    served("runtime/scheduling/scheduler.py", "                self.images.forget(image.digest)", "                pass", "nan or encoder_that_fails"),
    Bug("atomc/cache/model_fingerprint.py", "        \"inputs\": str(takes),\n", "", "tests/cache/test_model_cache.py -k other_inputs"),
    Bug("atomc/cache/model_fingerprint.py", "and wrapped.__code__.co_filename.startswith(_PACKAGE)", "", "tests/cache/test_model_cache.py -k only_if_it_is_ours"),
]  # fmt: skip
