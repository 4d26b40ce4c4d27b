"""`atomc doctor`: what machine this is and what can be had on it."""

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from atomc.cli.arguments import command

if TYPE_CHECKING:
    from atomc.platform import Platform


def add(commands: Any) -> None:
    command(commands, "doctor", run, "Say what machine this is, and which libraries and kernels can be had here.",
             "  atomc doctor")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    import torch

    from atomc import kernels
    from atomc.op import REGISTRY
    from atomc.options import Options
    from atomc.pieces import glue_of
    from atomc.platform import Platform, provider_versions, torch_status
    from atomc.render.text import table

    version = import_module("atomc").__version__
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"atomc {version}, torch {torch.__version__} ({torch_status()} with it), Python {python}\n")
    here = Platform.detect()
    how, why = glue_of(Options(), here)
    print(table(("machine", ""), [*_machine(here), ("glue", f"{how}: {why}")]) + "\n")
    rows = [(name, library.version or "yes" if library.found else "-", library.reason or "")
            for name, library in provider_versions().items()]  # fmt: skip
    print(table(("library", "found", "why not"), rows) + "\n")
    missing = {provider: kernels.load(provider) for provider in kernels.PROVIDERS}
    counts = {provider: sum(kernel.provider == provider for op in REGISTRY.values() for kernel in op.kernels)
              for provider in missing}  # fmt: skip
    found = [(provider, str(counts[provider]), reason or "") for provider, reason in missing.items()]
    print(table(("kernels", "number", "why not"), found, numbers=[1]))


def _machine(here: "Platform") -> list[tuple[str, str]]:
    units = "cores" if here.is_cpu else "multiprocessors"
    rows = [("platform", f"{here.kind} {here.arch}, {here.name}"),
            ("size", f"{here.num_sms} {units}, {here.memory / 2**30:.1f} GiB"),
            ("bf16", "in hardware" if here.supports_bf16 else "slower than fp32: not in hardware")]  # fmt: skip
    return [*rows, ("flags", " ".join(sorted(here.cpu_flags)))] if here.cpu_flags else rows
