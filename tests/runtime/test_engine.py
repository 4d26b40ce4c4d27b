"""The engine on the demo model: what a request gets does not depend on what else runs, nor on
how.
"""

import cProfile
import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from atomc.loading import loader
from atomc.runtime import engine as module_of_engine
from atomc.runtime.constrained.grammar_compiler import GrammarCompiler
from atomc.runtime.engine import Engine, EngineConfig, QueueFull
from atomc.runtime.execution import capacity
from atomc.runtime.execution.loading.load import load
from atomc.runtime.execution.views.headless_model import headless_model
from atomc.runtime.execution.worker import LaunchedStep, Worker
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import Request, siblings
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.scheduling.scheduler import Scheduler

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import equality
from embeddings import embed

pytestmark = [pytest.mark.xdist_group("engine"), pytest.mark.usefixtures("compiled_once")]

# fp64, so that rounding decides about no token on any machine.
COMMON = {"dtype": "float64", "device": "cpu"}
LONGEST = 200
MIXES = 20  # bench/equality.py runs more


def engine(layout="paged", **config):
    config = {**COMMON, "max_num_seqs": 8, "kv_bytes": 2**26, "max_model_len": 512, **config}
    return Engine(
        EngineConfig(**config, options={"strict": True, "glue": "eager", "layout": layout}),
        progress=False,
    )


@pytest.fixture(scope="module")
def plain():
    return engine()


@pytest.fixture(scope="module")
def alone():
    return equality.Alone(engine("contiguous", enable_prefix_caching=False))


@pytest.mark.parametrize(
    ("count", "most"), [pytest.param(256, 8.2, marks=pytest.mark.rotating), (64, 13)]
)
def test_a_decode_step_makes_few_calls_for_each_request(count, most, monkeypatch):
    steps = 32  # some requests cross a block border in each
    started = engine(max_num_seqs=count, max_num_batched_tokens=1024, kv_bytes=2**28)
    params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
    for i in range(count):
        started.add(started.request(str(i), range(1, 2 + i % 16), params))
    while any(request.num_new < 2 for request in started.scheduler.requests.values()):
        started.step()
    calls, run_model = cProfile.Profile(), started.executor.runner._run

    def outside(*args, **kwargs):
        calls.disable()
        logits = run_model(*args, **kwargs)
        calls.enable()
        return logits

    monkeypatch.setattr(started.executor.runner, "_run", outside)
    calls.enable()
    for _ in range(steps):
        assert len(started.step()) == count
    calls.disable()
    assert sum(entry.callcount for entry in calls.getstats()) <= most * steps * count


def run(engine, *requests):
    """The outputs of each request by its id."""
    found = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].append(output)
        engine.check()
    assert not engine.scheduler.pool.owners
    return found


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.covering
@pytest.mark.parametrize("number", range(len(equality.ENGINES)))
def test_what_a_request_gets_is_what_it_gets_alone(alone, number):
    one = equality.engine_of(equality.ENGINES[number], COMMON, {}, LONGEST)
    for seed in range(number, MIXES, len(equality.ENGINES)):
        requests = equality.mix(seed, one.vocab_size, one.max_len - equality.LONGEST_ANSWER, 6)
        assert (
            equality.differences(alone, requests, equality.run_mix(one, requests), bound=0.0) == []
        )


@pytest.mark.rotating
def test_in_fp32_too_where_products_do_not_depend_on_their_rows():
    common, options = {"dtype": "float32", "device": "cpu"}, {"batch_invariant": True}
    alone = equality.Alone(equality.engine_of(equality.ENGINES[2], common, options, LONGEST))
    one = equality.engine_of({**equality.ENGINES[1], "num_blocks": 30}, common, options, LONGEST)
    for seed in range(2):
        requests = equality.mix(seed, one.vocab_size, LONGEST, 6)
        assert (
            equality.differences(alone, requests, equality.run_mix(one, requests), bound=0.0) == []
        )


