"""CUDA graphs that a start leaves for later, with the stand-ins of test_image_graphs."""

from itertools import product
from types import SimpleNamespace

import pytest
from test_image_graphs import (
    GRAPH_BYTES,
    IMAGES,
    TEXT,
    counted,
    graphs_of,
    memory,  # noqa: F401  a fixture
    model,  # noqa: F401  a fixture
    shapes_of,
)
from test_images import PROMPTS, expected, request_of, run
from tiny_vision import started

from atomc.runtime import engine as engines
from atomc.runtime.execution.graphs import shapes_for_later, smallest_shape, step_shapes
from atomc.runtime.execution.step_kernels import StepKernels

pytestmark = pytest.mark.xdist_group("runtime")
SIZES = {"max_num_batched_tokens": 100, "max_num_seqs": 16}
AT_START = [(1, 1, 1), (16, 16, 16), (64, 9, 8), (100, 16, 16)]


@pytest.fixture(autouse=True)
def kernels_loaded(monkeypatch):
    """Kernels count as loaded, as after a start on a GPU."""
    monkeypatch.setattr(StepKernels, "load", lambda self, *_: setattr(self, "kernels_loaded", True))


def all_captured(engine):
    while engine.capture_graph():
        engine.check()
    return [shapes_of(graphs) for graphs in graphs_of(engine)]


