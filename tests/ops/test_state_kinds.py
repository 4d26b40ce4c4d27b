"""Ops with state of other kinds than keys and values, defined here and in no table, through
compiler and runtime: greedy tokens are those of the plain model on each whole sequence.

T new tokens, S sequences, D width.
"""

import hashlib
import io

import pytest
import torch
from state_toy import (
    KINDS,
    LENGTHS,
    MADE,
    MAX_LEN,
    ODD,
    OPTIONS,
    VOCAB,
    WIDTH,
    WITH_SUMS,
    Failed,
    alone,
    made,
    prompts_of,
    requests_of,
    run,
    started,
    sum_form,
    sum_spec,
    toy,
)
from torch import Tensor

from atomc.errors import RunError
from atomc.ops.inputs import StateInput, StepInput
from atomc.ops.op import op
from atomc.ops.op_traits import Kind, StateBinding
from atomc.ops.state import StateGroup, groups_of
from atomc.planning.device_model import Model
from atomc.planning.plan_report import Workload
from atomc.planning.step_plan import TimedProgram, plan_step
from atomc.platform import Platform
from atomc.program import compile_model
from atomc.runtime.execution.capacity import Capacity, capacity
from atomc.runtime.execution.input_batch import StepShape
from atomc.runtime.execution.output_processor import OutputProcessor
from atomc.runtime.execution.programs import Programs
from atomc.runtime.execution.runner import Runner
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.state_rows import StateRows
from atomc.runtime.scheduling.step import Chunk, ScheduledStep

__all__ = ["made"]  # a fixture

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]


@pytest.fixture(scope="module", params=KINDS)
def served(request):
    return request.param, started(request.param)


def test_tokens_are_those_of_the_whole_sequence_over_chunks_ragged_batches_and_slots_used_again(
    served,
):
    kind, engine = served
    prompts = prompts_of(*LENGTHS)  # more than there are slots, and longer than a step
    assert run(engine, requests_of(engine, prompts)) == [
        alone(kind, prompt, 8) for prompt in prompts
    ]
    # Each slot and each block was used before.
    prompts = prompts_of(*LENGTHS, seed=1)
    assert run(engine, requests_of(engine, prompts)) == [
        alone(kind, prompt, 8) for prompt in prompts
    ]


def test_state_that_an_aborted_request_leaves_is_nobodys(served):
    kind, engine = served
    prompts = prompts_of(30, 9, 20, 12, 40, 3)
    found = run(engine, requests_of(engine, prompts), aborts={3: "0", 5: "1", 8: "4"})
    for i in (2, 3, 5):
        assert found[i] == alone(kind, prompts[i], 8)
    for i in (0, 1, 4):
        assert found[i] == alone(kind, prompts[i], len(found[i]))


@pytest.mark.parametrize("kind", ["latent", "recalling", "mixed", "windowed"])
def test_requests_that_give_their_blocks_back_start_from_nothing_again(kind):
    engine = started(kind, num_blocks=6)
    prompts = prompts_of(20, 25, 18, 30)
    assert run(engine, requests_of(engine, prompts, 30)) == [
        alone(kind, prompt, 30) for prompt in prompts
    ]
    assert engine.stats().preemptions > 1


def test_requests_without_blocks_give_way_to_more_urgent_ones():
    engine = started("summed", scheduling_policy="priority", max_num_seqs=2)
    prompts = prompts_of(20, 25, 18, 30)
    requests = requests_of(engine, prompts)
    urgent = [
        engine.request(
            f"urgent {i}", prompt, SamplingParams(max_tokens=4, ignore_eos=True), priority=-1
        )
        for i, prompt in enumerate(prompts[2:])
    ]
    found = {}
    for request in requests:
        engine.add(request)
    for step in range(200):
        if step == 5:
            for request in urgent:
                engine.add(request)
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    assert engine.stats().preemptions == 2
    assert [found[str(i)] for i in range(4)] == [alone("summed", prompt, 8) for prompt in prompts]
    assert [found[f"urgent {i}"] for i in range(2)] == [
        alone("summed", prompt, 4) for prompt in prompts[2:]
    ]


