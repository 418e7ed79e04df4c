"""Files and directories that are there whole or not at all."""

from pathlib import Path

import pytest

from tinker_server.backends.files import write_aside


def test_a_file_and_a_directory_appear_once_they_are_written(tmp_path: Path) -> None:
    with write_aside(tmp_path / "new" / "file") as aside:
        aside.write_text("a")
        assert not (tmp_path / "new" / "file").exists()
    assert (tmp_path / "new" / "file").read_text() == "a"
    with write_aside(tmp_path / "directory") as aside:
        (aside / "inner").mkdir(parents=True)
        (aside / "inner" / "file").write_text("b")
    assert (tmp_path / "directory" / "inner" / "file").read_text() == "b"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "new"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_nothing_is_left_of_what_failed(tmp_path: Path, is_directory: bool) -> None:
    with pytest.raises(OSError, match="full"), write_aside(tmp_path / "name") as aside:
        if is_directory:
            aside.mkdir()
        else:
            aside.write_text("half")
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == []
