"""Requests of a benchmark: prompts of random tokens, or prompts from a file."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atomc.files.json_types import JSON

# Token ids that exist in every vocabulary (the demo's has 3072) and are not special tokens, which
# are first or last.
FIRST_ID, LAST_ID = 300, 3000

Prompt = str | Sequence[int] | Sequence[Mapping[str, JSON]]  # text, token ids, or messages


@dataclass(frozen=True)
class SampleRequest:
    """A prompt, and the maximum number of new tokens."""

    prompt: Prompt
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        return (
            not isinstance(self.prompt, str)
            and bool(self.prompt)
            and isinstance(self.prompt[0], Mapping)
        )


def random_requests(
    count: int,
    input_len: int,
    output_len: int,
    *,
    prefix_len: int = 0,
    spread: float = 0.0,
    seed: int = 0,
) -> list[SampleRequest]:
    """Prompts of random token ids, determined by the seed.

    prefix_len   length of a common prefix, added to every prompt
    spread       lengths are uniform in [length * (1 - spread), length * (1 + spread)]
    """
    if not 0.0 <= spread < 1.0:
        raise ValueError(
            f"the spread of lengths is {spread}, expected at least 0 (equal lengths) and below 1"
        )
    rng = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_ID, LAST_ID) for _ in range(length))

    def length(mean: int) -> int:
        return max(1, rng.randint(round(mean * (1 - spread)), round(mean * (1 + spread))))

    prefix = tokens(prefix_len)
    return [
        SampleRequest(prefix + tokens(length(input_len)), length(output_len)) for _ in range(count)
    ]


def requests_from_file(
    file: Path, count: int, output_len: int, *, seed: int = 0
) -> list[SampleRequest]:
    """Prompts from a file, shuffled by the seed and repeated up to `count`.

    A .jsonl file has one object per line with `prompt` (text or token ids) or `messages`, and
    optionally `max_tokens`; any other file has one prompt per line. Raises OSError, or ValueError
    for invalid content.
    """
    lines = [
        (number, line)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if line.strip()
    ]
    if not lines:
        raise ValueError(f"{file} has no prompt, expected one per line")
    if file.suffix == ".jsonl":
        samples = [_parse_sample(f"{file}:{number}", line, output_len) for number, line in lines]
    else:
        samples = [SampleRequest(line, output_len) for _, line in lines]
    random.Random(seed).shuffle(samples)
    return [samples[number % len(samples)] for number in range(count)]


def _parse_sample(where: str, line: str, output_len: int) -> SampleRequest:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    match value:
        case {"messages": [{}, *_] as prompt} | {"prompt": (str() | [int(), *_]) as prompt}:
            return SampleRequest(prompt, int(value.get("max_tokens") or output_len))
    raise ValueError(
        f"{where}: expected an object with prompt (text or token ids) or messages, got {line[:80]}"
    )
