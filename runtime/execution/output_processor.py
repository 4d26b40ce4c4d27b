"""Converts the logits of a step to results: tokens, log-probabilities, pooled hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import isfinite, isnan

import torch
from torch import Tensor

from atomc.parallel.vocab import LogitsOfRank
from atomc.runtime.execution.device_times import DeviceTimes
from atomc.runtime.execution.executor import Result, StepResults
from atomc.runtime.execution.slots import SlotState, sample_specs, samples
from atomc.runtime.requests.request import TokenLogprobs
from atomc.runtime.requests.request_errors import RequestError, RequestFailed, is_recoverable
from atomc.runtime.requests.sample_spec import SampleSpec
from atomc.runtime.sampling.copy_to_host import HostCopier, HostCopy
from atomc.runtime.sampling.pack_to_device import pack_to_device
from atomc.runtime.sampling.row_logprobs import Logprobs, LogprobsRow, logprobs
from atomc.runtime.sampling.sampler import Sampled, Sampler
from atomc.runtime.scheduling.speculative import accepted
from atomc.runtime.scheduling.step import Chunk, ScheduledStep


@dataclass
class StepOutputs:
    """Results of one step, on their way to the host.

    states   one per chunk, then one per decode row
    """

    step: ScheduledStep
    states: Sequence[SlotState]
    sent: HostCopy | None = None
    drafts: HostCopy | None = None  # [chunks that sample, k]
    sampled: Sampled | None = None
    scores: dict[int, Logprobs] = field(default_factory=dict)  # by chunk
    pooled: dict[int, Tensor] = field(default_factory=dict)  # by chunk

    def results(self) -> StepResults:
        """Those of the step; waits for the device."""
        arrived = self._wait()
        results, row = StepResults(), 0
        drafts = iter(arrived.drafts)
        for i, (chunk, state) in enumerate(zip(self.step.chunks, self.states, strict=False)):
            result = None
            if state.error is None:
                result = state.run("reading its results", arrived.result, chunk, state, i, row)
            if chunk.num_samples and arrived.drafts:
                draft = tuple(next(drafts))
                result = result and replace(result, draft=draft)
            results.chunks.append(result or Result())
            row += chunk.num_samples
        results.decoded = arrived.tokens[row:]
        if arrived.logprobs or not arrived.is_finite:
            of_rows = samples(self.step, self.states)[len(results.chunks) :]
            for i, (state, count, end, _) in enumerate(of_rows, row):
                read = arrived.checked_logprobs
                if logprobs := state.run("reading its results", read, state, i, count, end):
                    results.of_rows[state.request_id] = Result(logprobs=logprobs)
        results.errors = {
            state.request_id: state.error for state in self.states if state.error is not None
        }
        return results

    def _wait(self) -> "_HostResults":
        arrived = iter(self.sent.wait() if self.sent is not None else ())
        results = _HostResults()
        if self.pooled:
            results.pooled = dict(zip(self.pooled, next(arrived).tolist(), strict=True))
        if self.sampled is not None:
            results.tokens, results.max_logits = next(arrived).tolist(), next(arrived).tolist()
            results.is_finite = isfinite(sum(results.max_logits))
            if self.sampled.logprobs is not None:
                results.logprobs = dict(
                    zip(self.sampled.rows, self.sampled.logprobs.rows(next(arrived)), strict=True)
                )
        if self.drafts is not None:
            results.drafts = self.drafts.wait()[0].tolist()
        results.scores = {i: scores.rows(next(arrived)) for i, scores in self.scores.items()}
        return results


@dataclass
class _HostResults:
    """Results of one step on the host, by sampled row or by chunk.

    is_finite   whether the sum of max_logits is: if not, each of them is checked
    """

    tokens: list[int] = field(default_factory=list)
    max_logits: list[float] = field(default_factory=list)
    is_finite: bool = True
    logprobs: dict[int, LogprobsRow] = field(default_factory=dict)
    scores: dict[int, list[LogprobsRow]] = field(default_factory=dict)
    pooled: dict[int, list[float]] = field(default_factory=dict)
    drafts: list[list[int]] = field(default_factory=list)

    def result(self, chunk: Chunk, state: SlotState, number: int, row: int) -> Result:
        """The result of chunk `number`, whose first sampled row is `row`. Raises RequestFailed for
        NaN and infinite values.
        """
        end = row + chunk.num_samples
        tokens: Sequence[int] = self.tokens[row:end]
        if len(tokens) > 1:
            tokens = accepted(chunk.draft[: chunk.most_accepted], tokens)
        logprobs = self.checked_logprobs(state, row, len(tokens), chunk.end, chunk.draft)
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
        return Result(tokens, logprobs, scores, None if pooled is None else tuple(pooled))

    def checked_logprobs(
        self, state: SlotState, row: int, count: int, end: int, draft: tuple[int, ...] = ()
    ) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the `count` tokens from sampled row `row` on, if requested. Raises
        RequestFailed if one cannot be sampled because of its largest logit.

        end, draft   as in SlotState.specs
        """
        rows = range(row, row + count)
        specs = [] if self.is_finite else state.specs(count, end, draft)
        for i, spec in zip(rows, specs, strict=False):
            if not isfinite(self.max_logits[i]):
                raise RequestFailed(_sampling_error(spec, self.max_logits[i]))
        return tuple([self.logprobs[i].read() for i in rows if i in self.logprobs]) or None


