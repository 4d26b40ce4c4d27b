"""Folders of caches that other users may have written: no code is loaded from them."""

import logging
import os
import pickle
from pathlib import Path

import pytest
import torch

from atomc import kernels
from atomc.torch_compat.inductor import from_code, inductor_code
from atomc.trusted_folder import trusted_folder, untrusted

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no users here")
STRANGER = 4242
# Inductor builds nothing beside the graph.
QUICK = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}


@pytest.fixture
def of_stranger(monkeypatch):
    """Lets a path that exists belong to another user, or to one with this number."""
    owners, lstat = {}, os.lstat

    def owned(stat):
        def with_owner(*args, **more):
            found = stat(*args, **more)
            owner = owners.get((found.st_dev, found.st_ino))
            return found if owner is None else os.stat_result((*found[:4], owner, *found[5:]))

        return with_owner

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, owned(getattr(os, name)))

    def belongs(path, user=STRANGER):
        found = lstat(path)
        owners[found.st_dev, found.st_ino] = user

    return belongs


@pytest.fixture
def ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOMC_CACHE_DIR", str(tmp_path / "ours"))
    return tmp_path / "ours"


def test_what_others_may_write_is_not_trusted(tmp_path, of_stranger):
    folder, file, link = tmp_path / "folder", tmp_path / "file", tmp_path / "link"
    folder.mkdir(mode=0o700)
    file.write_text("")
    link.symlink_to(folder)
    assert [untrusted(path) for path in (folder, file, link, tmp_path / "none")] == [None] * 4
    folder.chmod(0o777)
    assert untrusted(folder) == f"{folder} may be written by other users"
    assert untrusted(link) == f"{link} may be written by other users"
    folder.chmod(0o755)
    of_stranger(link)
    assert untrusted(link) == f"{link} belongs to another user"
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    assert untrusted(link) == f"{link} belongs to another user"
    of_stranger(link, os.getuid())
    assert untrusted(link) is None
    link.unlink()
    link.symlink_to(folder)
    of_stranger(folder)
    assert untrusted(folder) == f"{folder} belongs to another user"
    assert untrusted(link) == f"{link} is a link to what belongs to another user"
    of_stranger(folder, 0)  # root may write everything
    assert untrusted(folder) is None


@pytest.mark.parametrize(
    ("user", "group", "members", "trusted"),
    [
        ("me", "me", [], True),
        ("root", "root", [], False),
        ("of another group", "of another group", [], False),
        ("me", "me", ["me"], True),
        ("me", "me", ["me", "you"], False),
        ("me", "users", [], False),
        (None, "me", [], False),
    ],
)
def test_the_group_of_one_user_is_nobody_else(tmp_path, monkeypatch, user, group, members, trusted):
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o775)
    number = folder.stat().st_gid

    def user_of(uid):
        if user is None:
            raise KeyError(uid)
        first = number + (user == "of another group")
        return pwd.struct_passwd((user, "", 0 if user == "root" else 4000, first, "", "", ""))

    monkeypatch.setattr(pwd, "getpwuid", user_of)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((group, "", gid, members)))
    assert (untrusted(folder) is None) == trusted
    folder.chmod(0o777)
    assert untrusted(folder) is not None


def test_ours_replaces_a_folder_of_others(tmp_path, of_stranger, ours, caplog):
    folder = tmp_path / "cache"
    assert trusted_folder(folder, "name") == folder and folder.stat().st_mode & 0o777 == 0o700
    of_stranger(folder)
    assert not ours.exists()
    with caplog.at_level(logging.WARNING, "atomc"):
        assert trusted_folder(folder, "name") == ours / "name"
    assert f"{folder} belongs to another user; the cache is {ours}/name" in caplog.text
    assert {path.stat().st_mode & 0o777 for path in (ours, ours / "name")} == {0o700}
    of_stranger(ours)
    with pytest.raises(PermissionError, match="set ATOMC_CACHE_DIR to a folder that only you may"):
        trusted_folder(folder, "name")


@pytest.fixture
def folders_of_inductor(tmp_path, monkeypatch):
    """(default, header folder, that of the variable), for the time of a test."""
    from torch._inductor import codecache
    from torch._inductor.runtime import cache_dir_utils, runtime_utils

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    default = str(tmp_path / "default")
    for module in (cache_dir_utils, runtime_utils, codecache):
        monkeypatch.setattr(module, "default_cache_dir", lambda: default)
    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, str(tmp_path / "default" / name))
    return lambda: tuple(
        map(
            Path,
            (runtime_utils.default_cache_dir(), codecache._HEADER_DIR, cache_dir_utils.cache_dir()),
        )
    )


planted_ran = []


class Planted:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return run_planted, ()


def run_planted():
    planted_ran.append(True)
    raise ValueError("this is no graph")


def pickles(folder):
    """The pickled graphs of Inductor's caches."""
    return [
        path
        for name in ("fxgraph", "aotautograd")
        for path in (folder / name).rglob("*")
        if path.is_file()
    ]


@pytest.mark.parametrize("variable", [True, False])
def test_inductor_unpickles_nothing_of_others(
    tmp_path, of_stranger, ours, folders_of_inductor, monkeypatch, variable
):
    folder = tmp_path / ("chosen" if variable else "default")
    if variable:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    x = torch.ones(3)

    def compiled():
        torch._dynamo.reset()
        function = torch.compile(lambda x: x.sin() + 1, backend="atom", options={"disable": True})
        torch.testing.assert_close(function(x), x.sin() + 1)

    with torch._inductor.config.patch(QUICK):
        compiled()
        assert folders_of_inductor()[2] == folder
        for path in pickles(folder):
            path.write_bytes(pickle.dumps(Planted()))
        compiled()
        assert planted_ran, "Inductor did not read what was planted: the test shows nothing"
        planted_ran.clear()
        before = set(folder.rglob("*"))
        of_stranger(folder)
        compiled()
    assert not planted_ran and set(folder.rglob("*")) == before
    assert pickles(ours / "inductor")
    default, headers, chosen = folders_of_inductor()
    assert chosen == ours / "inductor"
    assert default == (tmp_path / "default" if variable else ours / "inductor")
    assert headers.is_relative_to(default)


def test_each_way_into_inductor_checks_its_folders(
    tmp_path, of_stranger, ours, folders_of_inductor, monkeypatch
):
    (tmp_path / "default").mkdir()
    of_stranger(tmp_path / "default")
    x = torch.ones(3)
    gm = torch.fx.symbolic_trace(lambda x: (x.cos() + 1,))
    _, code = inductor_code(gm, [x], QUICK)
    assert folders_of_inductor()[2] == ours / "inductor"
    (tmp_path / "chosen").mkdir()
    of_stranger(tmp_path / "chosen")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    (out,) = from_code(code, True, QUICK)(x)
    torch.testing.assert_close(out, x.cos() + 1)
    assert folders_of_inductor()[2] == ours / "inductor"
    assert not [*(tmp_path / "default").iterdir(), *(tmp_path / "chosen").iterdir()]


def test_triton_loads_nothing_of_others(tmp_path, of_stranger, ours, monkeypatch):
    triton = pytest.importorskip("triton")
    folder = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    kernels.load.__wrapped__("triton")
    assert triton.knobs.cache.dir == str(folder)
    of_stranger(folder)
    kernels.load.__wrapped__("triton")
    assert triton.knobs.cache.dir == str(ours / "triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    kernels.load_module.cache_clear()
    kernels.load_module("atomc.kernels.triton.inverse_transform")  # all that a warm start imports
    assert triton.knobs.cache.dir == str(ours / "triton")
