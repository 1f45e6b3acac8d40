"""Tiers: where a table's rows live, and how many bytes they may take there."""

from shoal.config.checked import value
from shoal.config.size import parse_size


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
