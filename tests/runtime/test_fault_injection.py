"""Each step of the engine that belongs to one request raises in turn, under 20 others: the request
fails with the reason, the others get the tokens of their lone runs, and nothing is left behind."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from embeddings import embed

from atomc.runtime.constrained.grammar_compiler import GrammarCompiler, GrammarMatcher
from atomc.runtime.constrained.structured_outputs import StructuredMatchers
from atomc.runtime.engine import Engine, EngineConfig
from atomc.runtime.execution import output_processor
from atomc.runtime.llm import LLM
from atomc.runtime.requests.request import Request
from atomc.runtime.requests.request_errors import RequestErrors, RequestFailed
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.requests.sampling_params import SamplingParams, Structured
from atomc.runtime.sampling.row_logprobs import LogprobsRow
from atomc.runtime.sampling.token_counts import TokenCounts
from atomc.runtime.scheduling import chunks, prefix_sharing
from atomc.runtime.scheduling.blocks import BlockPool
from atomc.runtime.scheduling.scheduler import Scheduler
from atomc.runtime.scheduling.speculative import NGramProposer
from atomc.runtime.text.detokenizer import Detokenizer
from atomc.runtime.text.text_stream import TextStream

pytestmark = [pytest.mark.xdist_group("engine"), pytest.mark.usefixtures("compiled_once")]

# fp64, so that rounding does not change tokens.
CONFIG = {
    "dtype": "float64",
    "device": "cpu",
    "max_num_seqs": 24,
    "kv_bytes": 2**26,
    "max_model_len": 256,
    "seed": 0,
    "max_num_batched_tokens": 128,
    "options": {"strict": True, "glue": "eager", "layout": "paged"},
}
PROMPT = [11, 12, 13, 14, 15] * 7  # more than two blocks, and repetitive, so that there are drafts
VICTIM_LOGPROBS = 7
KINDS = [
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logprobs": 2},
    {
        "temperature": 0.8,
        "structured": Structured(regex="(the king |a queen ){3}"),
        "ignore_eos": False,
    },
    {"prompt_logprobs": 1},
    {"temperature": 1.0, "top_k": 5, "logit_bias": {9: 2.0}, "min_tokens": 2},
]


class PanicException(BaseException):
    """Like pyo3's PanicException, which is no Exception."""


def others(engine):
    """20 requests; some share a prefix with the victim."""
    rng = random.Random(0)
    for i in range(20):
        prompt = PROMPT[: rng.choice([0, 0, 16, 33])] + rng.choices(
            range(1, 40), k=rng.randint(1, 40)
        )
        params = {
            "max_tokens": rng.randint(4, 12),
            "seed": i,
            "ignore_eos": True,
            **KINDS[i % len(KINDS)],
        }
        yield engine.request(f"other {i}", prompt, SamplingParams(**params))


def victim(engine, **given):
    """A request that uses every feature except pooling."""
    params = SamplingParams(
        max_tokens=12,
        temperature=0.7,
        seed=5,
        repetition_penalty=1.1,
        logit_bias={9: 1.0},
        logprobs=VICTIM_LOGPROBS,
        structured=Structured(regex="(the king |a queen ){9}"),
    )
    salt = given.pop("salt", None)
    pooling = given.pop("pooling", None)
    return engine.request(
        "victim",
        PROMPT,
        SamplingParams() if pooling else replace(params, **given),
        salt=salt,
        pooling=pooling,
    )


def run(engine, requests, late=()):
    """The outputs of each request by id; `late` ones are added after two steps. An error of `add`
    counts as the output.
    """
    found, steps, late = {}, 0, list(late)
    for request in requests:
        engine.add(request)
    while engine.has_work or late:
        if steps == 2:
            for request in late:
                try:
                    engine.add(request)
                except (RequestFailed, ValueError) as refused:
                    found[request.id] = [refused]
            late = []
        for one in engine.step():
            found.setdefault(one.request_id, []).append(one)
        engine.check()
        steps += 1
    return found


def tokens(outputs):
    return [token for one in outputs for token in one.token_ids]