def _sampling_error(spec: SampleSpec, max_logit: float) -> RequestError:
    """The error of a row that cannot be sampled because of its largest logit."""
    step = f"in step {spec.index + 1} of this request (position {spec.length})"
    if max_logit == float("-inf"):
        names = spec.params.constraints
        if names == ("structured output",):
            return RequestError(
                f"no token can continue the requested structured output, {step}",
                by_client=True,
            )
        if names:
            also = ("min_tokens",) if spec.banned else ()
            return RequestError(
                f"no token can be sampled {step}: {', '.join(names + also)} exclude all tokens; "
                "allow more of them",
                by_client=True,
            )
        if spec.banned:
            return RequestError(
                f"no token can be sampled {step}: min_tokens excludes stop_token_ids and "
                "end-of-sequence tokens, and the model excludes all others; lower min_tokens",
                by_client=True,
            )
    what = "NaN" if isnan(max_logit) else "infinite"
    return RequestError(
        f"the model produced logits that are {what} {step}: no token can be sampled"
    )


class OutputProcessor:
    """Samples tokens and pools hidden states. Errors of a single request go to its SlotState.

    device_times  a span begins with the sampling of a step
    apart         the logits of the model are those of this rank only
    """

    def __init__(
        self,
        device: torch.device,
        max_num_seqs: int,
        device_times: DeviceTimes,
        apart: LogitsOfRank | None = None,
    ) -> None:
        self.sampler = Sampler(device, max_num_seqs)
        self._device_times = device_times
        self._apart = apart
        self.host_copier = HostCopier(device)

    def sample(self, outputs: StepOutputs, logits: Tensor, mask: Tensor | None) -> Tensor | None:
        """Sample from the model's logits [R, V] and start the copy to the host; returns the tokens
        on the device.
        """
        step, states = outputs.step, outputs.states
        if self._apart is not None or any([chunk.scored for chunk in step.chunks]):
            self._device_times.begin()  # the logits are read before the host prepares the sampling
        only_largest = mask is None and _only_largest(outputs)
        if not only_largest:
            logits = self.whole(logits)
        ends = list(accumulate([chunk.num_output_rows for chunk in step.chunks], initial=0))
        drawing: list[int] = []
        for i, (chunk, (start, end)) in enumerate(zip(step.chunks, pairwise(ends), strict=True)):
            if chunk.scored:
                asked = states[i].run(
                    "computing its prompt logprobs", _scores, chunk, logits[start:end], states[i]
                )
                outputs.scores |= {i: asked} if asked is not None else {}
            drawing.extend(range(end - chunk.num_samples, end))
        drawing.extend(range(ends[-1], ends[-1] + step.num_decoding))
        tables = [scores.table for scores in outputs.scores.values()]
        if not drawing:
            outputs.sent = self.host_copier.send(*tables)
            return None
        if len(drawing) < logits.shape[0]:
            logits = logits[torch.tensor(drawing, device=logits.device)]
        if self._apart is not None and only_largest:
            outputs.sampled = Sampled(*self._apart.largest(logits))
        else:
            outputs.sampled = self._sample(outputs, logits, mask, only_largest=only_largest)
        _force(step, outputs.sampled.tokens)
        if outputs.sampled.logprobs is not None:
            tables.insert(0, outputs.sampled.logprobs.table)
        outputs.sent = self.host_copier.send(
            outputs.sampled.tokens, outputs.sampled.max_logits, *tables
        )
        return outputs.sampled.tokens

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, from those of the model."""
        return logits if self._apart is None else self._apart.gathered(logits)

    def keep_drafts(self, outputs: StepOutputs, drafts: Tensor | None) -> None:
        """Start the copy of the step's draft tokens [chunks that sample, k] to the host."""
        if drafts is not None:
            outputs.drafts = self.host_copier.send(drafts)

    def _sample(
        self, outputs: StepOutputs, logits: Tensor, mask: Tensor | None, *, only_largest: bool
    ) -> Sampled:
        """Sample; if that raises, fail the requests that cause it and repeat."""
        step, states = outputs.step, outputs.states
        try:
            if only_largest:
                self._device_times.begin()
                return self.sampler.draw(logits, (), (), ())
            plain = [
                (state.request, end)
                for state, count, end, _ in samples(step, states)
                if count == 1 and state.request.params.is_plain
            ]
            is_plain = len(plain) == logits.shape[0] and mask is None
            specs = [] if is_plain else sample_specs(step, states)
            self._device_times.begin()
            if is_plain:
                return self.sampler.draw(
                    logits,
                    [request.params for request, _ in plain],
                    [request.seed for request, _ in plain],
                    [end - request.num_prompt for request, end in plain],
                )
            return self.sampler(logits, specs, mask=mask)
        except BaseException as error:  # a panic in Rust is no Exception
            if not is_recoverable(error):
                raise
            self._fail_individually(outputs, logits, mask, error)
            return self.sampler(logits, sample_specs(step, states), mask=mask)

    def _fail_individually(
        self, outputs: StepOutputs, logits: Tensor, mask: Tensor | None, error: BaseException
    ) -> None:
        """Sample each request alone and fail those that raise. Re-raises the error if none or all
        of several do.
        """
        failed: list[tuple[SlotState, BaseException]] = []
        start, num_requests = 0, 0
        for state, count, end, draft in samples(outputs.step, outputs.states):
            rows = slice(start, start := start + count)
            num_requests += count > 0
            try:
                if count:
                    specs = state.specs(count, end, draft)
                    self.sampler.sample(
                        logits[rows], specs, mask=None if mask is None else mask[rows]
                    )
            except BaseException as its:  # as in _sample
                if not is_recoverable(its):
                    raise
                failed.append((state, its))
        if not failed or len(failed) == num_requests > 1:
            raise error
        for state, reason in failed:
            state.fail("sampling its next token", reason)

    def pool(self, outputs: StepOutputs, hidden: Tensor) -> None:
        """Pool hidden states [R, D] of prompts that end in this step, and start the copy to the
        host."""
        rows = torch.split(
            hidden.to(torch.float32), [chunk.num_output_rows for chunk in outputs.step.chunks]
        )
        for i, (chunk, state, states) in enumerate(
            zip(outputs.step.chunks, outputs.states, rows, strict=True)
        ):
            pooled = state.run("pooling its hidden states", _pooled, chunk, state, states)
            outputs.pooled |= {i: pooled} if pooled is not None else {}
        if outputs.pooled:
            outputs.sent = self.host_copier.send(torch.stack([*outputs.pooled.values()]))


