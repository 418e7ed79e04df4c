"""A disk whose power fails: of what was written, it has what was synced, under the names that were synced."""

import os
import stat
from pathlib import Path


class Disk:
    """Follows the fsyncs of this process below a directory. To be put in the place of `os.fsync`."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._contents: dict[int, bytes] = {}
        """By inode."""
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        """By a directory's inode, the inodes in it by their names, and whether they are directories."""
        self._kept: list[int] = []
        """Open, so that no inode is used again."""

    def sync(self, handle: int) -> None:
        """Record a file or directory as synced: the disk has it from now on."""
        found = os.fstat(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if not path.is_relative_to(self._root):
            return
        self._kept.append(os.dup(handle))
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(path) as entries:
                self._names[found.st_ino] = {one.name: (one.inode(), one.is_dir()) for one in entries}
        else:
            self._contents[found.st_ino] = path.read_bytes()

    def left(self, target: Path) -> None:
        """Make `target` what a power loss leaves of the directory."""
        self._leave(self._root.stat().st_ino, target)

    def _leave(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, (inside, is_directory) in self._names.get(inode, {}).items():
            if is_directory:
                self._leave(inside, target / name)
            else:
                (target / name).write_bytes(self._contents.get(inside, b""))

    def close(self) -> None:
        for handle in self._kept:
            os.close(handle)
