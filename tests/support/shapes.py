"""What may stand where a file or a folder belongs, in files that come from a stranger; and what must stay as it is."""

import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

GIANT = 5 << 30


class Outside:
    """Files and folders of a victim, named as those that a writer removes or writes over."""

    def __init__(self, folder):
        self.folder = folder / "outside"
        self.file = self.folder / "thesis.txt"
        names = ("thesis.txt", f"{12:020}.seg", f"{12:020}.safetensors", "LOCK", "HEAD", "MANIFEST.json", "1.tmp")
        for below in ("", f"{12:020}", f"{13:020}.compact.tmp", "0001.tmp/segments"):
            (self.folder / below).mkdir(parents=True)
            for name in (*names, "00000.arrow", "SNAPSHOT.json"):
                (self.folder / below / name).write_text(f"precious {name}")
        self._before = self._told()

    def _told(self):
        told = {}
        for path in (self.folder, *sorted(self.folder.rglob("*"))):
            found = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(found.st_mode) else None
            told[path] = (found.st_mode, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_uid, content)
        return told

    def assert_untouched(self):
        """Its names, contents and times are as they were."""
        assert self._told() == self._before


def _emptied(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)


def _link(path, target):
    _emptied(path)
    path.symlink_to(target)


def _pipe(path):
    _emptied(path)
    os.mkfifo(path)


def _socket(path):
    _emptied(path)
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{short}/s")  # a socket's path is short, and its file can be moved
        shutil.move(f"{short}/s", path)


def _device(path):
    _emptied(path)
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _folder(path):
    _emptied(path)
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").write_text("x")


def _file(path):
    _emptied(path)
    path.write_bytes(b"x")


def _empty(path):
    _emptied(path)
    path.touch()


def _hole(path):
    _emptied(path)
    path.touch()
    os.truncate(path, GIANT)


def _grown(path):
    if path.is_symlink() or not path.is_file():
        _hole(path)
    os.truncate(path, GIANT)


def _may_make_devices():
    with tempfile.TemporaryDirectory() as folder:
        try:
            _device(Path(folder) / "device")
        except PermissionError:
            return False
    return True


# By name: how it is made in place of what is at a path.
SHAPES = {
    "a link to a file": lambda path, outside: _link(path, outside.file),
    "a link to a folder": lambda path, outside: _link(path, outside.folder),
    "a link to its like": lambda path, outside: _link(path, outside.folder / path.name),
    "a link to itself": lambda path, outside: _link(path, path.name),
    "a link to nothing": lambda path, outside: _link(path, outside.folder / "nothing"),
    "a link up": lambda path, outside: _link(path, os.path.relpath(outside.file, path.parent)),
    "a link to a device": lambda path, outside: _link(path, "/dev/zero"),
    "a pipe": lambda path, outside: _pipe(path),
    "a socket": lambda path, outside: _socket(path),
    "a folder": lambda path, outside: _folder(path),
    "a file": lambda path, outside: _file(path),
    "an empty file": lambda path, outside: _empty(path),
    "a hole": lambda path, outside: _hole(path),
    "a file that ends with a hole": lambda path, outside: _grown(path),
    **({"a device": lambda path, outside: _device(path)} if _may_make_devices() else {}),
}
