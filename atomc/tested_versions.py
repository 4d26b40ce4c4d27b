"""The series of the libraries below atomc that its tests run with."""

import functools
import importlib.metadata
import logging

TESTED = {
    "torch": ("2.11", "2.13", "2.14", "2.15"),
    "triton": ("3.6", "3.7", "3.8", "3.9"),
    "transformers": ("5.17", "5.23", "5.24"),
}

log = logging.getLogger("atomc")


def installed() -> dict[str, str]:
    """The versions of these libraries, without importing them."""
    versions = {}
    for name in TESTED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def is_tested(name: str, version: str) -> bool:
    return series(version) in TESTED[name]


def series(version: str) -> str:
    return ".".join(version.split(".")[:2])


@functools.cache
def warn_of_untested() -> None:
    """One line, once per process, if an installed version is not among those tested."""
    others = [
        f"{name} {version} (tested: {', '.join(TESTED[name])})"
        for name, version in installed().items()
        if not is_tested(name, version)
    ]
    if others:
        log.warning("atomc is not tested with %s", "; ".join(others))
