"""Whether zentorch may run on this CPU, and computes correct results here.

Checks, in this order: the CPU, the package, its ops, and products in a separate process. On a CPU
without the instructions that it uses, zentorch does not raise: it kills the process or returns
uninitialized memory.
"""

import functools
import importlib
import json
import logging
import math
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch

from atomc.ops.op import Prepared, Refusal
from atomc.platform import AVX512, Platform, provider_versions

log = logging.getLogger("atomc")

AMD = "AuthenticAMD"
# A lower ratio is a wrong result, not a rounded one; bf16 results have 50 dB.
LEAST_DECIBELS = 40.0
CHECK_TIMEOUT = 120  # seconds for the check


def unfit(platform: Platform, kind: str, *, needs_bf16: bool = True) -> Refusal | None:
    """Refuse x86 CPUs on which zentorch cannot run this kind of linear (a key of
    self_check.CHECKS).

    needs_bf16  it computes in bf16; other linears run on CPUs of other vendors, if the user names
                zentorch
    """
    needed = (
        AVX512
        | {"avx512_vnni"}
        | ({"avx512_bf16"} if needs_bf16 or platform.vendor == AMD else set())
    )
    lacking = sorted(flag for flag in needed if not platform.has(flag))
    if lacking:
        return Refusal(
            "hardware", f"zentorch needs {' and '.join(lacking)}, which this CPU does not have"
        )
    if platform.vendor != AMD and ("zentorch" not in platform.asked or needs_bf16):
        return Refusal(
            "hardware",
            f"zentorch supports AMD CPUs, this is one of {platform.vendor or 'an unknown vendor'}; "
            "its int8 layers with fp32 output can be enabled by naming zentorch in the option "
            "`providers`",
        )
    if not platform.here:
        return None
    if reason := missing():
        return Refusal("library", reason)
    return unproven(kind)


@functools.cache
def missing() -> str | None:
    """Why zentorch cannot be imported here, or None. Logged once per process."""
    status = provider_versions()["zentorch"]
    reason = status.reason
    if status.found:
        # By default it prints a warning about its cache on stdout, where programs write results.
        os.environ.setdefault("ZENDNNL_API_LOG_LEVEL", "1")
        try:
            importlib.import_module("zentorch")
        except Exception as error:  # of many types: a missing .so, its own check of versions
            reason = (
                f"zentorch {status.version or ''} cannot be imported: "
                f"{type(error).__name__}: {error}"
            )
    if reason:
        log.warning("zentorch would run quantized linears on this CPU, and is not used: %s", reason)
    return reason


def unproven(kind: str) -> Refusal | None:
    """Refuse this kind of linear unless the check found its results correct."""
    result = checked()
    if kind in result.errors:
        return Refusal("library", f"zentorch cannot compute {kind}: {result.errors[kind]}")
    if kind not in result.decibels:
        return Refusal("library", f"zentorch did not compute {kind} in a check: {result.ending}")
    worst = min(result.decibels[kind], key=lambda value: -math.inf if math.isnan(value) else value)
    if not worst >= LEAST_DECIBELS:
        return Refusal(
            "library",
            f"zentorch computes {kind} wrong here: {worst:.0f} dB above the error, expected "
            f"are {LEAST_DECIBELS:.0f}",
        )
    return None


class Checked(NamedTuple):
    """The result of the check for each kind: the signal-to-error ratio in dB for some numbers of
    rows, or an exception.
    """

    decibels: dict[str, list[float]]
    errors: dict[str, str]
    ending: str
    seconds: float


@functools.cache
def checked() -> Checked:
    """Run the check in a separate process, once; most of the time is the import of torch."""
    program = Path(__file__).with_name("self_check.py").read_text()
    start = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT,
        )
        output, ending = done.stdout, _ending(done)
    except (OSError, subprocess.TimeoutExpired) as error:
        output, ending = "", f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in output.splitlines() if line.startswith('{"kind"')]
    decibels, errors = (
        {row["kind"]: row[key] for row in rows if key in row} for key in ("decibels", "error")
    )
    result = Checked(decibels, errors, ending, seconds)
    spelled = ", ".join(f"{kind} {min(values):.0f} dB" for kind, values in result.decibels.items())
    log.info(
        "zentorch was checked in %.1f s: %s",
        seconds,
        spelled or "; ".join(errors.values()) or ending,
    )
    return result


def _ending(done: "subprocess.CompletedProcess[str]") -> str:
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}"
    lines = done.stderr.strip().splitlines()
    return f"the process ended with {done.returncode}{': ' + lines[-1] if lines else ''}"


@functools.cache
def function(name: str) -> Any:
    """The op torch.ops.zentorch.<name>. Raises RuntimeError without zentorch."""
    if reason := missing():
        raise RuntimeError(reason)
    return getattr(torch.ops.zentorch, name).default


def unpacked(weight: torch.Tensor) -> Prepared:
    """The weight itself, of which zentorch caches a packed copy by its address.

    Call it again after the weight has changed or moved.
    """
    # The cache is by address, which another weight may have had before, or may get later.
    forget = function("zentorch_clear_weight_cache")
    forget()
    kept = weight.detach()
    weakref.finalize(kept, forget).atexit = False
    return Prepared((kept,))