def test_the_first_call_launches_and_the_next_one_tells(plain):
    plain.add(plain.request("a", [5, 6, 7], SamplingParams(max_tokens=2, ignore_eos=True)))
    assert plain.step() == [] and plain.has_work
    (first,), (last,) = plain.step(), plain.step()
    assert (first.finish_reason, last.finish_reason, len(first.token_ids), len(last.token_ids)) == (
        None,
        "length",
        1,
        1,
    )
    assert plain.step() == [] and not plain.has_work


def test_log_probabilities_of_output_and_prompt(plain):
    prompt = list(range(100, 240))
    params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    outputs = run(plain, plain.request("a", prompt, params))["a"]
    new = tokens(outputs)
    module = load(EngineConfig(**COMMON)).module
    with torch.no_grad():
        ids = torch.tensor([*prompt, *new])
        expected = module(ids, torch.arange(len(ids))).log_softmax(-1)
    scores = outputs[0].prompt_logprobs
    assert len(scores) == len(prompt) and scores[0] is None and outputs[1].prompt_logprobs is None
    for position, score in enumerate(scores[1:]):
        assert score.token == prompt[position + 1]
        assert score.logprob == pytest.approx(float(expected[position, score.token]), abs=1e-4)
        assert score.top[0][0] == int(expected[position].argmax())
    for position, one in enumerate(
        (one for output in outputs for one in output.logprobs), len(prompt) - 1
    ):
        assert one.rank == 1 and one.top[0] == (one.token, one.logprob) and len(one.top) == 2
        assert one.logprob == pytest.approx(float(expected[position].max()), abs=1e-4)


def test_answers_to_one_prompt_differ_and_share_its_blocks(plain):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=3, n=3, ignore_eos=True)
    request = plain.request("a", list(range(40)), params)
    found = run(plain, *siblings(request))
    assert len({tuple(tokens(outputs)) for outputs in found.values()}) == 3
    assert [found[f"a/{i}"][0].num_cached for i in range(3)] == [0, 32, 32]
    assert [tokens(outputs) for outputs in run(plain, *siblings(request)).values()] == [
        *map(tokens, found.values())
    ]


def test_a_salt_keeps_prefixes_apart(plain):
    params = SamplingParams(max_tokens=1)

    def cached(name, salt):
        return run(plain, plain.request(name, [7] * 40, params, salt=salt))[name][0].num_cached

    assert [cached("a", "x"), cached("b", "x"), cached("c", "y"), cached("d", None)] == [
        0,
        32,
        0,
        0,
    ]


def test_output_fits_the_form_that_was_asked_for(plain):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1)
    forms = {"json": Structured(json_schema=schema), "choice": Structured(choice=("king", "queen"))}
    requests = [
        plain.request(name, [5, 6], replace(params, structured=form))
        for name, form in forms.items()
    ]
    free = plain.request("free", [5, 6], params)
    found = run(plain, *requests, free)
    text = {name: plain.tokenizer.decode(tokens(outputs)) for name, outputs in found.items()}
    assert text["choice"] in ("king", "queen") and abs(json.loads(text["json"])["a"]) >= 0
    assert all(found[name][-1].finish_reason == "stop" for name in forms)
    assert tokens(run(plain, plain.request("alone", [5, 6], replace(params)))["alone"]) == tokens(
        found["free"]
    )


def test_a_form_that_cannot_be_compiled_is_refused(plain):
    with pytest.raises(ValueError, match="regex"):
        plain.add(plain.request("a", [5], SamplingParams(structured=Structured(regex="("))))
    assert not plain.has_work


def test_drafts_change_no_token_and_are_counted(plain):
    one = engine(speculative_tokens=4)
    prompt = [11, 12, 13, 14, 15] * 6
    for params in (
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(
            max_tokens=30, ignore_eos=True, temperature=0.7, seed=5, repetition_penalty=1.2
        ),
        SamplingParams(max_tokens=30, structured=Structured(regex="(the king |a queen ){4}")),
    ):
        assert tokens(run(one, one.request("a", prompt, params))["a"]) == tokens(
            run(plain, plain.request("a", prompt, params))["a"]
        )
    stats = one.stats()
    assert stats.drafted > stats.accepted > 0 and stats.generated_tokens <= 90


