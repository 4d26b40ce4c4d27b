"""Work of somebody else's code, ended when its time is over."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """What the work gives, in this thread. Raises TimeoutError in the middle of it if it takes longer.

    That ends Python code, such as a template that loops; a single call of C code ends first.
    """
    lock = threading.Lock()
    done = False
    late = False
    thread = threading.get_ident()

    def end() -> None:
        nonlocal late
        with lock:
            if not done:
                late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        try:
            found = work()
        finally:
            with lock:
                done = True
        return found
    except Exception as error:
        # The work may have caught it, and raise what it says of it.
        if late:
            raise TimeoutError(f"it takes more than {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
