"""`atomc doctor`: what machine this is, what can be had on it, and what the cache of compiled graphs holds."""

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from atomc.cli.arguments import command

if TYPE_CHECKING:
    from atomc.cache import Usage
    from atomc.platform import Platform


def add(commands: Any) -> None:
    added = command(commands, "doctor", run,
                    "Say what machine this is, which libraries and kernels can be had here, and what lies in the cache.",
                    "  atomc doctor\n  atomc doctor --clear")  # fmt: skip
    added.add_argument("--clear", action="store_true", help="empty the cache of compiled graphs, and do nothing else")


def run(arguments: argparse.Namespace) -> None:
    import torch

    from atomc import cache, kernels
    from atomc.op import REGISTRY
    from atomc.options import Options
    from atomc.pieces import glue_of
    from atomc.platform import Platform, provider_versions, torch_status
    from atomc.render.text import table

    if arguments.clear:
        gone = cache.clear(Options.of())
        print(f"{_entries(gone)} deleted from {gone.folder}, {_size(gone.bytes)} freed")
        return
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
    print(table(("kernels", "number", "why not"), found, numbers=[1]) + "\n")
    options = Options.of()
    usage = cache.usage(options)
    held = f"{_entries(usage)}, {_size(usage.bytes)} of {_size(options.cache_size)}"
    print(table(("cache", ""), [("folder", str(usage.folder)), ("holds", held if options.cache else f"{held}; off")]))


def _entries(usage: "Usage") -> str:
    return "1 entry" if usage.entries == 1 else f"{usage.entries} entries"


def _size(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.1f} KiB"


def _machine(here: "Platform") -> list[tuple[str, str]]:
    units = "cores" if here.is_cpu else "multiprocessors"
    rows = [("platform", f"{here.kind} {here.arch}, {here.name}"),
            ("size", f"{here.num_sms} {units}, {here.memory / 2**30:.1f} GiB"),
            ("bf16", "in hardware" if here.supports_bf16 else "slower than fp32: not in hardware")]  # fmt: skip
    return [*rows, ("flags", " ".join(sorted(here.cpu_flags)))] if here.cpu_flags else rows