def test_embeddings_are_the_hidden_states_while_others_generate(plain):
    module = headless_model(load(EngineConfig(**COMMON)).module)
    prompts = [[5, 6, 7], [9] * 90, [*range(40)]]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected_tokens = tokens(run(plain, plain.request("a", [8, 9], params))["a"])
    plain.add(plain.request("a", [8, 9], params))
    for pooling in ("mean", "last"):
        for prompt, found in zip(prompts, embed(plain, prompts, pooling), strict=True):
            with torch.no_grad():
                states = module(torch.tensor(prompt), torch.arange(len(prompt)))
            expected = states.mean(0) if pooling == "mean" else states[-1]
            torch.testing.assert_close(
                torch.tensor(found, dtype=torch.float64), expected, atol=1e-4, rtol=1e-4
            )
    outputs = []
    while plain.has_work:
        outputs += plain.step()
    assert tokens(outputs) == expected_tokens


def test_a_model_without_a_known_head_has_no_embeddings():
    with pytest.raises(ValueError, match="Linear has no head named lm_head or embed_out"):
        headless_model(torch.nn.Linear(2, 2))


def test_a_step_that_fails_leaves_the_requests_as_they_were(plain, monkeypatch):
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = tokens(run(plain, plain.request("a", [3, 4], params))["a"])
    plain.add(plain.request("a", [3, 4], params))
    outputs = plain.step() + plain.step()

    def broken(*_):
        raise RuntimeError("the device said no")

    with monkeypatch.context() as patch:
        patch.setattr(plain.executor.runner, "logits", broken)
        with pytest.raises(RuntimeError, match="said no"):
            plain.step()
        plain.check()
    while plain.has_work:
        outputs += plain.step()
    assert tokens(outputs) == expected


def test_a_full_queue_refuses_and_says_when_to_come_again(plain, monkeypatch):
    monkeypatch.setattr(plain.scheduler, "max_queue", 1)
    plain.add(plain.request("a", [5]))
    with pytest.raises(QueueFull, match="1 requests wait already"):
        plain.add(plain.request("b", [5]))
    assert plain.abort("a") and not plain.has_work


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5] * 600, "a prompt of 600 tokens does not fit, at most 511 do"),
        ([3072], "token id 3072 is not in the vocabulary"),
    ],
)
def test_what_can_never_run_is_refused(plain, prompt, message):
    with pytest.raises(ValueError, match=message):
        plain.add(plain.request("a", prompt))
    assert not plain.has_work


def test_the_layout_without_shared_blocks_says_so(caplog):
    with caplog.at_level("INFO", logger="atomc"):
        one = engine("contiguous")
    said = (
        "in layout 'contiguous' a block holds a whole sequence, so none can be shared; "
        "use layout 'paged'"
    )
    assert not one.scheduler.pool.shares
    assert one.stats().no_prefix_cache == said
    assert f"no prefix cache: {said}" in one.program.report.notes
    assert f"no prefix cache: {said}" in caplog.messages


def test_a_prefix_cache_that_the_layout_cannot_have_is_refused():
    with pytest.raises(
        ValueError, match=r"enable_prefix_caching: in layout 'contiguous' .* use layout 'paged'"
    ):
        engine("contiguous", enable_prefix_caching=True)


@pytest.mark.rotating
def test_a_cpu_has_a_prefix_cache_if_nothing_is_said():
    one = engine(None)
    assert one.scheduler.pool.shares and one.stats().no_prefix_cache == ""
    assert (
        engine(None, enable_prefix_caching=False).stats().no_prefix_cache
        == "enable_prefix_caching is off"
    )


def test_a_step_on_a_cpu_has_256_tokens_if_nothing_is_said_and_at_least_one_for_each_sequence():
    assert engine(None).scheduler.max_num_batched_tokens == 256
    assert engine(None, max_num_seqs=300).scheduler.max_num_batched_tokens == 300
    assert engine(None, max_num_batched_tokens=8).scheduler.max_num_batched_tokens == 8


