"""What a start prepares for the kernels of its steps."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton

from atomc.kernels.triton.launch import parallel_compile
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.graphs import shapes_for_later, step_shapes
from atomc.runtime.execution.step_kernels import StepKernels


def runner_that(launches, key="a program"):
    """A stand-in for a runner on a GPU."""
    program = SimpleNamespace(device=SimpleNamespace(type="cuda"), syncing=(), specs=(), key=key)
    return SimpleNamespace(
        program=program,
        programs=SimpleNamespace(all=[program]),
        input_batch=SimpleNamespace(rows=2048, columns=9),
        empty_step=launches,
    )


def test_a_start_launches_what_it_captures_if_tritons_cache_has_all_kernels(monkeypatch, tmp_path):
    def compiled(launch, *, worker):
        launch()
        for name in ("A", "B"):
            (tmp_path / name).mkdir(exist_ok=True)
        return {"A", "B"}

    def launched(key="a program", number=256, **settings):
        shapes, config = [], EngineConfig(model="a model", **settings)
        StepKernels(config).load(runner_that(shapes.append, key), None, number)
        return shapes

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(parallel_compile, "compile_in_parallel", compiled)
    cold, captured = launched(), sorted(set(step_shapes(256, 2048, 9)))
    warm = launched()
    assert len(warm) < 8 < len(cold) and set(warm) < set(cold)
    assert set(captured) - set(shapes_for_later(captured)) <= set(warm)
    assert launched("another program") == cold, "which may need other kernels"
    assert len(launched(number=64)) > 8, "and so may other shapes"
    assert launched(None) == launched(None) == cold, "it has no key"
    assert launched(tp=2) == launched(tp=2) == cold, "ranks capture all at once"
    (tmp_path / "B").rmdir()
    assert launched() == cold and launched() == warm
