"""From the logits of a step to what the host learns of it: tokens, log-probabilities, pooled hidden states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from atomc.runtime.logprobs import TokenLogprobs
from atomc.runtime.outbox import Outbox, Sent
from atomc.runtime.request import Request
from atomc.runtime.row_logprobs import Logprobs, logprobs
from atomc.runtime.sampler import Sampled, Sampler
from atomc.runtime.scheduler import Chunk, ScheduledStep
from atomc.runtime.speculative import accepted
from atomc.runtime.structured import Grammars, Matcher


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

    def results(self) -> list[Result]:
        """One for each chunk; waits for the device."""
        arrived = iter(self.sent.wait() if self.sent is not None else ())
        pooled = dict(zip(self.pooled, next(arrived).tolist(), strict=True)) if self.pooled else {}
        tokens = iter(accepted(self.step.draws, next(arrived).tolist()) if self.sampled is not None else ())
        values: Iterator[TokenLogprobs | None] = iter(())
        if self.sampled is not None and self.sampled.logprobs is not None:
            values = iter(self.sampled.token_logprobs(next(arrived)))
        scores = {i: each.read(next(arrived)) for i, each in self.scores.items()}
        results = []
        for i, chunk in enumerate(self.step.chunks):
            told = [value for _ in chunk.draws if (value := next(values, None)) is not None]
            results.append(Result(
                next(tokens) if chunk.draws else (),
                tuple(told) if told else None,
                scores.get(i, ()),
                tuple(pooled[i]) if i in pooled else None,
            ))  # fmt: skip
        return results


class Drawing:
    """Draws the tokens of steps. Whoever drops a request calls `forget`.

    grammars   makes what compiles forms of output; called when the first request asks for one
    """

    def __init__(self, device: torch.device, max_num_seqs: int, grammars: Callable[[], Grammars]) -> None:
        self.sampler = Sampler(device, max_num_seqs)
        self.outbox = Outbox(device)
        self._make_grammars = grammars
        self._grammars: Grammars | None = None
        self._matchers: dict[str, Matcher] = {}
        self._sums: dict[str, Tensor] = {}

    def begin(self, request: Request) -> None:
        """Compile what the request's output must look like. Raises ValueError if it cannot be, ImportError without the
        library for it."""
        if request.params.structured is not None:
            self._grammars = self._grammars or self._make_grammars()
            self._matchers[request.id] = self._grammars.compile(request.params.structured).matcher()

    def needs_tokens(self, step: ScheduledStep) -> bool:
        """Whether the host must know all tokens before this step's are drawn: some must fit a form."""
        return bool(self._matchers) and any(chunk.draws and chunk.request_id in self._matchers for chunk in step.chunks)

    def fits(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Note the new tokens of a request. False if its form does not allow them, which happens only to a form that
        became too large on the way."""
        matcher = self._matchers.get(request_id)
        return matcher is None or all([matcher.accept(token) for token in tokens])

    def draw(self, step: ScheduledStep, logits: Tensor, requests: Sequence[Request]) -> tuple[Drawn, Tensor | None]:
        """The results of a step of these requests with logits [R, V], and the drawn tokens on the device."""
        drawn = Drawn(step)
        bounds = list(pairwise(accumulate((chunk.num_wanted for chunk in step.chunks), initial=0)))
        drawing: list[int] = []
        for i, (chunk, (start, end)) in enumerate(zip(step.chunks, bounds, strict=True)):
            num_draws = len(chunk.draws)
            if end - start > num_draws:
                drawn.scores[i] = _scores(chunk, logits[start:end], requests[i])
            drawing.extend(range(end - num_draws, end))
        tables = [scores.table for scores in drawn.scores.values()]
        if not drawing:
            drawn.sent = self.outbox.send(*tables)
            return drawn, None
        if len(drawing) < len(logits):
            logits = logits[torch.tensor(drawing, device=logits.device)]
        drawn.sampled = self.sampler(logits, step.draws, mask=self._mask(step))
        if drawn.sampled.logprobs is not None:
            tables.insert(0, drawn.sampled.logprobs.table)
        drawn.sent = self.outbox.send(drawn.sampled.tokens, *tables)
        return drawn, drawn.sampled.tokens

    def pool(self, step: ScheduledStep, hidden: Tensor, requests: Sequence[Request]) -> Drawn:
        """The results of a step with these hidden states [R, D]: the mean, or the last, of each prompt that ends."""
        drawn = Drawn(step)
        rows = torch.split(hidden.to(torch.float32), [chunk.num_wanted for chunk in step.chunks])
        for i, (chunk, states) in enumerate(zip(step.chunks, rows, strict=True)):
            request = requests[i]
            total = states.sum(0)
            if request.pooling == "mean" and chunk.start:
                total = total + self._sums[request.id]
            if chunk.end < request.num_prompt:
                self._sums[request.id] = total
            else:
                self._sums.pop(request.id, None)
                drawn.pooled[i] = total / request.num_prompt if request.pooling == "mean" else total
        if drawn.pooled:
            drawn.sent = self.outbox.send(torch.stack([*drawn.pooled.values()]))
        return drawn

    def _mask(self, step: ScheduledStep) -> Tensor | None:
        """The tokens that may be drawn, one row for each draw; None: all."""
        if self._grammars is None or not self.needs_tokens(step):
            return None
        rows, row = [], 0
        for chunk in step.chunks:
            if chunk.draws and (matcher := self._matchers.get(chunk.request_id)) is not None:
                rows.append((matcher, row, chunk.draws[-1].draft))
            row += len(chunk.draws)
        mask = self._grammars.mask(row)
        self._grammars.fill(mask, rows)
        return mask

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)
        self.sampler.forget(request_id)
        self._sums.pop(request_id, None)


def _scores(chunk: Chunk, logits: Tensor, request: Request) -> Logprobs:
    """Log-probabilities of the tokens of the prompt that follow the wanted rows of the chunk."""
    first = chunk.end - chunk.num_wanted
    following = request.tokens[first + 1 : min(chunk.end + 1, request.num_prompt)]
    count = request.params.prompt_logprobs or 0
    tokens = torch.tensor(following, device=logits.device)
    return logprobs(logits[: len(following)], tokens, [count] * len(following))