def nothing_is_left(engine):
    pool = engine.scheduler.pool
    assert not pool.owners and pool.num_free == pool.num_blocks
    assert not engine.scheduler.requests and not engine.request_errors.failed
    assert not engine._states
    # What the worker still has goes with the next step.
    run(engine, [engine.request("next", [5], SamplingParams(max_tokens=1))])
    slots = engine.executor.slots
    assert [state.request_id for state in slots.states.values()] == ["next"]
    assert sorted(slots.counts.free) == list(range(len(slots.counts.output)))


@pytest.fixture(scope="module", params=[0, 3], ids=["plain", "drafts"])
def started(request):
    return Engine(EngineConfig(**CONFIG, speculative_tokens=request.param), progress=False)


@pytest.fixture
def engine(started):
    yield started
    for name in list(started.scheduler.requests):
        started.abort(name)
    while started.has_work:
        started.step()


@pytest.fixture(scope="module")
def alone(started):
    return {request.id: tokens(run(started, [request])[request.id]) for request in others(started)}


@pytest.fixture(scope="module")
def llm():
    return LLM(progress=False, **CONFIG)


GRAMMARS = "grammars"  # of the engine


@dataclass
class Hook:
    """What the engine does for one request: an attribute of `owner`.

    concerns    whether a call with these arguments is for the victim
    at          from this call for the victim on it raises
    given       of the victim
    speculates  only an engine that makes drafts does it
    """

    owner: object
    name: str
    concerns: object
    at: int = 1
    given: tuple[tuple[str, object], ...] = ()
    speculates: bool = False

    def __str__(self):
        return f"{getattr(self.owner, '__name__', self.owner).rpartition('.')[2]}.{self.name}"

    def break_(self, engine, error, monkeypatch):
        """Makes the hook raise from now on; returns the list of raised errors."""
        owner = engine.structured_outputs._compiler if self.owner is GRAMMARS else self.owner
        original, raised, calls = getattr(owner, self.name), [], 0

        def broken(*args, **kwargs):
            nonlocal calls
            if self.concerns(engine, *args):
                calls += 1
                if calls >= self.at:
                    raised.append(error)
                    raise error
            return (original.fget if isinstance(original, property) else original)(*args, **kwargs)

        monkeypatch.setattr(
            owner, self.name, property(broken) if isinstance(original, property) else broken
        )
        return raised


def matcher_is_victims(engine, matcher):
    return "victim" in engine._states and engine._states["victim"].matcher is matcher


def proposer_is_victims(engine, proposer):
    return "victim" in engine._states and engine._states["victim"].proposer is proposer


def counts_are_victims(engine, counts):
    return any(
        state.counts is counts and state.request_id == "victim"
        for state in engine.executor.slots.states.values()
    )


