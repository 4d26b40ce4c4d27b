"""When garbage is collected while a process starts."""

import gc

from atomc.runtime.processes.garbage_collection import frozen_imports


def test_imports_are_left_out_of_later_collections(monkeypatch):
    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(gc.isenabled()))
    with frozen_imports():
        assert not frozen
    assert frozen == [False] and gc.isenabled()
