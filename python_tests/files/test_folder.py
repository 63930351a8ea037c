"""Work below an open folder: links in the path are rejected, and errors name the whole path."""

import gc
import os
import re
from pathlib import Path

import pytest

from itm_fast.files import atomic, folder, regular
from itm_fast.files.folder import Folder

LINK = "is a symbolic link, which is not followed for writing; put the file or folder itself there"


@pytest.fixture(params=[True, False], ids=["handles", "paths"], autouse=True)
def handles(request, monkeypatch):
    """Run each test in both modes: with folder handles, and with paths as on Windows."""
    if not request.param:
        monkeypatch.setattr(folder, "_HANDLES", False)


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"mine")
    yield tmp_path / "outside"
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["file"]
    assert (tmp_path / "outside" / "file").read_bytes() == b"mine"


def refused(path, call):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {LINK}')}$"):
        call()


def test_a_file_is_written_through_no_link(tmp_path, outside):
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").symlink_to(outside / "file")
    (root / "new").symlink_to(outside / "other")
    for name in ("file", "new"):
        path = root / name
        refused(path, lambda path=path: atomic.write_bytes(path, b"x"))
        refused(path, lambda path=path: atomic.open_in_place(path, "ab"))
        refused(path, lambda path=path: atomic.open_in_place(path, "r+b"))
        refused(path, lambda path=path: atomic.check_target(path))
    assert sorted(path.name for path in root.iterdir()) == ["file", "new"]


def test_no_folder_below_the_root_may_be_a_link(tmp_path, outside):
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "a" / "b").symlink_to(outside)
    below = root / "a" / "b" / "file"
    refused(root / "a" / "b", lambda: atomic.write_bytes(below, b"x", root))
    refused(root / "a" / "b", lambda: atomic.open_in_place(below, "ab", root))
    refused(root / "a" / "b", lambda: atomic.open_folder(below / "c", root))
    refused(root / "a" / "b", lambda: atomic.remove_matching(below, root))
    refused(root / "a" / "b", lambda: atomic.check_entries(root, ["other", "a/b/file"]))


def test_the_way_to_the_root_may_lead_through_links(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    atomic.write_bytes(tmp_path / "root" / "a" / "b" / "file", b"x", tmp_path / "root")
    assert (tmp_path / "disk" / "a" / "b" / "file").read_bytes() == b"x"


def test_removing_a_link_keeps_its_target(tmp_path, outside):
    (tmp_path / "link").symlink_to(outside / "file")
    atomic.remove_matching(tmp_path / "lin*")
    assert not (tmp_path / "link").is_symlink()


def test_errors_name_the_whole_path(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=f"^{tmp_path}/file: expected a folder, found a file$"):
        Folder(tmp_path / "file" / "a", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none'$"):
        atomic.open_in_place(tmp_path / "none", "r+b")
    with pytest.raises(ValueError, match=f"^{tmp_path}/folder: expected a regular file, found a folder$"):
        atomic.open_in_place(tmp_path / "folder", "ab")
    with pytest.raises(IsADirectoryError, match=f"'{tmp_path}/folder'$"):
        atomic.write_bytes(tmp_path / "folder", b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_named_pipe_is_never_waited_for(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    message = f"^{path}: expected a regular file, found a named pipe$"
    for call in (regular.is_file, regular.open_file, regular.read_bytes):
        with pytest.raises(ValueError, match=message):
            call(path)
    for mode in ("ab", "r+b"):
        with pytest.raises(ValueError, match=message):
            atomic.open_in_place(path, mode)
    with pytest.raises(ValueError, match=message):
        atomic.check_entries(tmp_path, ["pipe"])


def test_a_file_that_becomes_a_pipe_between_check_and_opening_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setattr(regular, "is_file", lambda _path: True)
    monkeypatch.setattr(Folder, "status", lambda _folder, _name: None)
    with pytest.raises(ValueError, match=r"expected a regular file, found a named pipe$"):
        regular.open_file(path)
    with pytest.raises(ValueError, match=r"expected a regular file, found a named pipe$"), Folder(tmp_path) as opened:
        opened.open("pipe", os.O_RDWR)


def test_a_refusal_leaves_no_handle_open(tmp_path, outside):
    (tmp_path / "link").symlink_to(outside)
    os.mkfifo(tmp_path / "pipe")
    gc.collect()  # Handles of objects of other tests would close in between.
    before = set(Path("/proc/self/fd").iterdir())
    for name in ("link", "link/file", "outside/file/x", "pipe/x"):
        with pytest.raises(ValueError, match=r"expected|link"):
            atomic.write_bytes(tmp_path / name, b"x", tmp_path)
    for name in ("link", "pipe"):
        with pytest.raises(ValueError, match=r"expected|link"):
            atomic.open_in_place(tmp_path / name, "ab")
    assert set(Path("/proc/self/fd").iterdir()) <= before
