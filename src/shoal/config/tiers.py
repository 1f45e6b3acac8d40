"""Tiers: where a table's rows live, and how many bytes they may take there."""

import os
from collections.abc import Callable
from typing import Any, TypeAlias

from shoal.config.checked import settle, value
from shoal.config.size import parse_size
from shoal.errors import ConfigError


@value
class Hbm:
    """Device memory.

    size: the most bytes that a table's rows and index may take, as an int or a str such as "8GiB"; None is no limit but
        the device's.
    """

    size: int | str | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_size(self.size, "Hbm")

    @property
    def bytes(self) -> int | None:
        """The limit in bytes, or None."""
        return None if self.size is None else parse_size(self.size)


@value
class Dram:
    """Host memory.

    size: the most bytes that rows and their index may take, as an int or a str such as "8GiB"; None is no limit but the
        machine's.
    """

    size: int | str | None = None

    def __post_init__(self) -> None:
        if self.size is not None:
            parse_size(self.size, "Dram")

    @property
    def bytes(self) -> int | None:
        """The limit in bytes, or None."""
        return None if self.size is None else parse_size(self.size)


@value
class Ssd:
    """Files on a disk, below memory.

    path: a folder for them, made if it is not there; each table has a folder of its own in it, and nothing else may use
        that. They hold nothing once the process is gone: what must survive it is saved.
    size: the most bytes that the files may take, as an int or a str such as "256GiB"; rows fill half of it.
    """

    path: str
    size: int | str

    def __init__(self, path: str | os.PathLike[str], size: int | str) -> None:
        folder = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if not isinstance(folder, str) or not folder or "\0" in folder:  # which would end it for the system
            raise ConfigError(f"[Ssd] path: wanted the path of a folder, a str without NUL; got {path!r}.")
        parse_size(size, "Ssd")
        settle(self, path=folder, size=size)

    @property
    def bytes(self) -> int:
        """The limit in bytes."""
        return parse_size(self.size)


# A storage of the user's own as the lowest tier: what makes it, such as its class, called with the bytes of a row.
MakeStorage: TypeAlias = Callable[[int], Any]
Tier: TypeAlias = Hbm | Dram | Ssd | MakeStorage
