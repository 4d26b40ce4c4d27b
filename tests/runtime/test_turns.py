"""Threads and event loops that use one LLM at the same time get what each gets alone."""

import asyncio
import gc
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from atomc.errors import RunError
from atomc.runtime.interrupts import interrupts_delayed
from atomc.runtime.llm import LLM
from atomc.runtime.requests.sampling_params import SamplingParams, Structured

pytestmark = [pytest.mark.xdist_group("runtime"), pytest.mark.usefixtures("compiled_once")]

# fp64, so that the other requests of a step do not change tokens.
CONFIG = {
    "dtype": "float64",
    "device": "cpu",
    "max_num_seqs": 16,
    "kv_bytes": 2**26,
    "max_model_len": 256,
    "options": {"strict": True, "glue": "eager", "layout": "paged"},
    "progress": False,
}
PROMPTS = ["In the beginning", "And he said", "The king", "She looked at him and"]
PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SECONDS = 60.0


def started():
    return LLM(**CONFIG)


@pytest.fixture(scope="module")
def shared():
    return started()


@pytest.fixture
def llm(shared):
    yield shared
    with shared._turns.take():  # what a deferred abort leaves
        assert not shared.engine.scheduler.requests and not shared._builders
        shared.engine.check()


@pytest.fixture(scope="module")
def alone(shared):
    return [shared.generate(prompt, PARAMS)[0].text for prompt in PROMPTS]