def test_drawn_tokens_do_not_depend_on_chunks_or_the_batch(served):
    kind, engine = served

    def tokens(engine, which):
        requests = [
            engine.request(
                str(i),
                prompts_of(*LENGTHS)[i],
                SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True),
            )
            for i in which
        ]
        return run(engine, requests)

    together = tokens(engine, range(7))
    assert tokens(started(kind, max_num_batched_tokens=5), range(7)) == together
    assert [tokens(engine, [i])[0] for i in range(7)] == together


# ---- what cannot be shared or taken back


def test_a_prefix_of_tokens_is_shared(served):
    kind, engine = served
    prefix = prompts_of(40)[0]
    run(engine, requests_of(engine, [prefix]))
    (request,) = requests_of(engine, [[*prefix, 3, 4]])
    assert run(engine, [request]) == [alone(kind, [*prefix, 3, 4], 8)]
    # Of states per sequence, a snapshot of so few tokens is not worth a step.
    assert request.num_cached == (0 if kind in WITH_SUMS else 32)
    assert engine.stats().no_prefix_cache == ""


@pytest.mark.parametrize("kind", ["latent", "recalling"])
def test_wrong_drafts_are_taken_out_of_state_of_tokens(kind):
    engine = started(kind, speculative_tokens=3, num_blocks=30)
    prompts = [[1, 2, 3] * 8, [7, 8] * 9, prompts_of(20)[0]]
    assert run(engine, requests_of(engine, prompts, 20)) == [
        alone(kind, prompt, 20) for prompt in prompts
    ]
    assert engine.stats().drafted > engine.stats().accepted > 0


# ---- steps that fail


def failing(original, errors, at):
    """`original`, which raises at the calls with these numbers: at odd ones after it has run, at
    even ones before.
    """
    calls = 0

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls not in at:
            return original(*args, **kwargs)
        if calls % 2:
            original(*args, **kwargs)
        errors.append(Failed(f"at call {calls}"))
        raise errors[-1]

    return call


@pytest.mark.parametrize("at", [range(1, 20, 6), range(4, 22, 3), (3, 4, 5, 7, 9, 13)], ids=str)
def test_a_step_that_failed_behind_the_model_or_before_it_advances_no_state_twice(
    served, at, monkeypatch
):
    kind, engine = served
    errors, prompts = [], prompts_of(20, 5, 37, 3)
    with monkeypatch.context() as patch:
        patch.setattr(
            engine.executor.runner, "logits", failing(engine.executor.runner.logits, errors, at)
        )
        found = run(engine, requests_of(engine, prompts), fails=errors)
    assert len(errors) > 2 and found == [alone(kind, prompt, 8) for prompt in prompts]


def test_a_step_that_failed_while_tokens_were_drawn_advances_no_state_twice(served, monkeypatch):
    kind, engine = served
    errors, prompts = [], prompts_of(20, 5, 37, 3)
    with monkeypatch.context() as patch:
        patch.setattr(
            OutputProcessor, "sample", failing(OutputProcessor.sample, errors, range(2, 20, 3))
        )
        found = run(engine, requests_of(engine, prompts), fails=errors)
    assert len(errors) > 2 and found == [alone(kind, prompt, 8) for prompt in prompts]


def test_a_request_that_fails_alone_leaves_the_state_of_others(served):
    kind, engine = served
    prompts = prompts_of(20, 5, 37, 3)
    for request in requests_of(engine, prompts):
        engine.add(request)
    found, failed = {}, []
    while engine.has_work:
        if len(found.get("1", ())) == 2:
            engine.request_errors.fail("1", "testing it", RuntimeError("broken"))
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
            failed += [output.request_id] if output.error else []
        engine.check()
    assert failed == ["1"]
    assert [found[i] for i in "023"] == [alone(kind, prompts[int(i)], 8) for i in "023"]


# ---- padding and slots


