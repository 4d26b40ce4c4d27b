"""A process that validates grammars, each in its own fork, with limits on time, memory and stack.

A grammar is a program from a client: compiling it can take minutes and gigabytes, or overflow the
stack. The engine compiles the grammars that pass again.
"""

import json
import random
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from atomc.errors import first_line
from atomc.files.json_types import JSONObject
from atomc.runtime.constrained.grammar_source import parser_limits, source
from atomc.runtime.processes.fork_server import lower_limit, memory_use, serve_forks
from atomc.runtime.requests.sampling_params import Structured

if TYPE_CHECKING:  # optional
    from llguidance import LLMatcher, LLTokenizer

# Stack limit of the validation. Threads that compute masks in the engine have at least twice as
# much.
STACK_BYTES = 2**20
# Number of tokens to sample, and the CPU time limit per mask, which one mask may exceed.
WALK_TOKENS = 64
FIRST_TOKENS = 8
MASK_SECONDS = 0.05


def main() -> None:
    """As ForkServer expects; settings: those of GrammarValidator."""
    from llguidance import LLTokenizer

    settings = json.load(sys.stdin)
    tokens = LLTokenizer(
        settings["tokenizer"], n_vocab=settings["vocab_size"], eos_token=settings["eos_ids"]
    )
    serve_forks(partial(_respond, tokens, settings))


def _respond(tokens: "LLTokenizer", settings: Mapping[str, Any], connection: socket.socket) -> None:
    with connection.makefile("rb") as file:
        fields = json.load(file)
    connection.sendall(json.dumps(_validate_limited(tokens, settings, fields)).encode())


def _validate_limited(
    tokens: "LLTokenizer", settings: Mapping[str, Any], fields: Mapping[str, Any]
) -> JSONObject:
    """The result of the validation, or its error. A limit may end the process by a signal
    instead.
    """
    before, name = memory_use(), next(iter(fields))
    try:
        structured = Structured(**fields)
        lower_limit(resource.RLIMIT_STACK, STACK_BYTES)
        lower_limit(resource.RLIMIT_AS, memory_use().size + settings["memory"])
        signal.setitimer(signal.ITIMER_PROF, settings["seconds"])
        text, matcher = _validate(tokens, structured)
    except MemoryError:
        return {"signal": signal.SIGABRT}
    except UnicodeError:
        return {"error": f"{name}: it has text that is not valid Unicode, such as a lone surrogate"}
    except ValueError as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic in Rust is no Exception
        return {"error": f"{name}: llguidance failed on it: {first_line(error):.200}"}
    signal.setitimer(signal.ITIMER_PROF, 0)
    num_bytes = max(memory_use().own - before.own, 0)
    del matcher  # only after its memory is counted
    return {"text": text, "num_bytes": num_bytes}


def _validate(tokens: "LLTokenizer", structured: Structured) -> "tuple[str, LLMatcher]":
    """The grammar in llguidance's language, and its matcher after sampling some tokens."""
    from llguidance import LLMatcher

    name, text = source(structured)
    limits = parser_limits()
    failed, messages = LLMatcher.validate_grammar_with_warnings(text, tokens, limits=limits)
    if failed:
        raise ValueError(f"{name}: {_message(messages[0])}")
    matcher = LLMatcher(tokens, text, log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(f"{name}: {_message(matcher.get_error())}")
    allowed = _ids(matcher.compute_bitmask())
    error = matcher.get_error()
    if not allowed or _is_exhausted(error):
        raise ValueError(f"{name}: no text matches it")
    if error:
        raise ValueError(f"{name}: {_message(error)}")
    _sample_walk(matcher, allowed, name, set(tokens.eos_tokens))
    return text, matcher


def _sample_walk(matcher: "LLMatcher", allowed: list[int], name: str, eos_ids: set[int]) -> None:
    """Sample tokens. Raises ValueError if masks take too long, or if a limit is exceeded within the
    first few tokens; after these, exceeding it fails only the request."""
    rng, slow = random.Random(0), 0
    for number in range(WALK_TOKENS):
        choices = [token for token in allowed if token not in eos_ids]
        taken = bool(choices) and matcher.try_consume_tokens([rng.choice(choices)])
        if number < FIRST_TOKENS and choices and (not taken or _too_large(matcher)):
            raise ValueError(f"{name}: it is too complex: {_message(matcher.get_error())}")
        if not taken:
            return
        began = time.process_time()
        mask = matcher.compute_bitmask()
        slow += time.process_time() - began > MASK_SECONDS
        if slow > 1:
            raise ValueError(
                f"{name}: it is too complex: computing its masks exceeds the limit of "
                f"{1000 * MASK_SECONDS:.0f} ms per step"
            )
        if number < FIRST_TOKENS and _too_large(matcher):
            raise ValueError(f"{name}: it is too complex: {_message(matcher.get_error())}")
        if matcher.is_error():
            return
        allowed = _ids(mask)


def _too_large(matcher: "LLMatcher") -> bool:
    """Whether the matcher stopped for another reason than the end of the text."""
    error = matcher.get_error()
    return bool(error) and not _is_exhausted(error)


def _is_exhausted(error: str) -> bool:
    """Whether the text cannot continue. llguidance has no code for this: `stop_reason` is
    InternalError.
    """
    return error.startswith("NoExtension")


def _ids(mask: bytes) -> list[int]:
    return [
        8 * place + bit
        for place, byte in enumerate(mask)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    ]


def _message(message: str) -> str:
    """The library's message without its internal state."""
    return message.partition("\n<state>")[0].strip()


if __name__ == "__main__":
    main()