@pytest.mark.parametrize("drafts, rewinds", [(0, False), (3, False), (3, True)])
@pytest.mark.parametrize("sequences, rows", [(1, 10_000), (4, 100), (64, 64), (256, 2048)])
def test_a_step_that_is_to_have_a_graph_has_one_from_the_start(sequences, rows, drafts, rewinds):
    shapes = step_shapes(sequences, rows, 9, drafts, rewinds=rewinds)
    later = shapes_for_later(shapes)
    first = sorted(set(shapes) - set(later))
    assert len(first) <= 8 and (1, 1, 1) in [shape[:3] for shape in first]
    assert len(first) + len(later) == len(shapes)
    numbers = (1, 2, 3, 7, 8, 20, 63, 64, 255, 256)
    for total, some, wanted in product((*numbers, 999, 2048), numbers, numbers):
        if some <= min(total, sequences) and wanted <= some * (1 + drafts):
            for longest in {-(-total // some), total - some + 1}:
                step = (total, some, wanted, longest)
                is_padded = smallest_shape(sorted(shapes), *step) is not None
                assert (smallest_shape(first, *step) is not None) == is_padded, step


def test_a_start_captures_the_ends_of_each_kind_and_an_idle_engine_the_rest():
    engine = started(**SIZES)
    text, images = map(shapes_of, graphs_of(engine))
    assert text == AT_START and images == AT_START[2:]
    assert engine.stats().graphs == 4
    before = len(engine.program.report.cuda_graphs)
    text, images = all_captured(engine)
    of_prompts = [(64, 9, 8), (64, 17, 16), (100, 8, 8), (100, 16, 16)]
    assert text == [(n, n, n) for n in (1, 2, 4, 8, 16)] + of_prompts and images == of_prompts
    assert len(engine.program.report.cuda_graphs) - before == 5
    assert not engine.capture_graph()


def test_no_step_waits_for_a_graph_where_gaps_are_bounded():
    engine = started(**SIZES, max_itl_ms=50.0)
    for name in "abc":
        engine.add(request_of(engine, name, (5, 6, 7), 60))
    while engine.has_work:
        engine.step()
    assert max(engine.executor.runner.missing.values()) > engines.CAPTURE_STEPS
    assert shapes_of(graphs_of(engine)[0]) == AT_START
    assert len(all_captured(engine)[0]) == 9


def test_steps_run_in_larger_graphs_until_theirs_is_captured(model):  # noqa: F811
    engine = started(**SIZES)
    requests = [request_of(engine, name, parts, 30) for name, parts in PROMPTS.items()]
    tokens, steps = counted(engine, *requests)
    assert tokens == {name: expected(model, parts, 30) for name, parts in PROMPTS.items()}
    assert steps.keys() == {IMAGES, TEXT}
    # Five requests decode, and a step of eight rows is what they want.
    assert (8, 8, 8) in shapes_of(graphs_of(engine)[0])
    assert engine.executor.runner.missing


def test_graphs_that_were_wanted_are_captured_first_and_not_all_at_once(monkeypatch):
    engine, captured, step = started(**SIZES), [], 0
    missing = engine.executor.runner.missing
    runner = engine.executor.runner
    capture = runner.capture_missing

    def records(shape):
        captured.append((step, shape[:3], missing[shape]))
        capture(shape)

    monkeypatch.setattr(runner, "capture_missing", records)
    for name, length in (("a", 60), ("b", 60), ("c", 6)):
        engine.add(request_of(engine, name, (5, 6, 7), length))
    while engine.has_work:
        engine.step()
        step += 1
    # A step with all three prompts is in the smallest graph, which is there.
    (first, *sizes), (second, *others) = captured
    assert sizes[0] == (4, 4, 4) and others[0] == (2, 2, 2) and sizes[1] and others[1]
    assert first <= 4 and second - first >= engines.CAPTURE_STEPS
    assert len(captured) == 2  # of what no step wanted, none while there is work


def test_a_graph_that_cannot_be_captured_leaves_the_engine_as_it_is(model, monkeypatch):  # noqa: F811
    engine = started(**SIZES)

    def fails(call, *, warm_up):
        assert not warm_up
        raise RuntimeError("no memory is left\nand more")

    monkeypatch.setattr(engine.executor.runner.pool, "capture", fails)
    assert engine.capture_graph() and not engine.capture_graph()
    assert engine.program.report.notes[-1] == "CUDA graphs are left out: no memory is left"
    assert [shapes_of(graphs) for graphs in graphs_of(engine)] == [AT_START, AT_START[2:]]
    assert run(engine, request_of(engine, "a", (5, 6, 7))) == {"a": expected(model, (5, 6, 7))}


def test_drafts_are_captured_before_text_and_what_has_no_graphs_is_passed(monkeypatch):
    engine, captured = started(**SIZES), []
    runner = engine.executor.runner
    drafts = SimpleNamespace(captured=[1], capture=lambda shape: captured.append(("drafts", shape)))
    monkeypatch.setattr(runner, "draft", SimpleNamespace(graphs=drafts))
    monkeypatch.setattr(runner.variants["images"], "graphs", None)
    text = runner.variants["text"].graphs
    monkeypatch.setattr(text, "capture", lambda shape: captured.append(("text", shape)))
    shape = next(shape for shape in runner.missing if not shape.is_decode)
    runner.capture_missing(shape)  # a step of text proposes with the graph of the drafts
    assert captured == [("drafts", shape), ("text", shape)]


def test_later_graphs_stay_within_the_memory_of_all(memory):  # noqa: F811
    memory.graphs = 8
    engine = started(**SIZES)
    text, images = all_captured(engine)
    assert len(text) + len(images) == 8 and engine.executor.runner.pool.bytes == 8 * GRAPH_BYTES
    assert any(
        note.startswith("CUDA graphs beyond 8 MiB are") for note in engine.program.report.notes
    )


def test_an_engine_that_sleeps_captures_nothing():
    engine = started(**SIZES)
    engine.sleep()
    assert not engine.capture_graph()
    engine.wake_up()
    assert shapes_of(graphs_of(engine)[0]) == AT_START
    assert len(all_captured(engine)[0]) == 9


def test_a_loop_without_work_captures_between_looks_at_its_socket():
    pytest.importorskip("zmq")
    import zmq

    from atomc.runtime.server.engines.engine_process import EngineLoop

    events, missing = [], [1, 2]

    def recv(flags):
        events.append("recv")
        raise zmq.Again

    loop = object.__new__(EngineLoop)
    loop.socket = SimpleNamespace(poll=lambda ms: events.append("poll"), recv=recv)
    loop.engine = SimpleNamespace(
        has_work=False,
        capture_graph=lambda: bool(missing) and not events.append(f"capture {missing.pop()}"),
    )
    loop.compile_queue, loop._idle_ms = (), None
    for _ in range(3):
        assert not list(loop._receive_commands())
    assert events == ["capture 2", "recv", "capture 1", "recv", "poll", "recv"]
