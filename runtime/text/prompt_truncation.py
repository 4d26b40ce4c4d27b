"""truncate_prompt_tokens: keeps the end of a prompt that may be too long."""

from collections.abc import Sequence

from atomc.runtime.requests.sampling_params import ParameterError


def truncated(
    tokens: Sequence[int], size: int | None, *, max_tokens: int | None, max_len: int
) -> list[int]:
    """The last `size` tokens; -1: as many as leave room for max_tokens (None: for one); None: all.

    max_len   maximum sequence length in tokens

    Raises ParameterError for another size, and for one above max_len.
    """
    if size is None:
        return list(tokens)
    if size not in range(1, max_len + 1) and size != -1:
        raise ParameterError(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens is {size}, it must be at least 1 and at most the maximum "
            f"context length of {max_len}, or -1 (as many as fit)",
        )
    length = max(max_len - (max_tokens or 1), 1) if size == -1 else size
    return list(tokens[-length:])
