"""Data-parallel ranks that share experts: one scheduler for all, and a part of each step for each."""

import random
from typing import Any

import pytest
from step_results import step_results
from torch import nn

from atomc.parallel import sizes
from atomc.parallel.process_group import Place, TensorParallel
from atomc.runtime.config import EngineConfig
from atomc.runtime.execution.compile_programs import ProgramCompiler
from atomc.runtime.execution.input_batch import InputBatch
from atomc.runtime.requests.request import Request, siblings
from atomc.runtime.requests.sampling_params import SamplingParams
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.data_parallel import DataParallelScheduler
from atomc.runtime.scheduling.scheduler import QueueFull, Scheduler
from atomc.runtime.scheduling.step import ScheduledStep, StepSize
from atomc.runtime.server.engines.start_engines import engine_environments

SAMPLED = SamplingParams(max_tokens=5, ignore_eos=True)


def scheduler(ranks: int = 2, max_queue: int = 100) -> DataParallelScheduler:
    return DataParallelScheduler(
        [
            Scheduler(
                BlockPool(16, 4),
                max_num_seqs=4,
                max_num_batched_tokens=12,
                max_model_len=60,
            )
            for _ in range(ranks)
        ],
        max_queue,
    )


def request(name: str, length: int = 5, **params: Any) -> Request:
    given = SamplingParams(max_tokens=5, ignore_eos=True, **params)
    return Request(name, list(range(1, length + 1)), given, frozenset(), seed=0)


def next_step(s: DataParallelScheduler) -> ScheduledStep:
    step = s.next_step()
    assert step is not None
    return step


def finish(s: DataParallelScheduler, step: ScheduledStep, token: int = 7) -> None:
    s.finish_step(step, *step_results(step, token))


def names(step: ScheduledStep) -> list[str]:
    return [chunk.request_id for part in step.parts or (step,) for chunk in part.chunks]


def test_a_request_goes_to_the_rank_with_the_fewest_and_each_rank_gets_its_own_chunks() -> None:
    s = scheduler()
    for name, length in (("a", 3), ("b", 9), ("c", 4)):
        s.add(request(name, length))
    step = next_step(s)
    assert [names(step.rank_part(rank)) for rank in range(2)] == [["a", "c"], ["b"]]
    assert [step.rank_part(rank).num_tokens for rank in range(2)] == [7, 9]
    # Slots are those of a rank.
    assert [chunk.slot for part in step.parts for chunk in part.chunks] == [0, 1, 0]


def test_all_ranks_pad_to_the_largest_sizes() -> None:
    s = scheduler()
    for name, length in (("a", 3), ("b", 9), ("c", 4)):
        s.add(request(name, length))
    step = next_step(s)
    sizes_of_ranks = {step.rank_part(rank).padded_size for rank in range(2)}
    assert sizes_of_ranks == {StepSize(rows=9, sequences=2, wanted=2, longest=9, pooled=False)}


def test_a_limit_of_prompt_tokens_holds_on_each_rank() -> None:
    s = scheduler()
    for name, length in (("a", 3), ("b", 9), ("c", 4)):
        s.add(request(name, length))
    step = s.next_step(5)
    assert step is not None and step.num_prompt_tokens == 5 and s.num_streams == 1
    assert [step.rank_part(rank).num_tokens for rank in range(2)] == [5, 5]


def test_a_rank_without_work_gets_an_empty_part_of_the_size_of_the_others() -> None:
    s = scheduler()
    s.add(request("a"))
    idle = next_step(s).rank_part(1)
    assert idle.chunks == () and idle.padded_size.rows == 5

    batch = InputBatch(rows=12, sequences=4, columns=4, block_size=4)
    shape = batch.write(idle, num_rows=idle.padded_size.rows)
    tensors = batch.step(shape)
    assert (shape.rows, shape.sequences, shape.wanted) == (5, 1, 0)
    assert tensors.query_start.tolist() == [0, 0] and tensors.seq_lens.tolist() == [0]
    assert tensors.groups[0].slots.tolist() == [-1] * 5


def test_the_rows_of_a_mask_are_those_of_the_tokens_that_a_rank_samples() -> None:
    s = scheduler()
    for name, length in (("a", 3), ("b", 30), ("c", 4)):  # b does not fit in one step
        s.add(request(name, length))
    step = next_step(s)
    assert [step.sample_rows(rank) for rank in range(2)] == [slice(0, 2), slice(2, 2)]
    assert step.rank_part(0).sample_rows(0) == slice(None)


def test_choices_of_a_prompt_go_to_one_rank_and_share_its_blocks() -> None:
    s = scheduler()
    for each in siblings(request("x", 9, n=3)):
        s.add(each)
    assert [len(rank.requests) for rank in s.ranks] == [3, 0]


def test_the_queue_is_that_of_all_ranks() -> None:
    s = scheduler(max_queue=3)
    for i in range(3):
        s.add(request(str(i)))
    with pytest.raises(QueueFull, match="3 requests wait already"):
        s.add(request("more"))


