"""What Dynamo remembers of earlier compiles in this process: the numbers that it will take for dynamic from then on."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from torch._dynamo import pgo
from torch._dynamo.convert_frame import compile_lock


@contextlib.contextmanager
def compiled_alone() -> Iterator[None]:
    """Dynamo compiles here as in a new process, and forgets afterwards what it saw here.

    Its memory is keyed by file, line and name of each inlined function and by the expression of each number, so that two
    models of one wrapper share it: where they differ, floats and ints of the second one become symbols.
    """
    with compile_lock:  # nothing else compiles meanwhile, as in any compile
        kept = pgo._CODE_STATE, pgo._INIT_CODE_STATE
        # The same object as both: Dynamo writes to its profile on disk what differs between them.
        pgo._CODE_STATE = pgo._INIT_CODE_STATE = defaultdict(pgo.CodeState)
        try:
            yield
        finally:
            pgo._CODE_STATE, pgo._INIT_CODE_STATE = kept
