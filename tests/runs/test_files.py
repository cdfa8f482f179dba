"""A reader sees the old file or the new one, never half of it."""

import os

import pytest

from dslib.runs.files import remove_leftovers, replacing, write_atomic


def test_a_new_file_is_an_ordinary_one_and_its_directory_is_made(tmp_path):
    file = tmp_path / "deep" / "file.txt"
    before = os.umask(0o027)
    try:
        write_atomic(file, "−1")
    finally:
        os.umask(before)
    assert file.read_bytes() == "−1".encode()
    assert file.stat().st_mode & 0o777 == 0o640, "what the umask leaves, not what mkstemp gives"


def test_a_writer_that_wants_a_path_writes_beside_the_file_under_the_same_ending(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("old")
    with replacing(file) as temporary:
        assert (temporary.parent, temporary.suffix) == (file.parent, file.suffix)
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_interrupted_writer_changes_nothing_and_leaves_nothing(tmp_path, error):
    file = tmp_path / "file"
    file.write_text("old")

    def write_half():
        with replacing(file) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path):
    file = tmp_path / "file"
    file.write_text("kept")
    unfinished = replacing(file)
    unfinished.__enter__().write_text("half")
    assert len(list(tmp_path.iterdir())) == 2
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [file]
