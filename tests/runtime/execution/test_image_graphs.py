"""CUDA graphs of steps with images, without a GPU: a graph is a call that runs again on the static
inputs, and writes its results where those of the first call are.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from test_images import (
    ENGINES,
    LARGE,
    PROMPTS,
    SMALL,
    Alone,
    check_mix,
    expected,
    params,
    request_of,
    run,
)
from test_mtp_images import PROMPTS as DRAFTED
from test_mtp_images import started as started_with_drafts
from test_mtp_images import tiny_model
from tiny_vision import HybridVision, started, tiny_vision

from atomc.runtime.execution import runner as runners
from atomc.runtime.execution.capacity import GRAPH_SHARE
from atomc.runtime.execution.graphs import step_shapes
from atomc.runtime.execution.worker import Worker

pytestmark = pytest.mark.xdist_group("runtime")
GPU = torch.device("cuda")
GRAPH_BYTES = 2**20
IMAGES, TEXT = "full graph, with images", "full graph"


class CallAgain:
    """Stands for atomc.replay.cudagraphs.CapturedCall: a capture runs nothing but its warm-up."""

    bytes = GRAPH_BYTES

    def __init__(self, call, *, warm_up):
        self.call, self.output = call, call().clone() if warm_up else None

    def replay(self):
        results = self.call()
        self.output = results.clone() if self.output is None else self.output.copy_(results)
        return self.output


class PoolOfCalls:
    """Stands for atomc.replay.cudagraphs.Pool."""

    def __init__(self, device, capturing=nullcontext):
        assert device == GPU
        self.bytes, self.capturing = 0, capturing

    def capture(self, call, *, warm_up):
        self.bytes += GRAPH_BYTES
        return CallAgain(call, warm_up=warm_up)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Lets engines capture, as many graphs as `memory.graphs`. Programs of which kernels wait for
    the device: memory.syncing.
    """
    given, capture = SimpleNamespace(graphs=1000, syncing=()), Worker._capture

    def on_a_gpu(worker, *context):
        programs = worker.programs
        with monkeypatch.context() as patch:
            patch.setattr(programs.main, "device", GPU)
            for name, program in programs.steps.items():
                waiting = ("nonzero",) if name in given.syncing else ()
                patch.setattr(program, "syncing", waiting)
            capture(worker, *context)

    monkeypatch.setattr(runners, "Pool", PoolOfCalls)
    monkeypatch.setattr(Worker, "_capture", on_a_gpu)
    monkeypatch.setattr(
        torch.cuda,
        "mem_get_info",
        lambda device: (0, round((given.graphs - 0.5) * GRAPH_BYTES / GRAPH_SHARE)),
    )
    return given


@pytest.fixture(scope="module")
def model():
    return tiny_vision()


def counted(engine, *requests):
    """The tokens of requests, and the steps that they took by kind."""
    engine.executor.runner.forget_counts()
    found = run(engine, *requests)
    return found, dict(engine.stats().steps)


def shapes_of(graphs):
    return sorted(shape[:3] for shape in graphs.captured)


@pytest.mark.parametrize("rows", [5, 16, 65])
def test_tokens_are_those_of_the_whole_sequence_for_any_size_of_chunks(model, rows):
    engine = started(max_num_batched_tokens=rows, max_num_seqs=min(rows, 4))
    requests = [request_of(engine, name, parts) for name, parts in PROMPTS.items()]
    found, steps = counted(engine, *requests)
    assert found == {name: expected(model, parts) for name, parts in PROMPTS.items()}
    assert steps.keys() == {IMAGES, TEXT}


def test_the_shapes_of_prompts_are_captured_with_images_and_no_decode_steps():
    engine = started(max_num_batched_tokens=100, max_num_seqs=16)
    text, images = map(shapes_of, graphs_of(engine))
    assert images == [(64, 9, 8), (64, 17, 16), (100, 8, 8), (100, 16, 16)]
    assert [shape for shape in text if shape not in images] == [(n, n, n) for n in (1, 2, 4, 8, 16)]
    report = engine.executor.programs.steps["images"].report
    assert [graph["rows"] for graph in report.cuda_graphs[-4:]] == [100, 64, 100, 64]


def test_a_prompt_with_an_image_and_1048_tokens_is_in_a_graph_of_1152_rows():
    shapes = [shape[:3] for shape in step_shapes(256, 2048, 64) if not shape.is_decode]
    assert min(shape for shape in shapes if shape[0] >= 1048) == (1152, 10, 8)
    # bench/images.py has a token budget of one prompt.
    assert (1048, 3, 1) in [shape[:3] for shape in step_shapes(1, 1048, 66)]