def test_padding_and_warm_up_write_the_spare_slot_only():
    program = compile_model(toy("mixed"), OPTIONS)
    runner = Runner(
        Programs({"text": program}),
        num_blocks=8,
        block_size=16,
        max_num_seqs=3,
        max_num_rows=32,
        max_columns=4,
    )
    states = [
        tensors["recurrent_state"] for tensors in runner.caches if "recurrent_state" in tensors
    ]
    assert [len(state) for state in states] == [4, 4]  # one more than sequences
    for state in states:
        state.fill_(7.0)
    caches = [
        tensor
        for tensors in runner.caches
        for role, tensor in tensors.items()
        if role != "recurrent_state"
    ]
    before = [cache.clone() for cache in caches]
    runner.empty_step(StepShape(rows=32, sequences=11, wanted=8, columns=4))
    assert all((state[:3] == 7.0).all() for state in states)
    assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))
    # A step that is padded writes the slots of its sequences, and no others.
    chunk = Chunk("a", 1, (5, 6), 0, ((0, (2,)),), num_samples=1, num_output_rows=1)
    step = ScheduledStep((chunk,))
    logits = runner.logits(step._replace(size=step.padded_size._replace(rows=9)))
    torch.testing.assert_close(
        logits[0], toy("mixed")(torch.tensor([5, 6]), torch.arange(2))[-1], atol=1e-6, rtol=0
    )
    assert all((state[[0, 2]] == 7.0).all() and (state[1] != 7.0).all() for state in states)


def test_a_runner_of_padding_alone_has_one_slot():
    program = compile_model(toy("summed"), OPTIONS)
    runner = Runner(
        Programs({"text": program}),
        num_blocks=(),
        block_size=16,
        max_num_seqs=3,
        max_num_rows=32,
        max_columns=4,
        state_rows=StateRows(0),
    )
    assert {len(tensors["recurrent_state"]) for tensors in runner.caches} == {1}
    assert runner.empty_step(StepShape(32, 11, 2, 4)).shape == (2, VOCAB)


# ---- what the compiler makes of it


def test_a_program_lists_its_state_and_layers_that_are_paged_alike_are_a_group():
    program = compile_model(toy("windowed"), OPTIONS)
    assert [(spec.name, spec.kind, spec.group) for spec in program.specs] == [
        ("layers.0", "kv", 0),
        ("layers.1", "recurrent", None),
        ("layers.2", "kv", 1),
    ]
    assert groups_of(program.specs) == [StateGroup(2 * WIDTH * 8, 0), StateGroup(2 * WIDTH * 8, 5)]
    assert program.report.state == [
        "layers.0: kv [1, 16] torch.float64 layout paged",
        "layers.1: recurrent [16] torch.float64 per sequence",
        "layers.2: kv [1, 16] torch.float64 layout paged",
    ]
    program = compile_model(toy("mixed"), OPTIONS)
    assert [spec.group for spec in program.specs] == [None, 0, 0, None]
    assert groups_of(program.specs) == [StateGroup((2 * WIDTH + ODD) * 8, 0)]
    assert (
        program.specs[2].bytes_per_token() == ODD * 8 and program.specs[2].bytes_per_sequence() == 0
    )
    assert (
        program.specs[0].bytes_per_token() == 0
        and program.specs[0].bytes_per_sequence() == WIDTH * 8
    )


def test_tensors_of_the_state_of_other_shapes_or_numbers_are_refused():
    program = compile_model(toy("mixed"), OPTIONS)
    states = [spec.allocate(4, 16, "cpu", slots=2) for spec in program.specs]
    with pytest.raises(RunError, match="has state but no tensors for it"):
        program(None)
    with pytest.raises(ValueError, match="of 3 layers, the program has 4"):
        program.bind(states[:3])
    states[2] = {"kv_cache": torch.zeros(4, 16, ODD + 1, dtype=torch.float64)}
    expected = (
        r"kv_cache of layers.2 is torch.float64 \[4, 16, 8\], expected torch.float64 "
        r"\[blocks, block_size, 7\]"
    )
    with pytest.raises(ValueError, match=expected):
        program.bind(states)
    states[2] = {}
    with pytest.raises(ValueError, match=r"kv_cache of layers.2 is missing"):
        program.bind(states)


