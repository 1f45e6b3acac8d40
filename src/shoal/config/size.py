"""Sizes in bytes, as people write them."""

import re
from fractions import Fraction
from typing import Any

from shoal.config.checked import integer
from shoal.errors import ConfigError

MAX_BYTES = 2**63 - 1
_LETTERS = "KMGTP"
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}B".lower(): 1000**power for power, letter in enumerate(_LETTERS, 1)},
    **{f"{letter}iB".lower(): 1024**power for power, letter in enumerate(_LETTERS, 1)},
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(size: int | str, where: str = "parse_size") -> int:
    """Bytes in `size`: an int, or a str such as "8GiB", "1.5 GB" or "4096"; a fraction of a byte is cut off.

    KB, MB, GB, TB and PB are powers of 1000; KiB, MiB, GiB, TiB and PiB powers of 1024; case does not matter.
    `where` is what an error names.
    """
    given: Any = size
    if not isinstance(given, str):
        return integer(where, "size", given, low=1, high=MAX_BYTES)
    match = _PATTERN.fullmatch(given)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"[{where}] size: wanted a positive number and a unit, such as '512MiB', '8GiB' or '2GB'; got {given!r}. "
            "Units are B, KB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of 1024)."
        )
    # Fraction, because 0.1 GiB and sizes above 2**53 are not exact in binary floating point.
    bytes_ = int(Fraction(match[1]) * unit)
    if not 1 <= bytes_ <= MAX_BYTES:
        raise ConfigError(f"[{where}] size: wanted from 1 to {MAX_BYTES} bytes; got {given!r}.")
    return bytes_


def format_size(size: int) -> str:
    """`size` bytes for a reader: the largest binary unit that fits, with at most two decimals."""
    unit, power = "B", 0
    # Rounding first keeps 1 MiB - 1 from being shown as 1024KiB.
    while power < len(_LETTERS) and round(size / 1024**power, 2) >= 1024:
        unit, power = f"{_LETTERS[power]}iB", power + 1
    return f"{size / 1024**power:.2f}".rstrip("0").rstrip(".") + unit