@pytest.fixture
def ctrl_c_raises():
    """Also where a shell has started the tests in the background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def text(llm, number):
    """By `generate` or `stream`."""
    prompt = PROMPTS[number % len(PROMPTS)]
    if number % 3:
        return llm.generate(prompt, PARAMS)[0].text
    return "".join(llm.stream(prompt, PARAMS))


def until(condition, seconds=SECONDS):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it takes too long"
        time.sleep(0.005)


# Threads


def test_calls_of_eight_threads_share_steps_and_give_what_each_gives_alone(llm, alone):
    before = sum(llm.engine.stats().steps.values())
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda number: text(llm, number), range(24)))
    assert texts == alone * 6
    assert sum(llm.engine.stats().steps.values()) - before < 24 * PARAMS.max_tokens / 2


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("", PARAMS, "the prompt is empty"),
        ([5] * 1000, PARAMS, "a prompt of 1000 tokens does not fit"),
        ([10**6], PARAMS, "vocabulary"),
        ("a", SamplingParams(structured=Structured(regex="(")), "invalid regex"),
    ],
)
def test_a_call_that_raises_leaves_the_others(llm, alone, prompt, params, error):
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(text, llm, number) for number in range(8)]
        for _ in range(3):
            with pytest.raises(ValueError, match=error):
                llm.generate([[5], prompt], params)
        assert [other.result(SECONDS) for other in others] == alone * 2


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_call_of_the_main_thread_only(llm, alone, monkeypatch):
    steps, original = 0, llm.engine.step

    def interrupted():
        nonlocal steps
        steps += 1
        if steps % 5 == 0:
            signal.raise_signal(signal.SIGINT)
        return original()

    stop = threading.Event()

    def generate_until_stopped():
        texts = [text(llm, 0)]
        while not stop.is_set():
            texts.append(text(llm, len(texts)))
        return texts

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate_until_stopped)
        patch.setattr(llm.engine, "step", interrupted)
        for number in range(6):
            with pytest.raises(KeyboardInterrupt):
                if number % 2:
                    llm.generate(PROMPTS, LONG)
                else:
                    list(llm.stream(PROMPTS[0], LONG))
        patch.undo()
        stop.set()
        texts = other.result(SECONDS)
    assert texts == (alone * len(texts))[: len(texts)]
    assert text(llm, 1) == alone[1]


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_reaches_a_thread_that_waits_for_the_step_of_another(llm, monkeypatch):
    entered, leave, original = threading.Event(), threading.Event(), llm.engine.step

    def slow():
        entered.set()
        leave.wait(SECONDS)
        return original()

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(llm.engine, "step", slow)
        other = pool.submit(llm.generate, PROMPTS[0], PARAMS)
        assert entered.wait(SECONDS)
        main = threading.main_thread().ident
        timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], PARAMS)
        assert not leave.is_set()
        leave.set()
        assert other.result(SECONDS)[0].finish_reason == "length"


@pytest.mark.rotating
@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_reaches_a_thread_whose_steps_another_runs(llm, monkeypatch):
    original = llm.engine.step

    def slow():
        time.sleep(0.01)
        return original()

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(llm.engine, "step", slow)
        other = pool.submit(llm.generate, PROMPTS[0], LONG)
        until(lambda: llm._turns._owner is not None)
        main = threading.main_thread().ident
        threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[1], LONG)
        assert not other.done()
        patch.undo()
        assert other.result(SECONDS)[0].finish_reason == "length"


def test_a_stream_that_is_collected_aborts_its_request_at_once(llm):
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    assert llm.engine.scheduler.requests
    del stream
    assert not llm.engine.scheduler.requests


def test_a_stream_that_is_collected_during_a_step_ends_after_it(llm, monkeypatch):
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    streams, original, running = [stream], llm.engine.step, []
    del stream

    def collecting():
        streams.clear()
        running.append(len(llm.engine.scheduler.requests))
        return original()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", collecting)
        llm.generate(PROMPTS[1], SamplingParams(max_tokens=3))
    assert running[:2] == [2, 1]


def test_a_step_that_raises_ends_one_call_and_the_next_thread_goes_on(llm, alone, monkeypatch):
    original, failures = llm.engine.step, iter([False, True])

    def failing():
        if next(failures, False):
            raise RuntimeError("no memory")
        return original()

    with monkeypatch.context() as patch, ThreadPoolExecutor(4) as pool:
        patch.setattr(llm.engine, "step", failing)
        calls = [pool.submit(text, llm, number) for number in range(4)]
        errors = [call.exception(SECONDS) for call in calls]
        assert [str(error) for error in errors if error] == ["no memory"]
        assert [call.result() for call in calls if not call.exception()] == [
            text for text, error in zip(alone, errors, strict=True) if not error
        ]


def test_an_llm_that_its_own_step_calls_says_so(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: llm.generate(PROMPTS[0]))
        with pytest.raises(RunError, match="in one of its own steps"):
            llm.generate(PROMPTS[0])


@pytest.mark.parametrize("error", [RuntimeError("once"), KeyboardInterrupt()])
def test_results_that_could_not_be_read_are_read_again(llm, alone, monkeypatch, error):
    launch, errors = llm.engine.executor.launch, [error]

    def launched(step):
        running = launch(step)
        results = running.results

        def failing():
            if errors and max(step.decoding.starts, default=0) > 5:
                raise errors.pop()
            return results()

        running.results = failing
        return running

    engine = llm.engine
    request = engine.request("a", llm.tokenizer.encode(PROMPTS[0]).ids, PARAMS)
    with monkeypatch.context() as patch:
        patch.setattr(engine.executor, "launch", launched)
        engine.add(request)
        with pytest.raises(type(error)):
            while engine.has_work:
                engine.step()
        engine.check()
        while engine.has_work:
            engine.step()
    assert llm.tokenizer.decode(request.tokens[request.num_prompt :]) == alone[0]


# Event loops


def test_tasks_of_an_event_loop_share_steps_and_give_what_each_gives_alone(llm, alone):
    async def main():
        async def streamed(prompt):
            return "".join([piece async for piece in llm.astream(prompt, PARAMS)])

        calls = [llm.agenerate(prompt, PARAMS) for prompt in PROMPTS * 2]
        streams = [streamed(prompt) for prompt in PROMPTS]
        return await asyncio.gather(*calls), await asyncio.gather(*streams)

    before = sum(llm.engine.stats().steps.values())
    completions, texts = asyncio.run(main())
    assert [one.text for (one,) in completions] == alone * 2 and texts == alone
    assert sum(llm.engine.stats().steps.values()) - before < 8 * PARAMS.max_tokens
    assert asyncio.run(llm.agenerate([])) == []


def test_loops_of_two_threads_and_calls_of_others_go_together(llm, alone):
    async def main():
        completions = await asyncio.gather(*(llm.agenerate(prompt, PARAMS) for prompt in PROMPTS))
        return [one.text for (one,) in completions]

    with ThreadPoolExecutor(4) as pool:
        loops = [pool.submit(asyncio.run, main()) for _ in range(2)]
        threads = [pool.submit(text, llm, number) for number in range(4)]
        assert [loop.result(SECONDS) for loop in loops] == [alone] * 2
        assert [thread.result(SECONDS) for thread in threads] == alone


@pytest.mark.parametrize("how", ["cancelled", "left", "collected", "error", "loop closed"])
def test_a_task_that_ends_early_aborts_its_requests_and_no_others(llm, alone, how):
    async def leave(stream):
        async for _ in stream:
            return

    async def early():
        if how == "cancelled":
            with suppress(TimeoutError):
                await asyncio.wait_for(llm.agenerate(PROMPTS, LONG), 0.05)
        elif how == "error":
            with pytest.raises(ValueError, match="the prompt is empty"):
                await llm.agenerate([[5], ""], LONG)
        elif how == "left":
            stream = llm.astream(PROMPTS[0], LONG)
            await leave(stream)
            await stream.aclose()
        else:
            await leave(llm.astream(PROMPTS[0], LONG))
            gc.collect()

    async def main():
        other = asyncio.create_task(llm.agenerate(PROMPTS[1], PARAMS))
        await early()
        return (await other)[0].text

    if how == "loop closed":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(anext(llm.astream(PROMPTS[0], LONG)))
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
    else:
        assert asyncio.run(main()) == alone[1]
    until(lambda: not llm.engine.scheduler.requests and not llm._async_calls._has_thread)


def test_a_step_that_raises_ends_the_calls_of_event_loops(llm, alone, monkeypatch):
    def failing():
        raise RuntimeError("no memory")

    async def main():
        calls = [llm.agenerate(prompt, PARAMS) for prompt in PROMPTS]
        return await asyncio.gather(*calls, anext(llm.astream("a")), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", failing)
        errors = asyncio.run(asyncio.wait_for(main(), 10.0))
        assert [str(error) for error in errors] == ["no memory"] * 5
    assert asyncio.run(llm.agenerate(PROMPTS[0], PARAMS))[0].text == alone[0]


# The end of an LLM


def test_close_ends_calls_that_wait_and_refuses_those_that_follow(monkeypatch):
    llm = started()
    original = llm.engine.step

    def slow():
        time.sleep(0.01)
        return original()

    monkeypatch.setattr(llm.engine, "step", slow)

    async def main():
        calls = asyncio.gather(llm.agenerate(PROMPTS, LONG), anext(stream), return_exceptions=True)
        await anext(other := llm.astream(PROMPTS[1], LONG))
        await asyncio.to_thread(llm.close)
        with pytest.raises(RunError, match="the LLM is closed"):
            async for _ in other:
                pass
        return await calls

    with llm, ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(llm.generate, prompt, LONG) for prompt in PROMPTS[:2]]
        until(lambda: len(llm.engine.scheduler.requests) == 2)
        stream = llm.astream(PROMPTS[0], LONG)
        first, _ = asyncio.run(main())
        assert isinstance(first, RunError)
        for thread in threads:
            with pytest.raises(RunError, match="the LLM is closed: create another one"):
                thread.result(SECONDS)
        llm.close()
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.stream("a"),
        lambda: llm.score([[5, 6]]),
        lambda: llm.sleep(),
        lambda: llm.wake_up(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.load_adapter("a", "b"),
        lambda: asyncio.run(llm.agenerate("a")),
        lambda: asyncio.run(anext(llm.astream("a"))),
    ):
        with pytest.raises(RunError, match="the LLM is closed: create another one"):
            call()


def test_an_llm_that_is_dropped_is_freed_without_the_garbage_collector():
    async def refused():
        with pytest.raises(ValueError, match="the prompt is empty"):
            await llm.agenerate("")

    llm = started()
    engine = weakref.ref(llm.engine)
    gc.collect()
    gc.disable()
    try:
        llm.generate("a", SamplingParams(max_tokens=2, structured=Structured(regex="ab")))
        asyncio.run(llm.agenerate("a", PARAMS))
        asyncio.run(refused())
        llm = None
        until(lambda: engine() is None, 10.0)  # the thread of the calls may still be ending
    finally:
        gc.enable()


# Signals


@pytest.mark.usefixtures("ctrl_c_raises")
def test_signals_wait_for_the_outermost_context_and_a_second_ctrl_c_does_not():
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_delayed():
        with interrupts_delayed():
            signal.raise_signal(signal.SIGINT)
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt), interrupts_delayed():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert reached == ["inner", "outer"]


def test_a_handler_of_the_user_runs_at_the_end():
    received = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: received.append(number))
    try:
        with interrupts_delayed() as interrupts:
            signal.raise_signal(signal.SIGALRM)
            assert not received
            interrupts.deliver()
            assert received == [signal.SIGALRM]
            signal.raise_signal(signal.SIGALRM)
        assert received == [signal.SIGALRM] * 2
    finally:
        signal.signal(signal.SIGALRM, before)
