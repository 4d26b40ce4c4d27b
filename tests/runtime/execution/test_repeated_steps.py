"""Steps of the engine without a CUDA graph that are repeated without their Python; on a CPU with
kernels in Triton's interpreter.
"""

import gc
import random
import weakref

import pytest
import torch

from atomc.loading import loader
from atomc.loading.create_model import create_model
from atomc.ops.state import block_size_of
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.replay import repeated
from atomc.runtime.execution.graphs import step_shapes
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

IS_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if IS_GPU else []
# Of the largest logit; products on a GPU may be in TF32.
TOLERANCE = 2e-2 if IS_GPU else 1e-4
VOCAB, BLOCKS, ROWS, SEQUENCES = 101, 4, 32, 4
CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "dtype": "float32",
}


def runner_of(**options):
    torch.manual_seed(0)
    model = create_model(CONFIG)
    for parameter in model.parameters():
        parameter.data.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    loader.ready(model)
    how = {"strict": True, "cache": False, "glue": "eager", "providers": ["triton", "torch"]}
    platform = Platform.detect("cuda") if IS_GPU else Platform.named("h200")
    program = compile_model(model.to("cuda" if IS_GPU else "cpu"), {**how, **options}, platform)
    runner = Runner(
        Programs({"text": program}),
        num_blocks=SEQUENCES * BLOCKS,
        block_size=block_size_of(program.specs),
        max_num_seqs=SEQUENCES,
        max_num_rows=ROWS,
        max_columns=BLOCKS,
    )
    runner.shapes = sorted(step_shapes(SEQUENCES, ROWS, BLOCKS))
    return runner


class Sequences:
    """Random tokens of sequences, in steps."""

    def __init__(self, seed=0):
        self.random, self.lengths = random.Random(seed), {}

    def chunk(self, slot, num_tokens, start=0):
        blocks = range(slot * BLOCKS, (slot + 1) * BLOCKS) if not start else ()
        self.lengths[slot] = start + num_tokens
        tokens = tuple(self.random.randrange(VOCAB) for _ in range(num_tokens))
        at = (0 if not start else BLOCKS, tuple(blocks))
        return Chunk(str(slot), slot, tokens, start, (at,), num_samples=1, num_output_rows=1)

    def prompts(self, *lengths):
        return ScheduledStep(tuple(self.chunk(i, length) for i, length in enumerate(lengths)))

    def decode(self):
        return ScheduledStep(tuple(self.chunk(i, 1, n) for i, n in self.lengths.items()))


def logits_of(runner, seed=0, decodes=2):
    """The logits of prompts and of tokens after them, in steps of different sizes."""
    sequences, logits = Sequences(seed), []
    for lengths in ((5, 9), (7,), (12, 3, 2), (11,)):
        sequences.lengths.clear()
        logits.append(runner.logits(sequences.prompts(*lengths)))
        logits += [runner.logits(sequences.decode()) for _ in range(decodes)]
    return logits


def assert_close(logits, expected):
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.fixture(scope="module")
def plain():
    return runner_of(repeat=False)


def test_repeated_steps_have_the_logits_of_others_and_keep_them(plain):
    runner = runner_of()
    assert runner.program.repeats and not plain.program.repeats
    for seed in range(2):
        results = logits_of(runner, seed)
        copies = [one.clone() for one in results]
        expected = [one.clone() for one in logits_of(plain, seed)]
        for one, copy, other in zip(results, copies, expected, strict=True):
            assert torch.equal(one, copy)
            assert_close(one, other)
    assert runner.program.report.repeated and not plain.program.report.repeated
    tapes = runner.program._repeated.tapes
    # Those of prompts, and of decode steps of one and of two sequences, have come four times.
    assert len([tape for tape in tapes.values() if tape is not None]) >= 2


def test_sizes_without_a_shape_run_as_they_are(plain):
    runner = runner_of()
    runner.shapes = runner.shapes[:2]
    results, expected = logits_of(runner, decodes=1), logits_of(plain, decodes=1)
    for one, other in zip(results, expected, strict=True):
        assert_close(one, other)
    shapes = {kind[-1] for kind in runner.program._repeated.attempts}
    assert len(shapes) <= 2


def test_what_a_graph_captures_is_not_repeated():
    runner = runner_of()
    (shape,) = [shape for shape in runner.shapes if shape.rows == 2]
    for _ in range(5):
        runner.empty_step(shape)
    assert runner.program._repeated is None


def test_other_tensors_of_state_are_other_steps():
    runner = runner_of()
    first = logits_of(runner, decodes=0)
    assert runner.program.report.repeated
    old = weakref.ref(runner.program._repeated)
    runner.free()
    gc.collect()
    assert old() is None and not runner.program.report.repeated
    runner.allocate()
    for one, other in zip(logits_of(runner, decodes=0), first, strict=True):
        assert_close(one, other)


def test_steps_that_cannot_be_repeated_are_no_longer_padded(monkeypatch, plain):
    def unlike(first, second, **how):
        raise repeated.Unrepeatable("they differ")

    monkeypatch.setattr(repeated, "tape_of", unlike)
    runner = runner_of()
    step = Sequences().prompts(5, 9)
    for number in range(7):
        assert_close(runner.logits(step), plain.logits(step))
        assert (runner._shape.rows == ROWS) == (number < 5), number
    assert not runner.program.repeats
    assert "they differ" in runner.program.report.notes[-1]