SCORED = (("prompt_logprobs", 1),)
SALTED = (("salt", "victim"),)
FREE = (("structured", None), ("temperature", 0.0), ("max_tokens", 40))
HOOKS = [
    # Admitted
    Hook(StructuredMatchers, "matcher", lambda engine, self, form: form.regex.endswith("{9}")),
    Hook(GRAMMARS, "compile", lambda engine, form: form.regex.endswith("{9}")),
    Hook(Scheduler, "add", lambda engine, self, request: request.id == "victim"),
    # Scheduled
    Hook(prefix_sharing, "extend_keys", lambda engine, request, size: request.salt == "victim", given=SALTED),
    Hook(prefix_sharing, "extend_keys", lambda engine, request, size: request.salt == "victim", at=2, given=SALTED),
    Hook(chunks, "_admission", lambda engine, request: request.id == "victim"),
    Hook(BlockPool, "take_new_blocks", lambda engine, self, owner: owner == "victim", at=2, given=FREE),
    Hook(BlockPool, "take_new_blocks", lambda engine, self, owner: owner == "victim", at=3, given=FREE),
    Hook(NGramProposer, "propose", lambda engine, self, *_: proposer_is_victims(engine, self), speculates=True),
    # Constrained
    Hook(GrammarCompiler, "fill", lambda engine, self, mask, rows: any(matcher_is_victims(engine, row[0]) for row in rows)),
    Hook(GrammarCompiler, "fill", lambda engine, self, mask, rows: any(matcher_is_victims(engine, row[0]) for row in rows),
         at=4),
    Hook(GrammarMatcher, "accept", lambda engine, self, token: matcher_is_victims(engine, self)),
    Hook(GrammarMatcher, "accept", lambda engine, self, token: matcher_is_victims(engine, self), at=4),
    # Sampled
    Hook(SampleSpec, "banned", lambda engine, self: counts_are_victims(engine, self.counts)),
    Hook(SampleSpec, "banned", lambda engine, self: counts_are_victims(engine, self.counts), at=3),
    Hook(TokenCounts, "_make", lambda engine, self, counts, length: counts_are_victims(engine, counts)),
    # Read
    Hook(LogprobsRow, "read", lambda engine, self: self.count == VICTIM_LOGPROBS),
    Hook(LogprobsRow, "read", lambda engine, self: self.count == VICTIM_LOGPROBS, at=3),
    Hook(output_processor._HostResults, "result", lambda engine, self, chunk, *_: chunk.request_id == "victim"),
    Hook(output_processor._HostResults, "checked_logprobs", lambda engine, self, state, *_: state.request_id == "victim",
         at=2, given=FREE),
    Hook(Request, "accept", lambda engine, self, *_: self.id == "victim"),
    Hook(Request, "finish", lambda engine, self: self.id == "victim", given=FREE),
    Hook(BlockPool, "cache", lambda engine, self, owner, *_: owner == "victim", given=(("salt", "names"),)),
    Hook(BlockPool, "cache", lambda engine, self, owner, *_: owner == "victim", at=3,
         given=(*FREE, ("salt", "names"))),
    # Scored and pooled
    Hook(output_processor, "_scores", lambda engine, chunk, *_: chunk.request_id == "victim", given=SCORED),
    Hook(output_processor, "_pooled", lambda engine, chunk, *_: chunk.request_id == "victim", given=(("pooling", "mean"),)),
]  # fmt: skip


ERRORS = {"error": RuntimeError("broken"), "panic": PanicException("broken")}


# Per change each hook raises one of both, by turns.
@pytest.mark.covering
@pytest.mark.parametrize(
    ("hook", "error"),
    [
        pytest.param(
            hook, error, id=f"{hook}-{kind}", marks=() if (i + j) % 2 == 0 else pytest.mark.slow
        )
        for i, hook in enumerate(HOOKS)
        for j, (kind, error) in enumerate(ERRORS.items())
    ],
)
def test_what_raises_for_one_request_fails_it_and_changes_no_token_of_the_others(
    engine, alone, hook, error, monkeypatch
):
    if hook.speculates and not engine._speculates:
        pytest.skip("this engine makes no drafts")
    with monkeypatch.context() as patch:
        raised = hook.break_(engine, error, patch)
        found = run(engine, others(engine), late=[victim(engine, **dict(hook.given))])
    assert raised
    last = found.pop("victim")[-1]
    assert isinstance(last, RequestFailed | ValueError) or (
        last.finish_reason == "error" and last.error.message
    )
    assert {name: tokens(outputs) for name, outputs in found.items()} == alone
    nothing_is_left(engine)
    (again,) = run(engine, [victim(engine)]).values()
    assert again[-1].finish_reason == "length"


def test_masks_that_fail_together_and_not_alone_change_no_token_and_are_logged(
    engine, alone, monkeypatch, caplog
):
    original = GrammarCompiler.fill

    def fails_for_several(self, mask, rows):
        if len(rows) > 1:
            raise RuntimeError("no memory for so many")
        original(self, mask, rows)

    with monkeypatch.context() as patch:
        patch.setattr(GrammarCompiler, "fill", fails_for_several)
        found = run(engine, others(engine))
    assert {name: tokens(outputs) for name, outputs in found.items()} == alone
    assert "no memory for so many" in caplog.text


def run_past_failure(engine, requests, monkeypatch, *, fails, at):
    """The tokens of these requests if launch number `at`, or what it samples, raises once."""
    launch, launches, failures = engine.executor.launch, 0, 0

    def fail(*_):
        raise RuntimeError("no memory")

    def broken(step):
        nonlocal launches
        launches += 1
        if launches == at and fails == "launch":
            fail()
        running = launch(step)
        if launches == at:
            monkeypatch.setattr(type(running), "sample", fail)
        return running

    monkeypatch.setattr(engine.executor, "launch", broken)
    for request in requests:
        engine.add(request)
    found = {}
    while engine.has_work:
        try:
            outputs = engine.step()
        except RuntimeError:
            failures, outputs = failures + 1, []
            monkeypatch.undo()
        engine.check()
        for one in outputs:
            found.setdefault(one.request_id, []).append(one)
    monkeypatch.undo()
    assert failures == (launches >= at)
    return {name: tokens(outputs) for name, outputs in found.items()}


