"""Prefix cache: keys of full blocks, and the longest cached prefix.

The key of a block is a hash of its tokens, of the images that they belong to, and of the previous
block's key; for the first block, of the LoRA adapter and the salt instead. Equal keys mean equal
tokens and images from the start of the sequence, the same adapter as loaded once, and equal salts.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence

from atomc.runtime.requests.request import Request, overlapping

DIGEST = 16  # bytes: collisions are neither likely nor feasible to construct


def extend_keys(request: Request, block_size: int) -> None:
    """Append the missing keys of full blocks of the request's tokens."""
    root = b"" if request.lora is None else b"lora %d " % request.lora.identity
    root += b"" if request.salt is None else b"salt " + request.salt.encode()
    keys, tokens = request.keys, request.tokens
    for i in range(len(keys), len(tokens) // block_size):
        parent = keys[-1] if keys else _digest(root)
        start, end = i * block_size, (i + 1) * block_size
        content = array("q", tokens[start:end]).tobytes()
        # All tokens of images are equal: what they are is in the digest, and where in the start.
        for image in overlapping(request.images, start, end) if request.images else ():
            content += array("q", [image.start, len(image.digest)]).tobytes() + image.digest
        keys.append(_digest(parent + content))


def first_read(position: int, window: int) -> int:
    """The first position that the token at `position`, or any later one, attends to."""
    return max(0, position - window + 1) if window else 0


def longest_match(
    keys: Sequence[bytes],
    block_size: int,
    windows: Sequence[int],
    cached: Sequence[Callable[[bytes], bool]],
) -> int:
    """Number of leading blocks to reuse: each group has all of them that later tokens attend to.

    cached   for each group, whether it has a block with this key
    """
    count = len(keys)
    for window, has in zip(windows, cached, strict=True):
        if not window:
            count = next((i for i in range(count) if not has(keys[i])), count)
    windowed = [(window, has) for window, has in zip(windows, cached, strict=True) if window]
    while count and not all(
        has(keys[i])
        for window, has in windowed
        for i in range(first_read(count * block_size, window) // block_size, count)
    ):
        count -= 1
    return count


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
