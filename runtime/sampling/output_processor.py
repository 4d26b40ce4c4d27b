"""From the logits of a step to its results: tokens, log-probabilities, pooled hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite, isnan

import torch
from torch import Tensor

from atomc.runtime.executor import Result
from atomc.runtime.request_errors import RequestError, RequestFailed, is_recoverable
from atomc.runtime.sampling.copy_to_host import HostCopier, HostCopy
from atomc.runtime.sampling.row_logprobs import Logprobs, LogprobsRow, logprobs
from atomc.runtime.sampling.sample_spec import SampleSpec
from atomc.runtime.sampling.sampler import Sampled, Sampler
from atomc.runtime.slots import SlotState, sample_specs
from atomc.runtime.speculative import accepted
from atomc.runtime.step import Chunk, ScheduledStep


@dataclass
class StepOutputs:
    """The results of one step, while they come to the host.

    states   of the request of each chunk
    draws    one for each token that the step draws
    """

    step: ScheduledStep
    states: Sequence[SlotState]
    draws: Sequence[SampleSpec] = ()
    sent: HostCopy | None = None
    sampled: Sampled | None = None
    scores: dict[int, Logprobs] = field(default_factory=dict)  # by chunk
    pooled: dict[int, Tensor] = field(default_factory=dict)  # by chunk

    def results(self) -> list[Result]:
        """One for each chunk; waits for the device."""
        arrived = self._arrived()
        results, row = [], 0
        for i, (chunk, state) in enumerate(zip(self.step.chunks, self.states, strict=True)):
            result = None
            if state.error is None:
                draws = self.draws[row : row + chunk.num_samples]
                result = state.run("reading its results", arrived.result, chunk, draws, i, row)
            results.append(result or Result(error=state.error))
            row += chunk.num_samples
        return results

    def _arrived(self) -> "_Arrived":
        arrived = iter(self.sent.wait() if self.sent is not None else ())
        found = _Arrived()
        if self.pooled:
            found.pooled = dict(zip(self.pooled, next(arrived).tolist(), strict=True))
        if self.sampled is not None:
            found.tokens, found.tops = next(arrived).tolist(), next(arrived).tolist()
            if self.sampled.logprobs is not None:
                found.logprobs = dict(
                    zip(self.sampled.rows, self.sampled.logprobs.rows(next(arrived)), strict=True)
                )
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

    def result(self, chunk: Chunk, draws: Sequence[SampleSpec], number: int, row: int) -> Result:
        """Of the chunk with this number, whose first draw is that of `row`. Raises RequestFailed if
        there is none.
        """
        tokens: Sequence[int] = self.tokens[row : row + len(draws)]
        if len(tokens) > 1:
            tokens = accepted(chunk.draft, tokens)
        for draw, top in zip(draws[: len(tokens)], self.tops[row : row + len(tokens)], strict=True):
            if not isfinite(top):
                raise RequestFailed(_undrawable(draw, top))
        rows = range(row, row + len(draws)) if self.logprobs else ()
        logprobs = tuple([self.logprobs[i].read() for i in rows if i in self.logprobs])
        scores = [score.read() for score in self.scores.get(number, ())]
        if any(isnan(score.logprob) for score in scores):
            raise RequestFailed(
                RequestError(
                    "the model produced logits that are NaN for the prompt, at positions "
                    f"{chunk.start} to {chunk.end - 1}"
                )
            )
        pooled = self.pooled.get(number)
        if pooled is not None and not all(map(isfinite, pooled)):
            raise RequestFailed(
                RequestError(
                    "the model produced hidden states that are NaN or infinite: nothing to pool"
                )
            )
        return Result(tokens, logprobs or None, scores, None if pooled is None else tuple(pooled))


def _undrawable(draw: SampleSpec, top: float) -> RequestError:
    """Why no token could be drawn where `top` was the largest logit."""
    step = f"in step {draw.index + 1} of this request (position {draw.length})"
    if top == float("-inf"):
        if draw.params.structured is not None:
            return RequestError(
                f"no token can continue the form of output that was asked for, {step}",
                by_client=True,
            )
        if draw.banned:
            return RequestError(
                f"no token is left {step}: min_tokens excludes stop_token_ids and "
                "end-of-sequence tokens, "
                "and the model excludes the others",
                by_client=True,
            )
    what = "NaN" if isnan(top) else "infinite"
    return RequestError(
        f"the model produced logits that are {what} {step}: no token can be drawn from them"
    )


class OutputProcessor:
    """Draws the tokens of steps, and pools hidden states. What fails for one request is kept in its
    state.
    """

    def __init__(self, device: torch.device, max_num_seqs: int) -> None:
        self.sampler = Sampler(device, max_num_seqs)
        self.outbox = HostCopier(device)

    def draw(self, drawn: StepOutputs, logits: Tensor, mask: Tensor | None) -> Tensor | None:
        """Bring results of a step with logits [R, V] on their way; the drawn tokens on the
        device.
        """
        step, states = drawn.step, drawn.states
        bounds = list(
            pairwise(accumulate([chunk.num_output_rows for chunk in step.chunks], initial=0))
        )
        drawing: list[int] = []
        for i, (chunk, (start, end)) in enumerate(zip(step.chunks, bounds, strict=True)):
            if chunk.scored:
                asked = states[i].run(
                    "scoring its prompt", _scores, chunk, logits[start:end], states[i]
                )
                drawn.scores |= {i: asked} if asked is not None else {}
            drawing.extend(range(end - chunk.num_samples, end))
        tables = [scores.table for scores in drawn.scores.values()]
        if not drawing:
            drawn.sent = self.outbox.send(*tables)
            return None
        if len(drawing) < len(logits):
            logits = logits[torch.tensor(drawing, device=logits.device)]
        drawn.draws = sample_specs(step, states)
        drawn.sampled = self._sampled(drawn, logits, mask)
        if drawn.sampled.logprobs is not None:
            tables.insert(0, drawn.sampled.logprobs.table)
        drawn.sent = self.outbox.send(drawn.sampled.tokens, drawn.sampled.tops, *tables)
        return drawn.sampled.tokens

    def _sampled(self, drawn: StepOutputs, logits: Tensor, mask: Tensor | None) -> Sampled:
        """What the sampler gives; where it raises, without the requests for which it does."""
        try:
            return self.sampler(logits, drawn.draws, mask=mask)
        except BaseException as error:
            if not is_recoverable(error):
                raise
            self._fail_alone(drawn, logits, mask, error)
            drawn.draws = sample_specs(drawn.step, drawn.states)
            return self.sampler(logits, drawn.draws, mask=mask)

    def _fail_alone(
        self, drawn: StepOutputs, logits: Tensor, mask: Tensor | None, error: BaseException
    ) -> None:
        """Fail the requests whose own draws raise. Raises the error if there is none, or if all of
        several do.
        """
        failed: list[tuple[SlotState, BaseException]] = []
        start, num_requests = 0, 0
        for chunk, state in zip(drawn.step.chunks, drawn.states, strict=True):
            rows = slice(start, start := start + chunk.num_samples)
            num_requests += chunk.num_samples > 0
            try:
                if chunk.num_samples:
                    self.sampler.sample(
                        logits[rows], drawn.draws[rows], mask=None if mask is None else mask[rows]
                    )
            except BaseException as its:
                if not is_recoverable(its):
                    raise
                failed.append((state, its))
        if not failed or len(failed) == num_requests > 1:
            raise error
        for state, found in failed:
            state.fail("drawing its next token", found)

    def pool(self, drawn: StepOutputs, hidden: Tensor) -> None:
        """Bring the pooled states of a step with hidden states [R, D] on their way: for each prompt
        that ends, their mean or the last one."""
        rows = torch.split(
            hidden.to(torch.float32), [chunk.num_output_rows for chunk in drawn.step.chunks]
        )
        for i, (chunk, state, states) in enumerate(
            zip(drawn.step.chunks, drawn.states, rows, strict=True)
        ):
            pooled = state.run("pooling its hidden states", _pooled, chunk, state, states)
            drawn.pooled |= {i: pooled} if pooled is not None else {}
        if drawn.pooled:
            drawn.sent = self.outbox.send(torch.stack([*drawn.pooled.values()]))


def _pooled(chunk: Chunk, state: SlotState, hidden: Tensor) -> Tensor | None:
    """The pooled state of a prompt that ends with this chunk."""
    of, total = state.request, hidden.sum(0)
    if of.pooling == "mean" and state.total is not None:
        total = total + state.total
    if chunk.end < of.num_prompt:
        state.total = total
        return None
    return total / of.num_prompt if of.pooling == "mean" else total


def _scores(chunk: Chunk, logits: Tensor, state: SlotState) -> Logprobs:
    """Log-probabilities of the tokens of the prompt that follow the wanted rows of the chunk."""
    count = state.request.params.prompt_logprobs or 0
    tokens = torch.tensor(chunk.scored, device=logits.device)
    return logprobs(logits[: len(tokens)], tokens, [count] * len(tokens))
