"""Fields of text files, read strictly: a bad one is an error that says file, line, what was wanted and what came."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class ReadError(ValueError):
    """A file is not what it was said to be."""


def lines(path: Path) -> Iterator[tuple[str, str]]:
    """Each line of a file, plain or gzipped, with its place for error messages."""
    number = 0
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        # Bytes that are not text become a field that the reader refuses, with its line.
        with (gzip.open if zipped else open)(path, "rt", encoding="utf-8", errors="replace") as file:
            for line in file:
                number += 1
                yield f"{path}, line {number}", line.rstrip("\r\n")
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}, after line {number}" if number else f"{path}"
        raise ReadError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse(where: str, name: str, text: str, convert: Callable[[str], T]) -> T:
    """`convert(text)`; a converter's docstring is what an error says was wanted."""
    try:
        return convert(text)
    except ValueError:
        raise ReadError(f"{where}: wanted {convert.__doc__} as {name}; got {text[:40]!r}") from None


def click(text: str) -> int:
    """0 or 1"""
    if text not in ("0", "1"):
        raise ValueError
    return int(text)


def integer(text: str) -> int:
    """an integer of 64 bits"""
    if not -(2**63) <= int(text) < 2**63:
        raise ValueError
    return int(text)


def count(text: str) -> int:
    """an integer or nothing"""
    return integer(text) if text else 0


def category(text: str) -> int | None:
    """a hexadecimal number of up to 15 digits or nothing"""
    if len(text) > 15:  # Criteo's have 8; 16 may not fit an int64
        raise ValueError
    return int(text, 16) if text else None


def rating(text: str) -> float:
    """a number from 0 to 5"""
    if not 0 <= float(text) <= 5:  # refuses nan too
        raise ValueError
    return float(text)
