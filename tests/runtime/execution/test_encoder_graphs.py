"""CUDA graphs of the vision encoder, without a GPU: as in test_image_graphs."""

import gc
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from test_image_graphs import GPU, GRAPH_BYTES, PoolOfCalls, memory
from test_mtp_images import WIDTH, image, tiny_model
from tiny_vl import made

from atomc.encoder import EncoderProgram, compile_encoder
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution.images import encoder_graphs
from atomc.runtime.execution.images.encoder import ImageEncoder
from atomc.runtime.execution.images.encoder_graphs import EncoderGraphs
from atomc.runtime.execution.images.model import ImageModel
from atomc.runtime.requests.sampling_params import SamplingParams

__all__ = ["memory"]  # the fixture
pytestmark = pytest.mark.xdist_group("mtp_images")
ONE, TWO, OTHER = [(1, 4, 6)], [(1, 4, 6), (1, 8, 4)], [(1, 2, 10)]
OPTIONS = {"strict": True, "glue": "eager"}


@pytest.fixture(scope="module")
def compiled():
    return compile_encoder(tiny_model(), OPTIONS, owned=True)


@pytest.fixture
def program(compiled, monkeypatch):
    """The encoder, as if its kernels were those of a GPU."""
    monkeypatch.setattr(compiled, "_syncing", ())
    monkeypatch.setattr(compiled.report, "notes", [])
    monkeypatch.setattr(compiled.report, "cuda_graphs", [])
    return compiled


def graphs_of(program, budget=2**30, pool=None):
    return EncoderGraphs(program, pool or PoolOfCalls(GPU), budget)


def pixels_of(grids, seed=0):
    torch.manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grids), WIDTH)


def test_images_of_a_size_that_came_twice_run_in_a_graph_and_results_may_be_kept(
    program, monkeypatch
):
    graphs = graphs_of(program)
    for grids in (ONE, TWO, ONE, TWO):
        given = pixels_of(grids)
        torch.testing.assert_close(graphs(given, grids), program(given, grids), rtol=0, atol=0)
    assert list(graphs.captured) == [tuple(ONE), tuple(TWO)]
    assert [graph["inputs"] for graph in program.report.cuda_graphs] == [
        [[24, WIDTH]],
        [[56, WIDTH]],
    ]
    calls = [(grids, pixels_of(grids, seed)) for seed in (5, 6) for grids in (TWO, ONE)]
    expected = [program(given, grids) for grids, given in calls]
    monkeypatch.setattr(program, "patch_inputs", None)  # all further calls are replays
    found = [graphs(given, grids) for grids, given in calls]
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=0, atol=0)
    assert all(not torch.equal(*pair) for pair in pairwise(found[::2]))


def test_few_graphs_are_kept_and_one_is_replaced_that_was_not_used_for_long(program, monkeypatch):
    monkeypatch.setattr(encoder_graphs, "MOST_GRAPHS", 2)
    monkeypatch.setattr(encoder_graphs, "CALLS_KNOWN", 4)
    graphs = graphs_of(program)

    def call(*sizes):
        for grids in sizes:
            graphs(pixels_of(grids), grids)
        return list(graphs.captured)

    one, two, other = tuple(ONE), tuple(TWO), tuple(OTHER)
    assert call(ONE, TWO, ONE, TWO) == [one, two]
    assert call(ONE, TWO, OTHER, OTHER) == [one, two]  # both were used a few calls ago
    assert call(ONE) == [two, one]
    assert call(OTHER) == [one, other]
    # Sizes that come once in a long time are forgotten.
    sizes = [[(1, 8, 2 * width)] for width in range(1, 6)]
    assert call(*sizes, *sizes) == [one, other]


