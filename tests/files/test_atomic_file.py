"""Files that are replaced as a whole (atomc/atomic_file.py)."""

import os
import stat

import pytest

from atomc.files.atomic_file import write_atomically


def test_a_file_gets_the_new_content_and_the_given_permissions(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"old")
    write_atomically(file, b"new", mode=0o600)
    assert file.read_bytes() == b"new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_the_old_content_and_no_other_file(tmp_path, monkeypatch, error):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def fails(source, target):
        raise error

    monkeypatch.setattr("pathlib.Path.replace", fails)
    with pytest.raises(error):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
