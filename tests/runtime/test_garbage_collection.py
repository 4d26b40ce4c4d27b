"""When garbage is collected while a process starts."""

import gc
import importlib

import atomc
from atomc.runtime.processes.garbage_collection import frozen_imports


def test_imports_are_left_out_of_later_collections(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with frozen_imports():
        assert not frozen
    assert frozen == [False] and gc.isenabled()


def test_public_names_are_imported_without_collections(monkeypatch):
    enabled, imported = [], importlib.import_module

    def import_module(name):
        enabled.append(gc.isenabled())
        return imported(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert atomc.__getattr__("Options").__name__ == "Options"
    assert enabled == [False] and gc.isenabled()
