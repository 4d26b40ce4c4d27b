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
    versions = {name: installed_version(name) for name in TESTED}
    return {name: version for name, version in versions.items() if version is not None}


def installed_version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed, or has no metadata, as a checkout
    on the path.
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


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
