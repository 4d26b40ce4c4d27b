"""From the logits of a step to what the host learns of it: tokens, log-probabilities, pooled hidden states."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from math import isfinite, isnan

import torch
from torch import Tensor

from atomc.runtime.draw import Draw
from atomc.runtime.fence import Fence, RequestError, RequestFailed, is_contained, is_panic
from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.outbox import Outbox, Sent
from atomc.runtime.request import Request
from atomc.runtime.row_logprobs import Logprobs, LogprobsRow, logprobs
from atomc.runtime.sampler import Sampled, Sampler
from atomc.runtime.sampling_params import SamplingParams
from atomc.runtime.scheduler import Chunk, ScheduledStep
from atomc.runtime.speculative import accepted
from atomc.runtime.structured import Grammars, Matcher

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Result:
    """What the host learned of one chunk: the drawn tokens with their log-probabilities if asked for, those of tokens of
    the prompt, and a pooled hidden state."""

    tokens: Sequence[int] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    scores: Sequence[TokenLogprobs] = ()
    embedding: tuple[float, ...] | None = None


@dataclass
class Drawn:
    """The results of one step, while they come to the host."""

    step: ScheduledStep
    sent: Sent | None = None
    sampled: Sampled | None = None
    scores: dict[int, Logprobs] = field(default_factory=dict)  # by chunk
    pooled: dict[int, Tensor] = field(default_factory=dict)  # by chunk

    def results(self, requests: Sequence[Request], fence: Fence) -> list[Result]:
        """One for each chunk, nothing for that of a request that has finished or that now fails; waits for the device."""
        arrived = self._arrived()
        results, row = [], 0
        for i, (chunk, request) in enumerate(zip(self.step.chunks, requests, strict=True)):
            result = None
            if request.finish_reason is None:
                result = fence.run(chunk.request_id, "reading its results", arrived.result, chunk, i, row)
            results.append(result or Result())
            row += len(chunk.draws)
        return results

    def _arrived(self) -> "_Arrived":
        arrived = iter(self.sent.wait() if self.sent is not None else ())
        found = _Arrived()
        if self.pooled:
            found.pooled = dict(zip(self.pooled, next(arrived).tolist(), strict=True))
        if self.sampled is not None:
            found.tokens, found.tops = next(arrived).tolist(), next(arrived).tolist()
            if self.sampled.logprobs is not None:
                found.logprobs = dict(zip(self.sampled.rows, self.sampled.logprobs.rows(next(arrived)), strict=True))
        found.scores = {i: scores.rows(next(arrived)) for i, scores in self.scores.items()}
        return found


@dataclass
class _Arrived:
    """Results of one step on the host: by row of its draws, or by chunk."""

    tokens: list[int] = field(default_factory=list)
    tops: list[float] = field(default_factory=list)
    logprobs: dict[int, LogprobsRow] = field(default_factory=dict)
    scores: dict[int, list[LogprobsRow]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)

    def result(self, chunk: Chunk, number: int, row: int) -> Result:
        """Of the chunk with this number, whose first draw is that of `row`. Raises RequestFailed if there is none."""
        tokens = self.tokens[row : row + len(chunk.draws)]
        if len(tokens) > 1:
            (tokens,) = accepted(chunk.draws, tokens)
        for draw, top in zip(chunk.draws[: len(tokens)], self.tops[row : row + len(tokens)], strict=True):
            if not isfinite(top):
                raise RequestFailed(_undrawable(draw, top))
        rows = range(row, row + len(chunk.draws)) if self.logprobs else ()
        logprobs = tuple([self.logprobs[i].read() for i in rows if i in self.logprobs])
        scores = [score.read() for score in self.scores.get(number, ())]
        if any(isnan(score.logprob) for score in scores):
            raise RequestFailed(RequestError("the model produced logits that are NaN for the prompt, at positions "
                                             f"{chunk.start} to {chunk.end - 1}"))  # fmt: skip
        pooled = self.pooled.get(number)
        if pooled is not None and not all(map(isfinite, pooled)):
            raise RequestFailed(RequestError("the model produced hidden states that are NaN or infinite: nothing to pool"))
        return Result(tokens, logprobs or None, scores, None if pooled is None else tuple(pooled))


def _undrawable(draw: Draw, top: float) -> RequestError:
    """Why no token could be drawn where `top` was the largest logit."""
    step = f"in step {draw.index + 1} of this request (position {draw.length})"
    if top == float("-inf"):
        if draw.params.structured is not None:
            return RequestError(f"no token can continue the form of output that was asked for, {step}", by_client=True)
        if draw.banned:
            return RequestError(f"no token is left {step}: min_tokens excludes stop_token_ids and end-of-sequence tokens, "
                                "and the model excludes the others", by_client=True)  # fmt: skip
    what = "NaN" if isnan(top) else "infinite"
    return RequestError(f"the model produced logits that are {what} {step}: no token can be drawn from them")


class Drawing:
    """Draws the tokens of steps. Whoever drops a request calls `forget`.

    grammars   makes what compiles forms of output; called when the first request asks for one
    fence      keeps what went wrong for single requests
    """

    def __init__(
        self, device: torch.device, max_num_seqs: int, grammars: Callable[[], Grammars], fence: Fence
    ) -> None:  # fmt: skip
        self.fence = fence
        self.sampler = Sampler(device, max_num_seqs)
        self.outbox = Outbox(device)
        self._make_grammars = grammars
        self._grammars: Grammars | None = None
        self._matchers: dict[str, Matcher] = {}
        self._sums: dict[str, Tensor] = {}

    def begin(self, request: Request) -> None:
        """Compile what the request's output must look like. Raises ValueError if it cannot be, ImportError without the
        library for it."""
        if request.params.structured is None:
            return
        try:
            self._matchers[request.id] = self.grammars().compile(request.params.structured).matcher()
        except RecursionError as error:
            raise ValueError("structured output: its description is nested too deep to be compiled") from error
        except BaseException as error:
            if not is_panic(error):
                raise
            raise ValueError(f"structured output: its description cannot be compiled: {_line(error)}") from error

    def grammars(self) -> Grammars:
        """What compiles forms of output. Raises as `begin` does."""
        self._grammars = self._grammars or self._make_grammars()
        return self._grammars

    def needs_tokens(self, step: ScheduledStep) -> bool:
        """Whether the host must know all tokens before this step's are drawn: some must fit a form."""
        return bool(self._matchers) and any(chunk.draws and chunk.request_id in self._matchers for chunk in step.chunks)

    def take(self, request_id: str, tokens: Sequence[int]) -> None:
        """Note the new tokens of a request. Raises RequestFailed if its form does not allow them, which happens only to a
        form that became too large on the way, or that has no end."""
        matcher = self._matchers.get(request_id)
        if matcher is not None and not all([matcher.accept(token) for token in tokens]):
            why = _line(matcher.error)
            said = "no token can continue the form of output that was asked for" + (f": {why}" if why else "")
            raise RequestFailed(RequestError(said, by_client=True))

    def draw(self, step: ScheduledStep, logits: Tensor, requests: Sequence[Request]) -> tuple[Drawn, Tensor | None]:
        """The results of a step of these requests with logits [R, V], and the drawn tokens on the device."""
        drawn = Drawn(step)
        bounds = list(pairwise(accumulate((chunk.num_wanted for chunk in step.chunks), initial=0)))
        drawing: list[int] = []
        for i, (chunk, (start, end)) in enumerate(zip(step.chunks, bounds, strict=True)):
            num_draws = len(chunk.draws)
            if end - start > num_draws:
                request, rows = requests[i], logits[start:end]
                asked = self.fence.run(request.id, "scoring its prompt", _scores, chunk, rows, request)
                drawn.scores |= {i: asked} if asked is not None else {}
            drawing.extend(range(end - num_draws, end))
        tables = [scores.table for scores in drawn.scores.values()]
        if not drawing:
            drawn.sent = self.outbox.send(*tables)
            return drawn, None
        if len(drawing) < len(logits):
            logits = logits[torch.tensor(drawing, device=logits.device)]
        drawn.sampled = self._sampled(logits, _of_unfinished(step.draws, requests), self._mask(step))
        if drawn.sampled.logprobs is not None:
            tables.insert(0, drawn.sampled.logprobs.table)
        drawn.sent = self.outbox.send(drawn.sampled.tokens, drawn.sampled.tops, *tables)
        return drawn, drawn.sampled.tokens

    def _sampled(self, logits: Tensor, draws: Sequence[Draw], mask: Tensor | None) -> Sampled:
        """What the sampler gives; where it raises, without the requests for which it does."""
        try:
            return self.sampler(logits, draws, mask=mask)
        except BaseException as error:
            if not is_contained(error):
                raise
            return self.sampler(logits, self._without_failing(logits, draws, mask, error), mask=mask)

    def _without_failing(
        self, logits: Tensor, draws: Sequence[Draw], mask: Tensor | None, error: BaseException
    ) -> list[Draw]:
        """The draws, greedy for requests whose own raise. Raises the error if that is none, or all of several requests."""
        failed: dict[str, BaseException] = {}
        start, ids = 0, {draw.request_id for draw in draws}
        for request_id, group in groupby(draws, key=lambda draw: draw.request_id):
            own = list(group)
            rows = slice(start, start := start + len(own))
            try:
                self.sampler.sample(logits[rows], own, mask=None if mask is None else mask[rows], keep=ids)
            except BaseException as its:
                if not is_contained(its):
                    raise
                failed[request_id] = its
        if not failed or len(failed) == len(ids) > 1:
            raise error
        for request_id, found in failed.items():
            self.fence.fail(request_id, "drawing its next token", found)
        return _greedy(draws, failed)

    def pool(self, step: ScheduledStep, hidden: Tensor, requests: Sequence[Request]) -> Drawn:
        """The results of a step with these hidden states [R, D]: the mean, or the last, of each prompt that ends."""
        drawn = Drawn(step)
        rows = torch.split(hidden.to(torch.float32), [chunk.num_wanted for chunk in step.chunks])
        for i, (chunk, states) in enumerate(zip(step.chunks, rows, strict=True)):
            pooled = self.fence.run(chunk.request_id, "pooling its hidden states", self._pooled, chunk, states, requests[i])
            drawn.pooled |= {i: pooled} if pooled is not None else {}
        if drawn.pooled:
            drawn.sent = self.outbox.send(torch.stack([*drawn.pooled.values()]))
        return drawn

    def _pooled(self, chunk: Chunk, states: Tensor, request: Request) -> Tensor | None:
        """The pooled state of a prompt that ends with this chunk."""
        total = states.sum(0)
        if request.pooling == "mean" and chunk.start:
            total = total + self._sums[request.id]
        if chunk.end < request.num_prompt:
            self._sums[request.id] = total
            return None
        self._sums.pop(request.id, None)
        return total / request.num_prompt if request.pooling == "mean" else total

    def _mask(self, step: ScheduledStep) -> Tensor | None:
        """The tokens that may be drawn, one row for each draw; None: all."""
        if self._grammars is None or not self.needs_tokens(step):
            return None
        rows, row = {}, 0
        for chunk in step.chunks:
            if chunk.draws and (matcher := self._matchers.get(chunk.request_id)) is not None:
                rows[chunk.request_id] = (matcher, row, chunk.draws[-1].draft)
            row += len(chunk.draws)
        mask = self._grammars.mask(row)
        try:
            self._grammars.fill(mask, list(rows.values()))
        except BaseException as error:
            if not is_contained(error):
                raise
            for request_id, one in rows.items():
                self.fence.run(request_id, "masking tokens that its form does not allow", self._grammars.fill, mask, [one])
        return mask

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self.sampler.forget(request_id)
        self._sums.pop(request_id, None)


def _of_unfinished(draws: Sequence[Draw], requests: Sequence[Request]) -> Sequence[Draw]:
    """The draws, greedy for requests that have ended while the step was computed: there is nothing to count for them."""
    ended = {request.id for request in requests if request.finish_reason is not None}
    return _greedy(draws, ended) if ended else draws


def _greedy(draws: Sequence[Draw], ids: Container[str]) -> list[Draw]:
    """The draws, greedy for these requests, whose tokens do not matter."""
    return [replace(draw, params=GREEDY) if draw.request_id in ids else draw for draw in draws]


def _line(text: object) -> str:
    """The first line of what a library says, without its state."""
    return next(iter(str(text).splitlines()), "").strip()


def _scores(chunk: Chunk, logits: Tensor, request: Request) -> Logprobs:
    """Log-probabilities of the tokens of the prompt that follow the wanted rows of the chunk."""
    first = chunk.end - chunk.num_wanted
    following = request.tokens[first + 1 : min(chunk.end + 1, request.num_prompt)]
    count = request.params.prompt_logprobs or 0
    tokens = torch.tensor(following, device=logits.device)
    return logprobs(logits[: len(following)], tokens, [count] * len(following))
