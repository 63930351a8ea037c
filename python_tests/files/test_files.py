"""Files are written completely or not at all."""

import os
import stat

import pytest

from itm_fast.files.atomic import atomic_file, check_target, remove_temporaries, write_bytes, write_text


def test_a_file_is_replaced_in_one_step_with_the_usual_permissions(tmp_path):
    path = tmp_path / "new" / "file.json"
    write_text(path, "é\r\n")
    assert path.read_bytes() == b"\xc3\xa9\r\n"
    with atomic_file(path) as file:
        file.write(b"other")
        assert path.read_bytes() == b"\xc3\xa9\r\n"
    assert path.read_bytes() == b"other"
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert [entry.name for entry in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_the_old_file_is_there_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    write_bytes(path, b"old")
    with pytest.raises(error):
        _fail_half_way(path, error)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def _fail_half_way(path, error):
    with atomic_file(path) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize(
    "reason", ["Not enough free space to write 9 bytes after offset 8", "9 requested and 4 written"]
)
def test_a_disk_that_numpy_finds_full_is_named(tmp_path, reason):
    path = tmp_path / "file.npy"
    with pytest.raises(OSError, match=f"^{path}: cannot be written: {reason}$"), atomic_file(path):
        raise OSError(reason)
    assert not path.exists()


def test_a_target_that_cannot_be_written_is_found_before(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    check_target(tmp_path / "file")
    check_target(tmp_path / "new" / "folder" / "file.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ValueError, match=f"^{tmp_path}: expected a file to write, found a folder$"):
        check_target(tmp_path)
    with pytest.raises(ValueError, match=f"^{tmp_path}/file/a/b: expected a folder at {tmp_path}/file, found a file$"):
        check_target(tmp_path / "file" / "a" / "b")
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(ValueError, match=f"^{tmp_path}/a/b: the folder {tmp_path} is not writable$"):
        check_target(tmp_path / "a" / "b")


def test_content_is_on_disk_before_the_name_changes(tmp_path, monkeypatch):
    """The temporary file is flushed, then renamed, and then the folder is flushed."""
    path = tmp_path / "file"
    write_bytes(path, b"old")
    events = []
    flush = os.fsync

    def recording(handle):
        folder = stat.S_ISDIR(os.fstat(handle).st_mode)
        size = None if folder else os.fstat(handle).st_size
        events.append(("folder" if folder else "file", size, path.read_bytes()))
        flush(handle)

    monkeypatch.setattr(os, "fsync", recording)
    write_bytes(path, b"newer")
    expected = [("file", 5, b"old"), ("folder", None, b"newer")]
    assert events == (expected if os.name == "posix" else expected[:1])


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    """Only the temporary file of a killed writer is removed. Files with similar names stay."""
    kept = [tmp_path / name for name in (".state.notes.tmp.pt", ".other.abcdefgh.tmp.pt", "state.pt")]
    for path in kept:
        path.write_bytes(b"mine")
    with atomic_file(tmp_path / "state.pt"):
        (temporary,) = set(tmp_path.iterdir()) - set(kept)
        os.link(temporary, tmp_path / "other")
    (tmp_path / "other").rename(temporary)
    assert len(list(tmp_path.iterdir())) == 4
    remove_temporaries(tmp_path / "state.pt")
    assert sorted(tmp_path.iterdir()) == sorted(kept)