@pytest.mark.parametrize("fails", ["launch", "sample"])
def test_outputs_of_the_last_step_come_with_the_next_one_if_a_step_fails_as_a_whole(
    engine, alone, fails, monkeypatch
):
    assert run_past_failure(engine, others(engine), monkeypatch, fails=fails, at=6) == alone
    nothing_is_left(engine)


def test_the_last_output_of_the_last_request_comes_after_a_step_that_fails_as_a_whole(
    engine, monkeypatch
):
    def request():
        params = SamplingParams(max_tokens=12, structured=Structured(regex="the king"))
        return engine.request("only", PROMPT, params)

    expected = {"only": tokens(run(engine, [request()])["only"])}
    assert 1 < len(expected["only"]) < 12
    for at in range(1, len(expected["only"]) + 2):
        found = run_past_failure(engine, [request()], monkeypatch, fails="sample", at=at)
        assert found == expected, at


def test_an_aborted_request_has_no_output_after_a_step_that_failed_as_a_whole(engine, monkeypatch):
    engine.add(engine.request("stopped", PROMPT, SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.add(engine.request("kept", PROMPT, SamplingParams(max_tokens=9, ignore_eos=True)))
    engine.step()
    engine._outputs += engine._collect()
    engine.abort("stopped")
    assert [one.request_id for one in engine.step()] == ["kept"]


# What the model gives


def poison(engine, monkeypatch, value, places=slice(None), first=1):
    """From its step `first` on, the victim's logits have this value."""
    original, steps, slot = engine.executor.runner.logits, 0, None

    def logits(step):
        nonlocal steps, slot
        found, row = original(step).clone(), 0
        for chunk in step.chunks:
            if chunk.request_id == "victim":
                slot = chunk.slot
                steps += bool(chunk.num_samples)
                if steps >= first:
                    found[row : row + chunk.num_output_rows, places] = value
            elif chunk.slot == slot:
                slot = None
            row += chunk.num_output_rows
        if slot in step.decoding.slots:
            steps += 1
            if steps >= first:
                found[row + step.decoding.slots.index(slot), places] = value
        return found

    monkeypatch.setattr(engine.executor.runner, "logits", logits)


NAN, INF = float("nan"), float("inf")
GREEDY = (*FREE, ("repetition_penalty", 1.0), ("logit_bias", {}))
RANDOM = (("structured", None), ("top_p", 0.9))
ALL = slice(None)
UNDEFINED = [(NAN, ALL, "NaN"), (NAN, 17, "NaN"), (INF, 17, "infinite"), (-INF, ALL, "infinite")]


@pytest.mark.rotating(each_case=3)
@pytest.mark.parametrize(
    ("value", "places", "what", "given"),
    [*((*each, given) for each in UNDEFINED for given in (GREEDY, RANDOM)), (NAN, ALL, "NaN", ())],
)
def test_logits_of_which_no_token_can_be_drawn_are_an_error_of_the_model_at_that_step(
    engine, alone, value, places, what, given, monkeypatch
):
    with monkeypatch.context() as patch:
        poison(engine, patch, value, places)
        found = run(engine, others(engine), late=[victim(engine, **dict(given))])
    (last,) = found.pop("victim")
    assert not last.error.by_client and last.token_ids == ()
    place = f"in step 1 of this request (position {len(PROMPT)})"
    assert f"the model produced logits that are {what} {place}" in last.error.message
    assert {name: tokens(outputs) for name, outputs in found.items()} == alone
    nothing_is_left(engine)


@pytest.mark.rotating
def test_what_a_request_with_undefined_logits_computed_is_not_shared(engine, monkeypatch):
    def cached():
        return run(engine, [victim(engine, salt="poisoned", **dict(GREEDY))])["victim"][
            0
        ].num_cached

    assert [cached(), cached()] == [0, 32]
    with monkeypatch.context() as patch:
        poison(engine, patch, NAN, first=3)
        outputs = run(engine, [victim(engine, salt="poisoned", **dict(GREEDY))])["victim"]
    assert len(tokens(outputs)) >= 2 and "NaN in step" in outputs[-1].error.message
    assert [cached(), cached()] == [0, 32]


def test_blocks_that_hold_nan_hurt_only_who_owns_them(engine, alone):
    engine.add(victim(engine, salt="nan", **dict(GREEDY)))
    for request in others(engine):
        engine.add(request)
    found = {}
    for step in range(10**6):
        if step == 3:
            blocks = list(engine.scheduler.pool.table("victim"))
            for caches in engine.executor.runner.caches:
                for cache in caches.values():
                    cache[blocks] = NAN
        for one in engine.step():
            found.setdefault(one.request_id, []).append(one)
        engine.check()
        if not engine.has_work:
            break
    assert "NaN" in found.pop("victim")[-1].error.message
    assert {name: tokens(outputs) for name, outputs in found.items()} == alone
    # Their blocks are reused.
    assert {name: tokens(outputs) for name, outputs in run(engine, others(engine)).items()} == alone
    nothing_is_left(engine)


def test_log_probabilities_of_a_prompt_that_are_nan_are_an_error(engine, alone, monkeypatch):
    with monkeypatch.context() as patch:
        original = engine.executor.runner.logits

        def logits(step):
            found = original(step).clone()
            if step.chunks and step.chunks[0].request_id == "victim":
                found[0] = NAN
            return found

        patch.setattr(engine.executor.runner, "logits", logits)
        (last,) = run(engine, [victim(engine, prompt_logprobs=0, **dict(GREEDY))])["victim"]
    assert (
        "NaN for the prompt, at positions 0 to 34" in last.error.message
        and not last.error.by_client
    )
    nothing_is_left(engine)


def test_hidden_states_that_are_nan_are_an_error(engine, monkeypatch):
    assert run(engine, [victim(engine, pooling="last")])["victim"][-1].embedding is not None
    with monkeypatch.context() as patch:
        original = engine.executor.runner.hidden
        patch.setattr(engine.executor.runner, "hidden", lambda *args: original(*args) * NAN)
        (last,) = run(engine, [victim(engine, pooling="last")])["victim"]
        assert "hidden states that are NaN" in last.error.message and last.embedding is None
        with pytest.raises(RequestFailed, match="hidden states that are NaN"):
            embed(engine, [[5, 6], [7]])
    nothing_is_left(engine)
    assert len(embed(engine, [[5, 6], [7]])) == 2


@pytest.mark.rotating
def test_where_bits_do_not_depend_on_the_batch_a_row_of_nan_changes_none_either(monkeypatch):
    options = {**CONFIG["options"], "batch_invariant": True}
    one = Engine(EngineConfig(**{**CONFIG, "dtype": "float32", "options": options}), progress=False)
    alone = {request.id: tokens(run(one, [request])[request.id]) for request in others(one)}
    poison(one, monkeypatch, NAN)
    found = run(one, others(one), late=[victim(one)])
    assert "NaN" in found.pop("victim")[-1].error.message
    assert {name: tokens(outputs) for name, outputs in found.items()} == alone


# Attribution of errors


def test_a_form_without_a_next_token_is_the_clients_error(engine, monkeypatch):
    monkeypatch.setattr(GrammarCompiler, "fill", lambda grammars, mask, rows: mask.zero_())
    *_, last = run(engine, [victim(engine, structured=Structured(regex="a*"))])["victim"]
    assert last.error.by_client and "no token can continue the" in last.error.message
    nothing_is_left(engine)


def test_a_schema_nested_too_deep_is_refused(engine):
    form = Structured(json_schema='{"properties":{"a":' * 500 + "{}" + "}}" * 500)
    with pytest.raises(
        ValueError, match=r"json_schema: (it is nested too deep|recursion limit exceeded)"
    ):
        engine.add(victim(engine, structured=form))
    nothing_is_left(engine)


def test_min_tokens_that_leaves_no_token_is_refused(engine):
    given = {"structured": None, "min_tokens": 2, "stop_token_ids": range(1, engine.vocab_size)}
    with pytest.raises(
        ValueError, match=r"min_tokens is 2, .* whole vocabulary: no token may be sampled"
    ):
        engine.add(victim(engine, **given, logit_bias={}))
    assert run(engine, [victim(engine, **{**given, "stop_token_ids": range(2, engine.vocab_size)})])


def test_what_raises_for_all_rows_of_a_step_is_no_requests_fault(engine, monkeypatch):
    def broken(*_):
        raise RuntimeError("no kernel")

    requests = list(others(engine))[:3]
    for request in requests:
        engine.add(request)
    with monkeypatch.context() as patch:
        patch.setattr("atomc.runtime.sampling.sampler.inverse_transform", broken)
        with pytest.raises(RuntimeError, match="no kernel"):
            for _ in range(2):
                engine.step()
    engine.check()
    assert len(engine.scheduler.requests) == 3


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(),
        GeneratorExit(),
        torch.OutOfMemoryError("full"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_stops_the_process_or_is_the_devices_is_not_contained(error):
    def work():
        raise error

    with pytest.raises(type(error)):
        RequestErrors().run("a", "working", work)


# Text


@pytest.mark.covering
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), PanicException("broken")], ids=["error", "panic"]
)
@pytest.mark.parametrize(
    ("owner", "name", "concerns"),
    [
        (Detokenizer, "flush", lambda self: not self.skip_special_tokens),
        (TextStream, "_match_stop", lambda self, *_: self.params.stop == ("victim",)),
    ],
)
def test_text_that_cannot_be_made_fails_one_prompt_of_many(
    llm, owner, name, concerns, error, monkeypatch
):
    requests = list(others(llm.engine))
    prompts, params = (
        [request.tokens for request in requests],
        [request.params for request in requests],
    )
    expected = llm.generate(prompts, params)
    of_victim = SamplingParams(max_tokens=12, skip_special_tokens=False, stop=("victim",))
    with monkeypatch.context() as patch:
        raised = Hook(owner, name, lambda engine, *args: concerns(*args), at=3).break_(
            llm.engine, error, patch
        )
        *found, last = llm.generate([*prompts, PROMPT], [*params, of_victim])
    assert raised and [(one.text, one.token_ids) for one in found] == [
        (one.text, one.token_ids) for one in expected
    ]
    assert last.finish_reason == "error" and "failed while detokenizing" in last.error.message
    assert all(one.error is None for one in found)
    nothing_is_left(llm.engine)