def _only_largest(outputs: StepOutputs) -> bool:
    """Whether only the largest logits of the step are read. Equal on all ranks: it does not depend
    on what failed.
    """
    chunks, states = outputs.step.chunks, outputs.states
    of_chunks = zip(chunks, states, strict=False)
    sampled = [state for chunk, state in of_chunks if chunk.num_samples]
    sampled += states[len(chunks) :]
    scored = any([chunk.scored for chunk in chunks])
    return not scored and all([state.only_largest for state in sampled])


def _force(step: ScheduledStep, tokens: Tensor) -> None:
    """Replace sampled tokens by the draft tokens that are to be accepted in any case."""
    accepted_rows: list[tuple[int, int]] = []
    row = 0
    for chunk in step.chunks:
        accepted_rows += enumerate(chunk.draft[: chunk.accept or 0], row)
        row += chunk.num_samples
    if accepted_rows:
        rows, forced = pack_to_device(tokens.device, accepted_rows)[..., 0].long()
        tokens[rows] = forced


def _pooled(chunk: Chunk, state: SlotState, hidden: Tensor) -> Tensor | None:
    """The pooled state [D] of a prompt that ends with this chunk; None before."""
    of, total = state.request, hidden.sum(0)
    if of.pooling == "mean" and state.total is not None:
        total = total + state.total
    if chunk.end < of.num_prompt:
        state.total = total
        return None
    return total / of.num_prompt if of.pooling == "mean" else total


def _scores(chunk: Chunk, logits: Tensor, state: SlotState) -> Logprobs:
    """Log-probabilities of the prompt tokens chunk.scored."""
    count = state.request.params.prompt_logprobs or 0
    tokens = torch.tensor(chunk.scored, device=logits.device)
    return logprobs(logits[: len(tokens)], tokens, [count] * len(tokens))