def test_a_request_is_known_to_its_rank_only() -> None:
    s = scheduler()
    s.add(request("a"))
    s.add(request("b"))
    assert s.requests.keys() == {"a", "b"} and s.abort("b") and not s.abort("b")
    assert [list(rank.requests) for rank in s.ranks] == [["a"], []]
    with pytest.raises(ValueError, match="'a' is in use"):
        s.add(request("a"))


def test_an_undone_step_comes_again() -> None:
    s = scheduler()
    for name in "abc":
        s.add(request(name))
    step = next_step(s)
    s.undo_step(step)
    s.check()
    assert s.num_steps_in_flight == 0
    assert names(next_step(s)) == names(step)


def test_random_arrivals_end_with_all_their_tokens_on_every_rank() -> None:
    rng, s = random.Random(0), scheduler(3)
    waiting = [request(str(i), rng.randint(1, 40)) for i in range(17)]
    lengths = {each.id: len(each.tokens) for each in waiting}
    found: dict[str, int] = {}
    used, idle, rows = set(), 0, 0
    steps: list[ScheduledStep] = []
    while waiting or s.requests:
        if waiting and rng.random() < 0.6:
            s.add(waiting.pop())
        step = s.next_step()
        if step is not None:
            assert len(step.parts) == 3
            idle += any(not part.num_tokens for part in step.parts)
            used |= {rank for rank, part in enumerate(step.parts) if part.num_tokens}
            rows += sum(part.num_decoding for part in step.parts)
            requests = s.step_requests(-1)
            assert [each.id for each, chunk in requests if chunk is not None] == names(step)
            steps.append(step)
        if not steps or (len(steps) == 1 and rng.random() < 0.7):
            continue
        requests, step = s.step_requests(0), steps.pop(0)
        outputs = s.finish_step(
            step,
            [[100 + int(r.id)] * chunk.num_samples for r, chunk in requests if chunk is not None],
            [100 + int(r.id) for r, chunk in requests if chunk is None],
        )
        for output in outputs:
            assert set(output.token_ids) <= {100 + int(output.request_id)}
            found[output.request_id] = found.get(output.request_id, 0) + len(output.token_ids)
        s.check()
    assert rows > 20
    assert found == dict.fromkeys(lengths, 5) and used == {0, 1, 2} and idle
    assert s.counters.generated_tokens == 17 * 5


def test_a_pooling_step_of_one_rank_is_a_padded_step_for_the_others() -> None:
    s = scheduler()
    s.add(Request("a", [1, 2, 3], SAMPLED, frozenset(), seed=0, pooling="mean"))
    s.add(request("b"))
    step = next_step(s)
    assert [step.rank_part(rank).pooled for rank in range(2)] == [True, False]
    assert all(step.rank_part(rank).padded_size.pooled for rank in range(2))


def test_with_ep_dp_is_the_number_of_data_ranks_of_one_engine() -> None:
    shared = EngineConfig(dp=4, ep=True)
    assert (shared.num_engines, shared.num_ranks, shared.data_ranks) == (1, 4, 4)
    assert list(shared.reporting_ranks) == [0, 1, 2, 3] and shared.num_processes == 4
    assert engine_environments(shared) == [{}]
    of_two = EngineConfig(dp=4, ep=True, tp=2)
    assert (of_two.num_engines, of_two.num_ranks, of_two.data_ranks) == (1, 8, 4)
    assert list(of_two.reporting_ranks) == [0, 2, 4, 6] and of_two.expert_ranks == 8
    in_stages = EngineConfig(dp=4, ep=True, tp=2, pp=2)
    assert (in_stages.num_engines, in_stages.num_ranks, in_stages.data_ranks) == (4, 4, 1)
    assert (list(in_stages.reporting_ranks), in_stages.expert_ranks) == ([2], 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "set tp to their number, or dp"),
        ({"dp": 2, "pp": 2}, "^pp is not supported with dp and ep"),
    ],
)
def test_what_ranks_that_share_experts_cannot_do_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(ep=True, **given)


def test_ranks_that_share_experts_do_not_promise_equal_bits() -> None:
    config = EngineConfig(dp=2, ep=True, options={"batch_invariant": True})
    with pytest.raises(ValueError, match="batch_invariant is not supported with dp and ep"):
        ProgramCompiler(config, nn.Module(), Place(experts=TensorParallel(0, 2, "")))


def test_only_the_experts_have_to_divide() -> None:
    fields = {"num_attention_heads": 7, "num_local_experts": 6}
    sizes.check_experts(fields, 3)
    with pytest.raises(ValueError, match=r"^6 experts do not divide by 4; 1, 2, 3 and 6 do$"):
        sizes.check_experts(fields, 4)
    with pytest.raises(ValueError, match="no experts to divide over 2 ranks"):
        sizes.check_experts({"num_attention_heads": 8}, 2)
