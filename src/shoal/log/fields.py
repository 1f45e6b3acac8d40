"""Values of JSON that came from a file: each is what it must be, or an error says where it is not."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from shoal.errors import CheckpointError, StorageError
from shoal.records.excerpt import excerpt

T = TypeVar("T")
_MOST = 2**63 - 1
_REQUIRED = "required"  # names the fields that must be known to read the rest


class Fields:
    """The fields of one JSON object. `where` begins the errors."""

    def __init__(self, where: str, value: Any) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise StorageError(f"[{where}] wanted an object; got {type(value).__name__}. The file is damaged.")
        self.value: dict[str, Any] = value

    def _wrong(self, name: str, wanted: str) -> StorageError:
        got = repr(self.value[name])[:100] if name in self.value else "nothing"
        return StorageError(f"[{self.where}] {name}: wanted {wanted}; got {got}. The file is damaged.")

    def integer(self, name: str, low: int = 0, high: int = _MOST) -> int:
        """A whole number."""
        value = self.value.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str) -> float | None:
        """A number, or None."""
        value = self.value.get(name)
        if value is None:
            return None
        if not is_number(value):
            raise self._wrong(name, "a number")
        return float(value)

    def text(self, name: str) -> str:
        """A str."""
        value = self.value.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def digits(self, name: str, count: int) -> str:
        """So many hexadecimal digits."""
        value = self.value.get(name)
        if not isinstance(value, str) or len(value) != count or not set(value) <= set("0123456789abcdef"):
            raise self._wrong(name, f"{count} hexadecimal digits")
        return value

    def flag(self, name: str) -> bool:
        """True or False."""
        value = self.value.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def object(self, name: str) -> "Fields":
        """An object."""
        return Fields(f"{self.where}, {name}", self.value.get(name))

    def items(self, name: str, read: Callable[[str, Any], T]) -> list[T]:
        """A list, each item of which `read(where, item)` reads."""
        value = self.value.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [read(f"{self.where}, {name} {at}", item) for at, item in enumerate(value)]

    def others(self, known: Iterable[str]) -> dict[str, Any]:
        """Returns the fields that are not known, which are kept. Raises CheckpointError where one of them must be
        known."""
        others = {name: one for name, one in self.value.items() if name not in known}
        names = self.items(_REQUIRED, text) if _REQUIRED in self.value else []
        if unknown := [name for name in names if name not in known and name != _REQUIRED]:
            raise CheckpointError(
                f"[{self.where}] this needs a newer Shoal, which knows {', '.join(map(excerpt, unknown[:8]))}. Install "
                f"one; nothing of the log was changed."
            )
        return others


def is_number(value: Any) -> bool:
    """Returns whether a value is a number that a float can hold: integers of JSON have any size."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)


def text(where: str, value: Any) -> str:
    """An item that is a str."""
    if not isinstance(value, str):
        raise StorageError(f"[{where}] wanted a string; got {value!r:.100}. The file is damaged.")
    return value


def whole(where: str, value: Any) -> int:
    """An item that is a whole number, not negative."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST:
        raise StorageError(f"[{where}] wanted an integer; got {value!r:.100}. The file is damaged.")
    return value