def test_large_images_are_not_captured_and_no_graph_exceeds_the_memory(program, monkeypatch):
    monkeypatch.setattr(encoder_graphs, "MOST_PATCHES", 24)
    graphs = graphs_of(program)
    for grids in (TWO, TWO, ONE, ONE):
        graphs(pixels_of(grids), grids)
    assert list(graphs.captured) == [tuple(ONE)]
    room = 24 * WIDTH * 4 + GRAPH_BYTES
    graphs = graphs_of(program, budget=room)
    for grids in (ONE, ONE, OTHER, OTHER, OTHER):
        graphs(pixels_of(grids), grids)
    assert len(graphs.captured) == 2 and graphs.pool.bytes == 2 * GRAPH_BYTES
    graphs = graphs_of(program, budget=24 * WIDTH * 4 - 1)
    for grids in (ONE, ONE, ONE):
        graphs(pixels_of(grids), grids)
    assert not graphs.captured


class PoolOfRecords(PoolOfCalls):
    """As a CUDA graph does, what it captures keeps the addresses that it reads, not the tensors."""

    def capture(self, call, *, warm_up):
        output = call()
        return SimpleNamespace(bytes=GRAPH_BYTES, replay=lambda: output)


@pytest.mark.rotating
def test_what_a_graph_reads_is_held_as_long_as_the_graph(program, monkeypatch):
    made = []

    def patch_inputs(grids, device, make=program.patch_inputs):
        found = make(grids, device)
        made.append([weakref.ref(each) for each in found])
        return found

    monkeypatch.setattr(program, "patch_inputs", patch_inputs)
    graphs = graphs_of(program, pool=PoolOfRecords(GPU))
    for _ in range(2):
        graphs(pixels_of(ONE), ONE)
    gc.collect()
    first_call, second_call, captured = made
    assert {ref() for ref in first_call + second_call} == {None}
    assert all(ref() is not None for ref in captured)
    graphs.captured.clear()
    assert {ref() for ref in captured} == {None}


class NoMemory(PoolOfCalls):
    def capture(self, call, *, warm_up):
        assert not warm_up, "its kernels are loaded"
        self.bytes += 1
        raise torch.OutOfMemoryError("no memory\nand a long text")


def test_an_encoder_that_cannot_be_captured_runs_as_a_call_with_a_note(program):
    graphs = graphs_of(program, pool=NoMemory(GPU))
    for grids in (ONE, ONE, ONE, TWO, TWO):
        given = pixels_of(grids)
        torch.testing.assert_close(graphs(given, grids), program(given, grids), rtol=0, atol=0)
    assert graphs.pool.bytes == 1 and not graphs.captured
    assert program.report.notes == ["no CUDA graph of the vision encoder: no memory"]


def test_weights_that_others_may_write_and_kernels_that_wait_have_no_graphs(compiled):
    assert compiled.why_no_graph.endswith("wait for the device")  # on a CPU
    model = tiny_model()
    given = compile_encoder(model, OPTIONS)
    assert given.why_no_graph == "weights may be written by the caller"
    for encode in (compiled, given, model.encode_images):
        encoder = ImageEncoder(encode, ImageModel.of(model), torch.device("cpu"))
        encoder.capture(PoolOfCalls(GPU), 2**30)
        assert encoder.graphs is None


def test_an_engine_encodes_images_in_graphs_until_it_sleeps_and_again_after(monkeypatch):
    monkeypatch.setattr(EncoderProgram, "why_no_graph", "")
    config = EngineConfig(options=OPTIONS, max_num_seqs=4, num_blocks=60, max_model_len=64)
    engine = Engine(config, module=made("ours", "qwen3_vl"), progress=False)
    encoder, program = engine.executor.encoder, engine.executor.encoder.encode

    def tokens(seed):
        """Of a prompt with an image of the first of three sizes."""
        one = image(seed, 2)
        prompt = [5, 6, *[90] * one.length, 7, 8]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.add(engine.request(f"{seed}", prompt, params, images=[one]))
        found = []
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                found += output.token_ids
        return found

    encoder.drop_graphs()
    seeds = (0, 3, 6, 9)
    expected = [tokens(seed) for seed in seeds]
    for _ in range(2):
        engine.sleep()
        assert encoder.graphs is None and not program.report.cuda_graphs
        engine.wake_up()
        assert [tokens(seed) for seed in seeds] == expected
        assert list(encoder.graphs.captured) == [(image(0, 0).grid,)]
        assert encoder.graphs.captured[(image(0, 0).grid,)].last_call == len(seeds)
        assert encoder.graphs.pool is engine.executor.runner.pool