def test_specs_and_inputs_survive_the_cache_and_an_entry_of_old_specs_is_one_line(tmp_path):
    options = {**OPTIONS, "cache": True, "cache_dir": str(tmp_path)}
    cold, warm = compile_model(toy("mixed"), options), compile_model(toy("mixed"), options)
    assert (cold.report.cache, warm.report.cache) == ("miss: the cache is empty", "hit")
    assert (
        warm.specs == cold.specs
        and warm._state_inputs == cold._state_inputs
        and warm._step_inputs == cold._step_inputs
    )
    assert StateInput(0, "recurrent_state", per_sequence=True) in warm._state_inputs
    assert StepInput("state_slots") in dict(warm._step_inputs).values()
    for path in tmp_path.glob("*.atomc"):
        with_old_specs(path)
    again = compile_model(toy("mixed"), options)
    assert again.report.cache.startswith("miss: the entry was damaged and is rebuilt: ")
    assert again.specs == cold.specs and compile_model(toy("mixed"), options).report.cache == "hit"


def with_old_specs(path):
    """Make it an entry of the time when a spec had one shape for keys and values."""
    parts, _, data = path.read_bytes().partition(b"\n")[2].partition(b"\n")
    entry = torch.load(io.BytesIO(data), weights_only=True)
    for spec in entry["compiled"]["state"]:
        spec["shape"], spec["dtype"] = spec["tensors"][0]["shape"], spec.pop("tensors")[0]["dtype"]
    buffer = io.BytesIO()
    torch.save(entry, buffer)
    rest = parts + b"\n" + buffer.getvalue()
    path.write_bytes(b"atomc-cache 1 " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def test_a_form_that_calls_something_else_than_ops_is_an_error(monkeypatch):
    def form(given, state, step):
        return torch.cumsum(given["x"], 0)

    monkeypatch.setitem(
        vars(MADE["decayed_sum"]), "state", StateBinding("state", lambda given: 1, sum_spec, form)
    )
    with pytest.raises(Exception, match=r"may only call atomc\.ops"):
        compile_model(toy("summed"), {**OPTIONS, "cache": False})


def test_a_binding_that_names_no_parameter_is_an_error():
    with pytest.raises(ValueError, match=r"no parameter \['kv'\]"):
        op(kind=Kind.OTHER, rows=None, state=StateBinding("kv", len, sum_spec, sum_form))(nothing)


def nothing(x: Tensor) -> Tensor:
    return x.clone()


# ---- memory


def test_state_of_sequences_is_charged_before_blocks():
    given = {"groups": [(100, 0)], "block_size": 16, "max_num_seqs": 4, "longest": 1000}
    assert capacity(**given, available=100_000) == Capacity((62,), 16, 992)
    # Five slots, one of them spare.
    assert capacity(**given, available=100_000, bytes_per_sequence=10_000) == Capacity(
        (31,), 16, 496
    )
    assert capacity(**given, available=0, kv_bytes=100_000, bytes_per_sequence=10_000) == Capacity(
        (31,), 16, 496
    )
    assert capacity(**given, available=0, num_blocks=70, bytes_per_sequence=10_000) == Capacity(
        (70,), 16, 1000
    )
    with pytest.raises(
        ValueError,
        match=r"the state of 4 sequences takes 150000 bytes \(30000 each\).*lower max_num_seqs",
    ):
        capacity(**given, available=100_000, bytes_per_sequence=30_000)


def test_a_model_that_keeps_nothing_per_token_is_as_long_as_it_may_be():
    given = {
        "groups": [],
        "block_size": 16,
        "max_num_seqs": 4,
        "longest": 1000,
        "bytes_per_sequence": 100,
    }
    assert capacity(**given, available=10_000) == Capacity((), 16, 1000)
    assert capacity(**given, available=10_000, max_model_len=300) == Capacity((), 16, 300)
    with pytest.raises(ValueError, match="the state of 4 sequences takes 500 bytes"):
        capacity(**given, available=499)
    engine = started("summed", num_blocks=None, kv_bytes=4096)
    assert (
        engine.max_len == MAX_LEN
        and engine.stats().kv_blocks_total == engine.stats().kv_tokens == 0
    )
    with pytest.raises(ValueError, match="a prompt of 96 tokens does not fit"):
        engine.add(engine.request("long", [1] * MAX_LEN))


@pytest.mark.parametrize(
    ("kind", "per_token", "per_sequence"),
    [
        ("summed", 0, 2 * WIDTH * 8),
        ("latent", 2 * (7 + 4) * 8, 0),
        ("recalling", 2 * ODD * 8, 0),
        ("mixed", (2 * WIDTH + ODD) * 8, 2 * WIDTH * 8),
    ],
)
def test_a_plan_counts_both_kinds_of_memory(kind, per_token, per_sequence):
    model = Model(toy(kind, "meta"), {"max_position_embeddings": 64}, None, torch.float64, None, 0)
    found = plan_step(model, Platform.named("h200"), Workload(), options={"layout": "paged"})
    memory = found.memory
    assert (memory.per_token, memory.per_sequence) == (per_token, per_sequence)
    of_one = 64 * per_token + per_sequence
    assert (
        memory.fits == min(memory.cache // of_one, 10**6)
        or abs(memory.fits / (memory.cache / of_one) - 1) < 1e-3
    )
    assert ("state of one sequence" in found.to_text()) == bool(per_sequence)


@pytest.mark.rotating
def test_kernels_over_both_kinds_of_state_are_timed_on_made_up_state():
    model = Model(
        toy("mixed", "meta"), {"max_position_embeddings": 64}, None, torch.float64, None, 0
    )
    predicted, timed = TimedProgram(model, {"layout": "paged"}).time(
        Workload(tokens=4, sequences=2, context=40)
    )
    assert {"decayed_sum_step", "recall_write", "recall_read"} <= {
        kernel.op for kernel in predicted
    }
    assert len(timed) == len(predicted) and min(timed.values()) > 0


def test_a_dump_makes_up_a_step_for_both_kinds_of_state(tmp_path):
    compile_model(toy("mixed"), {**OPTIONS, "cache": False, "dump": str(tmp_path)})
    texts = [
        path.read_text() for path in tmp_path.rglob("*.py") if "state_slots" in path.read_text()
    ]
    assert texts
    for recipe in (
        f"torch.zeros((1, {WIDTH}), dtype=torch.float64",
        f"torch.zeros((1, 16, {ODD}), dtype=torch.float64",
        "torch.tensor([0], dtype=torch.int64",
    ):
        assert recipe in texts[-1]


# ---- CUDA graphs


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_full_graph_steps_choose_the_tokens_that_the_plain_model_rates_highest_on_the_whole_sequence(
    kind,
):
    model = toy(kind, "cuda", torch.float32)
    engine = started(
        kind, model, options={**OPTIONS, "glue": "eager"}, num_blocks=6, max_num_batched_tokens=32
    )
    for seed in range(2):  # the second time over slots and blocks that were used before
        prompts = prompts_of(*LENGTHS, seed=seed)
        for prompt, tokens in zip(
            prompts, run(engine, requests_of(engine, prompts, 12)), strict=True
        ):
            ids = torch.tensor([*prompt, *tokens], device="cuda")
            logits = model(ids, torch.arange(len(ids), device="cuda"))[len(prompt) - 1 : -1]
            chosen = logits.gather(1, ids[len(prompt) :, None])[:, 0]
            assert len(tokens) == 12 and (logits.amax(-1) - chosen < 0.02 * logits.std(-1)).all()
    assert engine.stats().preemptions or kind == "summed"  # which has no blocks to lack
    assert engine.executor.runner.steps["full graph"] > 20, engine.executor.runner.steps
    assert engine.program.report.cuda_graphs
