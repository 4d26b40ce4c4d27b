"""`atomc doctor`: reports the machine, the available libraries and kernels, and the compile cache;
runs a self-test.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from atomc.cli.arguments import Commands, add_switch, command
from atomc.options import Options

if TYPE_CHECKING:
    from atomc.cache.store import StartRecord, Usage
    from atomc.platform import Platform, Provider

# The library whose version applies to a provider's kernels, if its name differs.
LIBRARY_OF_PROVIDER = {"invariant": "triton"}


def add(commands: Commands) -> None:
    added = command(
        commands,
        "doctor",
        run,
        "Report the machine, the available libraries and kernels, and the contents of the "
        "compile cache.",
        "  atomc doctor\n  atomc doctor --self-test\n  atomc doctor --clear",
    )
    add_switch(added, "--clear", "delete the compile cache, and do nothing else")
    add_switch(
        added,
        "--self-test",
        "compare each available kernel with its reference; exit code 1 if one fails",
    )


def run(arguments: argparse.Namespace) -> int:
    from atomc.cache import store

    if arguments.clear:
        deleted = store.clear(Options.of())
        print(
            f"{_entries(deleted)} deleted from {deleted.folder}, "
            f"{_format_bytes(deleted.bytes)} freed"
        )
        return 0
    _print_machine()
    _print_libraries()
    print(_cache(Options.of()))
    return _self_test() if arguments.self_test else 0


def _print_machine() -> None:
    import torch

    from atomc.compiler.partition import glue_of
    from atomc.platform import Platform
    from atomc.report.render.table import table
    from atomc.tested_versions import installed, is_tested

    version = import_module("atomc").__version__
    python = ".".join(map(str, sys.version_info[:3]))
    libraries = ", ".join(
        f"{name} {release} ({'tested' if is_tested(name, release) else 'untested'} with it)"
        for name, release in {**installed(), "torch": str(torch.__version__)}.items()
    )
    print(f"atomc {version}, {libraries}, Python {python}\n")
    here = Platform.detect()
    how, why = glue_of(Options(), here)
    print(table(("machine", ""), [*_machine(here), ("glue", f"{how}: {why}")]) + "\n")


def _print_libraries() -> None:
    from atomc import kernels
    from atomc.ops.op import REGISTRY
    from atomc.platform import provider_versions
    from atomc.report.render.table import table

    libraries = provider_versions()
    rows = [
        (name, library.version or "yes" if library.found else "-", library.reason or "")
        for name, library in libraries.items()
    ]
    print(table(("library", "found", "why not"), rows) + "\n")
    missing = {
        provider: kernels.load(provider) for provider in (*kernels.PROVIDERS, kernels.INVARIANT)
    }
    counts = {
        provider: sum(
            kernel.provider == provider for op in REGISTRY.values() for kernel in op.kernels
        )
        for provider in missing
    }
    providers = [
        (provider, _provider_version(provider, libraries), str(counts[provider]), reason or "")
        for provider, reason in missing.items()
    ]
    print(table(("kernels", "version", "number", "why not"), providers, numbers=[2]) + "\n")


def _provider_version(provider: str, libraries: "dict[str, Provider]") -> str:
    """The version of the library that the kernels call; torch's version for torch's own kernels."""
    import torch

    library = libraries.get(LIBRARY_OF_PROVIDER.get(provider, provider))
    if library is not None:
        return library.version or "-"
    if provider == "onednn":
        named = [line for line in torch.__config__.show().splitlines() if "MKL-DNN" in line]
        return named[0].partition(" v")[2].partition(" ")[0] if named else "-"
    return str(torch.__version__)


def _cache(options: Options) -> str:
    from atomc.cache import store
    from atomc.report.render.table import table
    from atomc.trusted_folder import untrusted

    usage = store.usage(options)
    contents = (
        f"{_entries(usage)}, {_format_bytes(usage.bytes)} of {_format_bytes(options.cache_size)}"
    )
    rows = [
        ("folder", str(usage.folder)),
        ("holds", contents if options.cache else f"{contents}; off"),
    ]
    reason = untrusted(usage.folder)
    unused = [("not used", reason)] if reason else []
    return table(("cache", ""), [*rows, *unused, *_last_start(store.last_start(options))])


def _last_start(graphs: "Sequence[StartRecord]") -> list[tuple[str, str]]:
    """The time of the last start, and the cache result of its graphs; equal lines are counted."""
    if not graphs:
        return [("last start", "not known")]
    said = Counter(f"{graph.model}: {graph.said}" for graph in graphs)
    counted = [f"{text} ({number} graphs)" if number > 1 else text for text, number in said.items()]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(graphs[0].at))
    return [("last start", f"{at}, {counted[0]}"), *(("", text) for text in counted[1:])]


def _self_test() -> int:
    from atomc.testing.selftest import self_test, text

    checks = list(self_test())
    print("\n" + text(checks))
    return int(any(one.passed is False for one in checks))


def _entries(usage: "Usage") -> str:
    return "1 entry" if usage.entries == 1 else f"{usage.entries} entries"


def _format_bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.1f} KiB"


def _machine(here: "Platform") -> list[tuple[str, str]]:
    units = "cores" if here.is_cpu else "multiprocessors"
    rows = [
        ("platform", f"{here.kind} {here.arch}, {here.name}"),
        ("size", f"{here.num_sms} {units}, {here.memory / 2**30:.1f} GiB"),
        ("bf16", "in hardware" if here.supports_bf16 else "slower than fp32: not in hardware"),
    ]
    return [*rows, ("flags", " ".join(sorted(here.cpu_flags)))] if here.cpu_flags else rows
