"""A digest of the results that a rank has read: equal in all ranks, unless their tokens differ."""

import zlib
from collections.abc import Sequence

import msgspec

from atomc.runtime.execution.executor import Result

_encode = msgspec.msgpack.Encoder().encode


def results_digest(before: int, results: Sequence[Result]) -> int:
    """The digest after these results. before: the digest of all earlier ones; 0: there are none."""
    return zlib.crc32(
        _encode([(tuple(result.tokens), result.error is not None) for result in results]), before
    )
