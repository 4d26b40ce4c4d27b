"""Timing kernels one by one: each distinct one once, on inputs of the step's sizes."""

import json

import pytest
import torch
from test_plan import KV_HEADS, SMALL

from atomc.graph.node_record import is_cache, record_of
from atomc.planning.device_model import build_model
from atomc.planning.measure import KernelTimer, measure_peaks, time_call
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import TimedProgram, measure_step
from atomc.platform import Platform

CPU = torch.device("cpu")


pytestmark = pytest.mark.xdist_group("measure")


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(
        json.dumps({**SMALL, "num_hidden_layers": 2, "vocab_size": 512})
    )
    return TimedProgram(build_model(folder), platform=Platform.detect("cpu"))


def bench_of(lowered, load):
    gm = next(gm for gm in lowered.graphs if load.tokens in gm.meta["tokens"])
    return KernelTimer(gm, lowered.program.specs, load, CPU)


@pytest.mark.rotating
def test_every_kernel_of_a_step_gets_a_time_and_those_alike_are_timed_once(lowered):
    load = Workload(3, 3, 32)
    predicted, timed = lowered.time(load)
    assert sorted(timed) == list(range(len(predicted)))
    assert all(seconds > 0 for seconds in timed.values())
    bench = bench_of(lowered, load)
    downs = [p for p in predicted if p.module_path.endswith("down_proj")]
    assert len(downs) == 2 and len({bench.seconds(p.nodes) for p in downs}) == 1
    assert len(bench.known) == 1


def test_a_step_is_made_up_as_the_runtime_would_pass_it(lowered):
    bench = bench_of(lowered, Workload(5, 2, 32))
    step, (group,) = bench.step, bench.step.groups
    assert step.query_start.tolist() == [0, 3, 5] and step.seq_lens.tolist() == [32, 32]
    assert step.positions.tolist() == [29, 30, 31, 30, 31] and step.logits_rows.tolist() == [2, 4]
    assert len(set(group.slots.tolist())) == 5
    blocks = group.block_tables.flatten().tolist()
    assert sorted(blocks) == list(range(len(blocks)))
    size = bench.block_size
    assert group.slots.tolist() == [
        blocks[s * bench.columns + p // size] * size + p % size
        for s, p in [(0, 29), (0, 30), (0, 31), (1, 30), (1, 31)]
    ]


def test_inputs_have_the_sizes_of_the_step(lowered):
    bench = bench_of(lowered, Workload(5, 2, 32))
    attention = next(
        node for node in bench.gm.graph.nodes if record_of(node).op == "paged_attention"
    )
    piece, inputs = bench._piece([attention])
    given = dict(zip((node.name for node in inputs), bench._inputs(inputs), strict=True))
    cache = given[next(node.name for node in inputs if is_cache(node))]
    assert cache.shape[:2] == (2 * bench.columns, bench.block_size) and cache.shape[2] == KV_HEADS
    (out,) = piece(*given.values())
    assert out.shape[0] == 5 and not out.isnan().any()


def test_views_come_along_so_that_halves_of_a_tensor_stay_neighbours(lowered):
    bench = bench_of(lowered, Workload(3, 3, 32))
    gated = next(node for node in bench.gm.graph.nodes if record_of(node).op == "silu_and_mul")
    piece, inputs = bench._piece([gated])
    (packed,) = bench._inputs(inputs)
    assert packed.shape == (3, 2 * SMALL["intermediate_size"])
    assert piece(packed)[0].shape == (3, SMALL["intermediate_size"])


@pytest.mark.rotating
def test_a_plan_of_this_machine_shows_measured_beside_predicted(lowered):
    found = measure_step(lowered.model, Workload(2, 2, 16), options={"glue": "eager"})
    assert found.total("timed") > 0 and "measured us" in found.to_text()
    assert found.machine == Platform.detect().name


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_timed_in_a_cuda_graph(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({**SMALL, "num_hidden_layers": 1, "vocab_size": 512})
    )
    gpu = TimedProgram(build_model(tmp_path), {"glue": "eager"})
    predicted, timed = gpu.time(Workload(8, 8, 64))
    assert "triton" in {p.kernel for p in predicted}
    assert all(1e-7 < seconds < 1e-3 for seconds in timed.values())


@pytest.mark.rotating
def test_a_machine_without_a_data_sheet_is_measured():
    found = measure_peaks(Platform.detect("cpu"), torch.float32)
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.flops < 1e15
    h200 = Platform.named("h200")
    assert measure_peaks(h200, torch.float32) is h200


def test_calls_go_round_over_the_sets():
    seen = []
    time_call(lambda i: seen.append(i) or sum(range(20000)), [[0], [1], [2]], CPU)
    assert seen[:5] == [0, 0, 1, 2, 0] and len(seen) > 3
