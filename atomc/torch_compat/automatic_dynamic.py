"""Dynamo's automatic dynamic state: the numbers that earlier compiles of this process made
dynamic.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from torch._dynamo import pgo
from torch._dynamo.convert_frame import compile_lock


@contextlib.contextmanager
def isolated_dynamo_state() -> Iterator[None]:
    """Inside the context, Dynamo compiles as in a new process; its state is restored afterwards.

    The state is keyed by file, line and name of each inlined function and by the expression of each
    number. Two models called by one wrapper share it: floats and ints of the second model that
    differ would become symbols.
    """
    with compile_lock:  # as in every compile, no other thread compiles
        before = pgo._CODE_STATE, pgo._INIT_CODE_STATE
        # The same object for both: Dynamo writes the difference between them to its profile on
        # disk.
        pgo._CODE_STATE = pgo._INIT_CODE_STATE = defaultdict(pgo.CodeState)
        try:
            yield
        finally:
            pgo._CODE_STATE, pgo._INIT_CODE_STATE = before
