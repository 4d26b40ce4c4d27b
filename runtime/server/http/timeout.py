"""Runs foreign code with a time limit."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, which runs in this thread. Raises TimeoutError inside of it after
    `seconds`.

    This interrupts Python code, such as a looping template; a call into C is interrupted when it
    returns.
    """
    lock = threading.Lock()
    done = False
    timed_out = False
    thread = threading.get_ident()

    def interrupt() -> None:
        nonlocal timed_out
        with lock:
            if not done:
                timed_out = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(TimeoutError)
                )

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        try:
            result = work()
        finally:
            with lock:
                done = True
        return result
    except Exception as error:
        # `work` may have caught the TimeoutError and raised another error.
        if timed_out:
            raise TimeoutError(f"exceeded the limit of {seconds:g} s") from error
        raise
    finally:
        timer.cancel()
