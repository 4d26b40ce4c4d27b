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


def test_a_pipe_gets_the_content_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # waits for no writer
    try:
        write_atomically(pipe, b"content")
        assert pipe.is_fifo() and os.read(reader, 100) == b"content"
    finally:
        os.close(reader)
    assert [*tmp_path.iterdir()] == [pipe]


def test_a_folder_is_not_replaced(tmp_path):
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path, b"content")