def test_the_padding_of_a_graph_has_no_embeddings_of_an_earlier_step(model):
    engine = started(max_num_batched_tokens=65)
    runner, parts = engine.executor.runner, (5, (1, LARGE), 7)
    embeddings = runner.input_batch.row_inputs["embeddings"]
    embeddings.fill_(torch.nan)
    found, _ = counted(engine, request_of(engine, "a", parts, count=1))
    assert found == {"a": expected(model, parts, 1)}
    assert runner.rows == 18 and runner.padding == 64 - 18
    assert not embeddings[17:64].any() and embeddings[1:17].any() and embeddings[64].isnan().all()


def test_graphs_of_text_are_captured_first_within_the_memory_for_both(model, memory):
    engine = started()
    main, images = (len(graphs.captured) for graphs in graphs_of(engine))
    assert main == 4 and images == 1
    for room in (main, 2):
        memory.graphs = room
        engine = started()
        assert [len(graphs.captured) for graphs in graphs_of(engine)] == [room, 0]
    found, steps = counted(engine, request_of(engine, "a", (5, (1, SMALL), 7)))
    assert found == {"a": expected(model, (5, (1, SMALL), 7))}
    assert steps["eager: more rows than any graph, with images"] == 1
    notes = engine.executor.programs.steps["images"].report.notes
    assert "CUDA graphs beyond 4 MiB are left out: raise gpu_memory_utilization" in notes


def graphs_of(engine):
    variants = engine.executor.runner.variants
    return [variants[name].graphs for name in ("text", "images")]


def test_graphs_with_images_are_dropped_asleep_and_captured_again(model):
    engine, parts = started(max_num_batched_tokens=65), (5, (1, LARGE), 7)
    runner = engine.executor.runner
    before = shapes_of(graphs_of(engine)[1])
    for name in ("a", "b"):
        engine.sleep()
        assert graphs_of(engine) == [None, None]
        assert not engine.executor.programs.steps["images"].report.cuda_graphs
        engine.wake_up()
        assert shapes_of(graphs_of(engine)[1]) == before
        found, steps = counted(engine, request_of(engine, name, parts))
        assert found == {name: expected(model, parts)} and steps.keys() == {IMAGES, TEXT}
    runner.drop_graphs()
    _, steps = counted(engine, request_of(engine, "c", (6, *parts)))
    assert not steps.keys() & {IMAGES, TEXT}


def test_graphs_of_the_start_are_captured_in_the_context_of_the_place_and_later_ones_are_not():
    engine = started()
    worker = engine.executor
    worker.place = worker.place._replace(capturing=lambda: nullcontext("of the place"))
    worker.warm_up()
    assert worker.runner.pool.capturing is worker.place.capturing
    engine.sleep()
    engine.wake_up()
    assert worker.runner.pool.capturing is nullcontext


def test_a_program_of_images_that_waits_for_the_device_runs_as_calls(model, memory, monkeypatch):
    memory.syncing = ("images",)
    engine = started()
    monkeypatch.setattr(engine.executor.programs.steps["images"], "syncing", ("nonzero",))
    assert graphs_of(engine)[0].captured and graphs_of(engine)[1] is None
    _, steps = counted(engine, request_of(engine, "a", (5, (1, SMALL), 7)))
    assert steps == {"eager: nonzero wait for the device, with images": 1, TEXT: 7}


@pytest.mark.parametrize("number", [0, 2, 4])
def test_preemption_and_drafts_of_ngrams_change_no_token(model, number):
    engine, alone = started(**ENGINES[number]), Alone(model)
    for seed in range(3):
        check_mix(engine, alone, len(ENGINES) * seed + number)
    assert engine.stats().steps[IMAGES] > 3


@pytest.mark.slow
def test_state_per_sequence_its_snapshots_and_drafts_are_those_of_the_images():
    alone = Alone(tiny_vision(model=HybridVision))
    counts = {"max_num_batched_tokens": 16, "num_blocks": 12, "state_snapshots": 4}
    engine = started(HybridVision, speculative_tokens=2, max_image_patches=64, **counts)
    engine.scheduler.snapshots.least = engine.scheduler.snapshots.interval = 16
    for seed in range(8):
        check_mix(engine, alone, 200 + seed)
    stats = engine.stats()
    assert stats.steps[IMAGES] and stats.snapshot_hits


@pytest.mark.slow
def test_drafts_and_tokens_of_a_draft_layer_are_those_of_calls():
    def steps(*, in_graphs):
        one = started_with_drafts(tiny_model(), enforce_eager=not in_graphs)
        for i, (tokens, images) in enumerate(DRAFTED):
            one.add(one.request(f"{i}", tokens, params(12), images=images))
        found = []
        while one.has_work:
            outputs = one.step()
            drafts = [(request.id, request.draft) for request in one.scheduler.running]
            found.append(([(output.request_id, output.token_ids) for output in outputs], drafts))
        kinds = one.stats().steps
        assert kinds[IMAGES if in_graphs else "eager: on a CPU, with images"]
        assert in_graphs == (not any(kind.startswith("eager") for kind in kinds)), kinds
        return found

    assert steps(in_graphs=True) == steps(in_graphs=False)
