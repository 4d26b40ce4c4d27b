"""`atomc doctor`: what machine this is, what can be had on it, what the cache of compiled graphs did, and a self-test."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from atomc.cli.arguments import command

if TYPE_CHECKING:
    from atomc.cache.store import StartRecord, Usage
    from atomc.options import Options
    from atomc.platform import Platform, Provider

# Whose version the kernels of a provider go by, where it is another name.
LIBRARIES = {"invariant": "triton"}


def add(commands: Any) -> None:
    added = command(commands, "doctor", run,
                    "Say what machine this is, which libraries and kernels can be had here, and what lies in the cache.",
                    "  atomc doctor\n  atomc doctor --self-test\n  atomc doctor --clear")  # fmt: skip
    added.add_argument("--clear", action="store_true", help="empty the cache of compiled graphs, and do nothing else")
    added.add_argument("--self-test", action="store_true", help="try each kernel that can be had here against its meaning; "
                       "exit code 1 if one fails")  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    from atomc.cache import store
    from atomc.options import Options

    if arguments.clear:
        gone = store.clear(Options.of())
        print(f"{_entries(gone)} deleted from {gone.folder}, {_size(gone.bytes)} freed")
        return 0
    _print_machine()
    _print_libraries()
    print(_cache(Options.of()))
    return _self_test() if arguments.self_test else 0


def _print_machine() -> None:
    import torch

    from atomc.options import Options
    from atomc.pieces import glue_of
    from atomc.platform import Platform, torch_status
    from atomc.render.table import table

    version = import_module("atomc").__version__
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"atomc {version}, torch {torch.__version__} ({torch_status()} with it), Python {python}\n")
    here = Platform.detect()
    how, why = glue_of(Options(), here)
    print(table(("machine", ""), [*_machine(here), ("glue", f"{how}: {why}")]) + "\n")


def _print_libraries() -> None:
    from atomc import kernels
    from atomc.op import REGISTRY
    from atomc.platform import provider_versions
    from atomc.render.table import table

    libraries = provider_versions()
    rows = [(name, library.version or "yes" if library.found else "-", library.reason or "")
            for name, library in libraries.items()]  # fmt: skip
    print(table(("library", "found", "why not"), rows) + "\n")
    missing = {provider: kernels.load(provider) for provider in (*kernels.PROVIDERS, kernels.INVARIANT)}
    counts = {provider: sum(kernel.provider == provider for op in REGISTRY.values() for kernel in op.kernels)
              for provider in missing}  # fmt: skip
    found = [(provider, _version(provider, libraries), str(counts[provider]), reason or "")
             for provider, reason in missing.items()]  # fmt: skip
    print(table(("kernels", "version", "number", "why not"), found, numbers=[2]) + "\n")


def _version(provider: str, libraries: "dict[str, Provider]") -> str:
    """Of the library that the kernels call; those of torch itself go by its version."""
    import torch

    library = libraries.get(LIBRARIES.get(provider, provider))
    if library is not None:
        return library.version or "-"
    if provider == "onednn":
        named = [line for line in torch.__config__.show().splitlines() if "MKL-DNN" in line]
        return named[0].partition(" v")[2].partition(" ")[0] if named else "-"
    return str(torch.__version__)


def _cache(options: "Options") -> str:
    from atomc.cache import store
    from atomc.render.table import table

    usage = store.usage(options)
    held = f"{_entries(usage)}, {_size(usage.bytes)} of {_size(options.cache_size)}"
    rows = [("folder", str(usage.folder)), ("holds", held if options.cache else f"{held}; off")]
    reason = store.untrusted(usage.folder)
    return table(("cache", ""), [*rows, *([("not used", reason)] if reason else []), *_started(store.last_start(options))])


def _started(graphs: "Sequence[StartRecord]") -> list[tuple[str, str]]:
    """When the last start was, and what the cache did for its graphs, those alike once."""
    if not graphs:
        return [("last start", "not known")]
    said = Counter(f"{graph.model}: {graph.said}" for graph in graphs)
    counted = [f"{text} ({number} graphs)" if number > 1 else text for text, number in said.items()]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(graphs[0].at))
    return [("last start", f"{at}, {counted[0]}"), *(("", text) for text in counted[1:])]


def _self_test() -> int:
    from atomc.selftest import self_test, text

    found = list(self_test())
    print("\n" + text(found))
    return int(any(one.passed is False for one in found))


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
