"""Self-check of prepared batching: it computes what the class computes by itself.

How transformers hands its paged cache to attention layers changes with its versions; an attention
that misses the cache computes wrong tokens without an error. The class's own batching is not what
is compared with: its attention ignores caps of scores.
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn

from atomc.stock.logit_agreement import (
    IN_8_BITS,
    ROOM,
    agreed,
    difference,
    plain_tokens,
    rounding_noise,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Lengths of two prompts, which with steps of MAX_BATCH_TOKENS run in parts, in steps with a part of
# the other prompt, and in decode steps. None has the length of the other while it decodes.
LENGTHS = (11, 7)
MAX_BATCH_TOKENS = 8
PAGE = 4
NEW_TOKENS = 4

logger = logging.getLogger("atomc")


class _Sequence:
    """The tokens of a sequence that ran, and (kind of step, last hidden state [D]) of each."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self.tokens: list[int] = []
        self.rows: list[tuple[str, Tensor]] = []

    def takes(self, start: int, tokens: list[int]) -> bool:
        is_prompt = tokens == self.prompt[start : start + len(tokens)]
        return start == len(self.tokens) and (start >= len(self.prompt) or is_prompt)

    def add(self, tokens: list[int], rows: Tensor) -> None:
        kind = "a prompt" if not self.tokens else "a part of a prompt behind cached tokens"
        kind = "a decode step" if len(self.tokens) >= len(self.prompt) else kind
        self.tokens += tokens
        self.rows += [(kind, row) for row in rows]


def check_batching(model: "PreTrainedModel") -> None:
    """Compare the hidden states of a few steps of two prompts with those of the class's own forward
    with the attention "eager".

    Raises ValueError if they differ by more than rounding, or if a step fails.
    """
    name = f"{type(model).__name__} in transformers {transformers.__version__}"
    vocab_size = model.config.get_text_config().vocab_size
    sequences = [
        _Sequence(plain_tokens(model.config, vocab_size, length, seed))
        for seed, length in enumerate(LENGTHS)
    ]
    advice = "leave prepare_batching out, or pass self_check=False to run it nevertheless"
    failure = _run(model, sequences)
    if failure:
        raise ValueError(f"{name}: prepared batching fails: {failure}; {advice}")
    errors: dict[str, list[float]] = {}
    for sequence in sequences:
        try:
            expected = _own_states(model, sequence.tokens)
        except Exception as error:  # code of others, such as layers that only run batched
            logger.warning("%s: prepared batching is not checked: its forward: %s", name, error)
            return
        for (kind, row), other in zip(sequence.rows, expected, strict=True):
            errors.setdefault(kind, []).append(difference(row, other))
    limit = _limit(model)
    by_kind = {kind: agreed(rows) for kind, rows in errors.items()}
    if not all(error <= limit for error in by_kind.values()):  # NaN is not right
        numbers = ", ".join(f"{error:.1e} in {kind}" for kind, error in by_kind.items())
        raise ValueError(
            f"{name}: prepared batching computes something else than the class by itself: hidden "
            f"states differ by {numbers} of their spread, and rounding explains {limit:.1e}; "
            f"{advice}"
        )


def _limit(model: "PreTrainedModel") -> float:
    config = model.config.get_text_config()
    limit = ROOM * rounding_noise(model.dtype, model.device, config.num_hidden_layers)
    quantized = getattr(model.config, "quantization_config", None) is not None
    return max(limit, IN_8_BITS) if quantized else limit


def _own_states(model: "PreTrainedModel", tokens: list[int]) -> Tensor:
    """The last hidden states [T, D]."""
    prepared = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        with torch.no_grad():
            ids = torch.tensor([tokens], device=model.device)
            states: Tensor = model.base_model(input_ids=ids, use_cache=False)[0]
            return states[0].float()
    finally:
        model.config._attn_implementation = prepared


def _run(model: "PreTrainedModel", sequences: Sequence[_Sequence]) -> str:
    """Batch the prompts, and say why they did not end."""

    def record(_: nn.Module, __: tuple[Any, ...], options: dict[str, Any], out: Any) -> None:
        ids, positions = options["input_ids"][0].tolist(), options["position_ids"][0].tolist()
        ends = options["cu_seq_lens_q"].tolist()
        for first, end in pairwise(ends):
            tokens = ids[first:end]
            matching = (s for s in sequences if tokens and s.takes(positions[first], tokens))
            for sequence in matching:
                sequence.add(tokens, out[0][0, first:end].float())

    hook = model.base_model.register_forward_hook(record, with_kwargs=True)
    try:
        outputs = model.generate_batch(
            [sequence.prompt for sequence in sequences],
            generation_config=transformers.GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                PAGE,
                num_blocks=16,
                max_batch_tokens=MAX_BATCH_TOKENS,
                max_blocks_per_request=0,
                use_cuda_graph=False,
                use_async_batching=False,
            ),
            progress_bar=False,
            warmup=False,
        )
    finally:
        hook.remove()
    failures = [str(output.error) for output in outputs.values() if output.error]
    if failures:
        return failures[0]
    count = sum(len(sequence.tokens) for sequence in sequences)
    expected = sum(LENGTHS) + len(LENGTHS) * (NEW_TOKENS - 1)
    return "" if count == expected else f"{count} of {expected} tokens ran"