def test_a_prompt_that_fails_does_not_lose_the_others_and_a_stream_of_it_raises_after_its_text(
    llm, monkeypatch
):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected = llm.generate([[5], [6]], params)
    original, failing = llm.engine.executor.runner.logits, set()

    def logits(step):
        found = original(step).clone()
        for chunk in step.chunks:
            if chunk.start == 0:
                (failing.add if chunk.tokens[0] == 7 else failing.discard)(chunk.slot)
        rows = zip(step.decoding.slots, step.decoding.starts, strict=True)
        for row, (slot, start) in enumerate(rows, len(step.chunks)):
            if slot in failing and start == 3:
                found[row] = NAN
        return found

    monkeypatch.setattr(llm.engine.executor.runner, "logits", logits)
    first, last, second = llm.generate([[5], [7], [6]], params)
    assert [first, second] == expected
    assert (
        last.finish_reason == "error"
        and "NaN in step 4" in last.error.message
        and len(last.token_ids) == 3
    )
    pieces = llm.stream([7], params)
    with pytest.raises(RequestFailed, match="NaN in step 4"):
        for piece in pieces:
            assert last.text.startswith(piece)
            last = replace(last, text=last.text.removeprefix(piece))
    assert last.text == ""
    nothing_is_left(llm.engine)


def test_what_is_raised_when_a_prompt_is_added_fails_that_prompt(llm, monkeypatch):
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (expected,) = llm.generate([[5]], params)
    original = llm.engine.scheduler.add

    def add(request):
        if request.tokens[0] == 7:
            raise RuntimeError("broken")
        original(request)

    monkeypatch.setattr(llm.engine.scheduler, "add", add)
    last, first = llm.generate([[7], [5]], params)
    assert (
        first == expected
        and last.finish_reason == "error"
        and "failed while admitting it" in last.error.message
    )
    nothing_is_left(llm.engine)
