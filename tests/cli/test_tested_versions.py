"""Versions of torch, Triton and transformers that are not tested are named, once, at first use."""

import logging

import pytest
import torch

from atomc import tested_versions
from atomc.cli import main
from atomc.tested_versions import is_tested, warn_of_untested


@pytest.mark.parametrize(
    ("name", "version", "tested"),
    [
        ("torch", "2.11.0", True),
        ("torch", "2.13.0+cpu", True),
        ("torch", "2.12.1", False),
        ("torch", "2.1.0", False),
        ("triton", "3.6.0", True),
        ("transformers", "5.17.1", True),
        ("transformers", "6.0.0", False),
    ],
)
def test_a_version_is_tested_only_in_the_series_named(name, version, tested):
    assert is_tested(name, version) is tested


@pytest.fixture
def foreign(monkeypatch):
    """Two of three libraries have another version."""
    versions = {"torch": "2.13.0", "triton": "9.1.0", "transformers": "6.0.0"}
    monkeypatch.setattr(tested_versions, "installed", lambda: versions)
    warn_of_untested.cache_clear()
    yield
    warn_of_untested.cache_clear()


def lines(caplog):
    return [record.message for record in caplog.records if "not tested" in record.message]


def test_each_command_and_each_compile_says_so_once(foreign, caplog, capsys):
    with caplog.at_level(logging.WARNING, "atomc"):
        torch.compile(lambda x: x * 2, backend="atom", options={"glue": "eager"})(torch.ones(3))
        for _ in range(2):
            assert main(["diff", "no-such-file", "nor-this"]) == 2
    (line,) = lines(caplog)
    assert line.startswith("atomc is not tested with triton 9.1.0 (tested: ")
    assert "; transformers 6.0.0 (tested: 5.17, " in line and "torch" not in line


def test_tested_versions_are_no_news(caplog):
    warn_of_untested.cache_clear()
    warn_of_untested()
    assert lines(caplog) == []