def test_stats_add_up(plain):
    before = plain.stats()
    run(
        plain,
        plain.request("a", list(range(300, 340)), SamplingParams(max_tokens=5, ignore_eos=True)),
    )
    after = plain.stats()
    assert (
        after.generated_tokens - before.generated_tokens == 5
        and after.prompt_tokens - before.prompt_tokens == 40
    )
    assert (after.running, after.waiting, after.kv_blocks_used, after.kv_tokens_used) == (
        0,
        0,
        0,
        0,
    )
    assert sum(after.steps.values()) - sum(before.steps.values()) == 5 and after.host_ms > 0


def test_a_stop_string_ends_a_request_and_n_gives_as_many_answers():
    llm = LLM(**COMMON, kv_bytes=2**26, options={"strict": True, "glue": "eager"}, progress=False)
    (whole,) = llm.generate("Once upon a time", SamplingParams(max_tokens=20))
    stop = whole.text[8:11]
    (cut,) = llm.generate("Once upon a time", SamplingParams(max_tokens=20, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)] and (
        cut.finish_reason,
        cut.stop_reason,
    ) == ("stop", stop)
    assert not llm.engine.scheduler.requests
    params = SamplingParams(max_tokens=4, n=2, temperature=1.0, seed=2, logprobs=0)
    answers = llm.generate(["Once", "The king"], params)
    assert [len(answer.logprobs) for answer in answers] == [
        len(answer.token_ids) for answer in answers
    ]
    assert len(answers) == 4 and answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].token_ids != answers[1].token_ids


