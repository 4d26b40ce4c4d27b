"""What a benchmark asks for: prompts of random tokens, or those of a file."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids that every vocabulary has (the demo's has 3072) and that are no special tokens, which come first or last.
FIRST_ID, LAST_ID = 300, 3000

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, token ids, or messages


@dataclass(frozen=True)
class Ask:
    """One request: what to continue, and how many tokens are wanted, at most."""

    prompt: Prompt
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and bool(self.prompt) and isinstance(self.prompt[0], Mapping)


def random_asks(count: int, input_len: int, output_len: int, *, prefix_len: int = 0, spread: float = 0.0,
                seed: int = 0) -> list[Ask]:  # fmt: skip
    """Prompts of random token ids, the same for the same seed.

    prefix_len  further tokens that all prompts begin with
    spread      lengths are drawn evenly from length * (1 - spread) to length * (1 + spread)
    """
    if not 0.0 <= spread < 1.0:
        raise ValueError(f"the spread of lengths is {spread}, expected 0 (all alike) to below 1")
    drawn = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(FIRST_ID, LAST_ID) for _ in range(length))

    def length(middle: int) -> int:
        return max(1, drawn.randint(round(middle * (1 - spread)), round(middle * (1 + spread))))

    prefix = tokens(prefix_len)
    return [Ask(prefix + tokens(length(input_len)), length(output_len)) for _ in range(count)]


def asks_of_file(file: Path, count: int, output_len: int, *, seed: int = 0) -> list[Ask]:
    """Prompts of a file, shuffled by the seed and repeated if they are too few.

    A .jsonl file has an object a line with `prompt` (a text or token ids) or `messages`, and perhaps `max_tokens`; any
    other file has a prompt a line. Raises ValueError and OSError for what cannot be used.
    """
    lines = [(number, line) for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{file} has no prompt: expected one a line")
    if file.suffix == ".jsonl":
        asks = [_ask(f"{file}:{number}", line, output_len) for number, line in lines]
    else:
        asks = [Ask(line, output_len) for _, line in lines]
    random.Random(seed).shuffle(asks)
    return [asks[number % len(asks)] for number in range(count)]


def _ask(where: str, line: str, output_len: int) -> Ask:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    match value:
        case {"messages": [{}, *_] as prompt}:
            return Ask(prompt, int(value.get("max_tokens") or output_len))
        case {"prompt": (str() | [int(), *_]) as prompt}:
            return Ask(prompt, int(value.get("max_tokens") or output_len))
    raise ValueError(f"{where}: expected an object with prompt (a text or token ids) or messages, got {line[:80]}")
