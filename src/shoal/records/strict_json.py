"""JSON with one meaning only: UTF-8, no name twice in an object, no NaN, no infinity, no half of a surrogate pair."""

import json
import math
from collections import Counter
from typing import Any, NoReturn

from shoal.errors import InputError, StorageError

Buffer = bytes | bytearray | memoryview
# Code that prints or writes a value again may be deeper in calls than the code that read it.
_MOST_DEPTH = 256


def encode(value: object, where: str) -> bytes:
    """Returns `value` as JSON without spaces."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        encoded = text.encode()
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: NaN, a lone surrogate, a circle
        raise InputError(f"[{where}] wanted what JSON can hold; got a value with: {error}.") from None
    _require_names(value, where)
    return encoded


def parse(data: Buffer, where: str) -> Any:
    """Returns the value of the JSON in `data`. Raises StorageError where it could have another meaning, too, or where
    objects and lists are more than 256 deep in each other."""
    raw = bytes(data)
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
        # Only an escape can bring half of a surrogate pair, which has no UTF-8.
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        _require_shallow(value, raw)
    except RecursionError:
        raise StorageError(f"[{where}] wanted JSON; got some that is nested too deeply. Is it damaged?") from None
    except ValueError as error:  # of json, of int's limit on digits, of UTF-8, of the functions below
        raise StorageError(f"[{where}] wanted JSON; got {len(raw)} bytes with: {error}. Is it damaged?") from None
    return value


def _require_names(value: object, where: str) -> None:
    """Raises InputError where a name is no str: json.dumps would make one name of 1 and "1". REQUIRES: no circles."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            for name in item:
                if not isinstance(name, str):
                    raise InputError(f"[{where}] wanted a str for every name in a JSON object; got {name!r}.")
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            waiting.extend(item)


def _require_shallow(value: object, raw: bytes) -> None:
    if raw.count(b"[") + raw.count(b"{") <= _MOST_DEPTH:
        return
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > _MOST_DEPTH + 1:
            raise RecursionError
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(one for one in item.values() if isinstance(one, (dict, list)))
            elif isinstance(item, list):
                inner.extend(one for one in item if isinstance(one, (dict, list)))
        level = inner


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the name {twice[:64]!r} more than once in an object")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no JSON")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:32]}, which no float holds")
    return number