def test_a_config_that_cannot_be_is_refused():
    for given, message in (
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
        ({"max_queue": 0}, "max_queue is 0"),
        ({"scheduling_policy": "random"}, "expected one of"),
        ({"ngram_max": 1}, "least ngram_min"),
        ({"speculative_tokens": -1}, "must be 0"),
        ({"dtype": "float13"}, "dtype is 'float13'"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineConfig(**given)


def test_a_cache_that_memory_cannot_hold_is_refused_with_what_to_lower():
    with pytest.raises(
        ValueError, match=r"while starting: lower num_blocks \(now 1000000000000\), max_num_batched"
    ):
        engine(kv_bytes=None, num_blocks=10**12)


def test_a_cache_whose_pages_the_host_does_not_have_is_refused_before_they_are_written(monkeypatch):
    asleep = engine()
    asleep.sleep()
    monkeypatch.setattr(capacity, "free_on_host", lambda: 2**25)
    with pytest.raises(ValueError, match=r"while starting: lower kv_bytes \(now 67108864\), "):
        engine()
    with pytest.raises(ValueError, match="wake_up: out of memory, the engine sleeps on"):
        asleep.wake_up()


def test_weights_that_memory_cannot_hold_are_refused_with_what_to_do(monkeypatch):
    def full(*_, **__):
        return torch.empty(2**60)

    monkeypatch.setattr(loader, "load", full)
    with pytest.raises(
        ValueError, match="out of memory while reading the weights: use a smaller model"
    ):
        engine()


def test_requests_are_told_apart_from_those_that_had_their_id_before(plain):
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    expected = tokens(run(plain, plain.request("a", [1, 2], params))["a"])
    plain.add(plain.request("a", [9, 9, 9], params))
    plain.step()
    plain.abort("a")
    plain.add(plain.request("a", [1, 2], params))
    outputs = []
    while plain.has_work:
        outputs += plain.step()
        plain.check()
    assert tokens(outputs) == expected
    assert isinstance(plain.scheduler, Scheduler) and isinstance(plain.request("b", [1]), Request)


def test_a_request_that_ended_while_its_next_step_was_launched_has_no_mask(plain, monkeypatch):
    rows, ended, original = [], [], GrammarCompiler.fill

    def fill(grammars, mask, given):
        rows.append(len(given))
        ended.extend(matcher.finished for matcher, *_ in given)
        original(grammars, mask, given)

    monkeypatch.setattr(GrammarCompiler, "fill", fill)
    params = SamplingParams(max_tokens=60, structured=Structured(choice=("king",)))
    longer = replace(params, structured=Structured(choice=("the king of the mountains",)))
    found = run(plain, plain.request("a", [5, 6], params), plain.request("b", [5, 6], longer))
    assert found["a"][-1].finish_reason == "stop" and max(rows) == 2 and rows[-1] == 1
    assert not any(ended)


@pytest.mark.parametrize("constrained", [False, True])
def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_read(
    plain, monkeypatch, constrained
):
    """The masks of a step, which need these tokens, are computed while the device runs it."""
    calls = []

    def record(owner, name):
        original = getattr(owner, name)

        def recorded(*args):
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(owner, name, recorded)

    record(Worker, "launch")
    record(GrammarCompiler, "fill")
    record(LaunchedStep, "sample")
    record(LaunchedStep, "results")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    masked = replace(
        params,
        ignore_eos=False,
        structured=Structured(regex="[a-z ]{99}"),
        logprobs=1,
        frequency_penalty=0.5,
    )
    requests = [plain.request("a", [5, 6], params)]
    requests += [plain.request("b", [5, 6], masked)] if constrained else []
    run(plain, *requests)
    if constrained:
        following = ["launch", "results", "fill", "sample"]
        assert calls == ["launch", "fill", "sample", *following, *following, "results"]
    else:
        following = ["launch", "sample", "results"]
        assert calls == ["launch", "sample", *following, *following, "results"]


class Clock:
    """time.perf_counter of an engine whose steps take 5 ms, and 0.1 ms more for each token: in
    `launch` as on a CPU, or until their results arrive.
    """

    def __init__(self, started, monkeypatch, in_launch):
        self.now, self.launch = 0.0, started.executor.launch
        monkeypatch.setattr(started, "_runs_in_launch", in_launch)
        self.in_launch = in_launch
        monkeypatch.setattr(module_of_engine.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(started.executor, "launch", self.timed)

    def timed(self, step):
        launched = self.launch(step)
        results, seconds = launched.results, 5e-3 + 1e-4 * step.num_tokens

        def later():
            self.now += seconds
            return results()

        if self.in_launch:
            self.now += seconds
        else:
            launched.results = later
        return launched


@pytest.mark.parametrize("in_launch", [True, False])
@pytest.mark.parametrize("speculative_tokens", [0, 2])
def test_a_burst_of_prompts_leaves_the_gaps_of_a_stream_below_max_itl_ms(
    monkeypatch, speculative_tokens, in_launch
):
    started = engine(
        max_itl_ms=15, max_num_batched_tokens=512, speculative_tokens=speculative_tokens
    )
    assert started.stats().prompt_limit == 512  # nothing runs
    clock, arrived, answers = Clock(started, monkeypatch, in_launch), [], {}
    long = SamplingParams(max_tokens=120, ignore_eos=True)
    started.add(started.request("stream", [1, 2, 3], long))
    steps = 0
    while started.has_work:
        if steps == 10:
            for i in range(7):
                started.add(started.request(f"{i}", [5 + i] * 300, SamplingParams(max_tokens=2)))
        for output in started.step():
            answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.request_id == "stream":
                arrived.append(clock.now)
        steps += 1
        if steps == 30:
            assert 60 < started.stats().prompt_limit < 100
    assert len(answers["stream"]) == 120 and len(answers) == 8
    gaps = [1e3 * (after - before) for before, after in pairwise(arrived)]
    assert 13 < max(gaps) <= 15 and started.stats().prompt_limit == 512


def test_steps_without_results_are_not_timed(monkeypatch):
    started = engine(max_itl_ms=15, max_num_batched_tokens=128)
    clock = Clock(started, monkeypatch, in_launch=False)
    waits, timed = clock.timed, []
    monkeypatch.setattr(  # without results, the device goes on while the host does not wait
        started.executor, "launch", lambda step: (waits if step.num_samples else clock.launch)(step)
    )
    monkeypatch.setattr(
        started._prompt_budget, "add", lambda step, ms: timed.append((step.num_tokens, ms))
    )
    run(started, started.request("a", [1] * 300, SamplingParams(max_tokens=3, ignore_eos=True)))
    # Of 128, 128 and 44 tokens of the prompt, the last one ends after those before it.
    assert timed == [(1, pytest.approx(5.1)), (1, pytest.approx(5.1))]
