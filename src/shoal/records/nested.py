"""State dicts of modules and optimizers as a skeleton, which is JSON, and the tensors in it, by name.

In the skeleton a value is

    null, true, false, a string     itself
    a number                        an int of at most 2^53 or a finite float, which has a point or an exponent
    {"int": "-0x1f"}                another int
    {"float": "7ff0000000000000"}   infinity or NaN, by its bits
    [...]                           a list
    {"tuple": [...]}                a tuple
    {"dict": [[key, value], ...]}   a dict in its order; keys are strings and ints, as above
    {"ordered": [...], "metadata":} an OrderedDict; a module's versions, which torch hangs on it, if it has any
    {"counter": [...]}              a Counter, as some schedulers have
    {"tensor": name}                a tensor

What comes back is equal and of the same types. Everything else is refused: subclasses of these (numpy's numbers, named
tuples, torch.Size, Parameters), other keys, torch.dtype and torch.device, bytes, sets, objects.
"""

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor

from shoal.errors import StateDictError, StorageError
from shoal.records.excerpt import excerpt
from shoal.records.tensors import METADATA

_EXACT = 2**53
_DEEPEST = 64
_HEX = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_BITS = re.compile(r"[0-9a-f]{16}")
_DOUBLE = struct.Struct(">d")
_SURROGATE = re.compile("[\ud800-\udfff]")


def flatten(value: object, where: str) -> tuple[Any, dict[str, Tensor]]:
    """Returns the skeleton of `value` and its tensors. A name is the path to its tensor, such as `state.0.exp_avg`."""
    tensors: dict[str, Tensor] = {}
    return _Flattening(tensors, where).skeleton(value, (), 0), tensors


def unflatten(skeleton: object, tensors: Mapping[str, Tensor], where: str) -> Any:
    """Returns what `flatten` was given. Every tensor must have exactly one place in the skeleton."""
    building = _Building(tensors, where)
    value = building.value(skeleton, 0)
    unused = [name for name in tensors if name not in building.used]
    if unused:
        raise StorageError(f"[{where}] wanted a place for every tensor; got none for {unused[0]!r}. Is it damaged?")
    return value


class _Flattening:
    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        self._tensors = tensors
        self._where = where

    def skeleton(self, value: Any, path: tuple[str, ...], depth: int) -> Any:
        if depth > _DEEPEST:
            self._refuse(f"wanted at most {_DEEPEST} levels; got more, or a circle", path)
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is str:
            if _SURROGATE.search(value):
                self._refuse(f"wanted a str that has UTF-8; got {value!r}", path)
            return value
        if kind is int:
            return value if abs(value) <= _EXACT else {"int": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"float": _DOUBLE.pack(value).hex()}
        if kind is Tensor:
            return {"tensor": self._name(value, path)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"tuple": self._items(value, path, depth)}
        if kind is dict:
            return {"dict": self._pairs(value, path, depth)}
        if kind is Counter:
            return {"counter": self._pairs(value, path, depth)}
        if kind is OrderedDict:
            return self._ordered(value, path, depth)
        self._refuse(
            "wanted a dict, OrderedDict, list, tuple, tensor, int, float, str, bool or None; got "
            f"{_name_of(kind)}: {excerpt(value)}. Convert it, with float(), tuple() or detach() say",
            path,
        )

    def _items(self, values: list[Any] | tuple[Any, ...], path: tuple[str, ...], depth: int) -> list[Any]:
        return [self.skeleton(value, (*path, str(i)), depth + 1) for i, value in enumerate(values)]

    def _pairs(self, values: dict[Any, Any], path: tuple[str, ...], depth: int) -> list[Any]:
        pairs = []
        for key, value in values.items():
            if type(key) is not str and type(key) is not int:
                self._refuse(f"wanted keys that are str or int; got {excerpt(key)} of type {_name_of(type(key))}", path)
            pairs.append([self.skeleton(key, path, depth), self.skeleton(value, (*path, _step(key)), depth + 1)])
        return pairs

    def _ordered(self, values: Any, path: tuple[str, ...], depth: int) -> dict[str, Any]:
        skeleton: dict[str, Any] = {"ordered": self._pairs(values, path, depth)}
        attributes = dict(vars(values))
        if "_metadata" in attributes:
            skeleton["metadata"] = self.skeleton(attributes.pop("_metadata"), (*path, "_metadata"), depth + 1)
        if attributes:
            self._refuse(f"wanted an OrderedDict without attributes; got {sorted(attributes)}", path)
        return skeleton

    def _name(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.requires_grad:
            self._refuse("wanted a tensor without gradient; got one that requires it. Detach it", path)
        name = wanted = ".".join(path) or "tensor"
        # {"a.b": x} and {"a": {"b": y}} are different paths with one name.
        count = 1
        while name in self._tensors or name == METADATA:
            count += 1
            name = f"{wanted}#{count}"
        self._tensors[name] = tensor
        return name

    def _refuse(self, what: str, path: tuple[str, ...]) -> NoReturn:
        at = f" at {'.'.join(path)!r}" if path else ""
        raise StateDictError(f"[{self._where}]{at}: {what}.")


class _Building:
    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.used: set[str] = set()
        self._tensors = tensors
        self._where = where
        self._makers = {
            ("int",): self._int,
            ("float",): self._float,
            ("tuple",): self._tuple,
            ("dict",): self._dict,
            ("counter",): self._counter,
            ("ordered",): self._ordered,
            ("metadata", "ordered"): self._ordered,
            ("tensor",): self._tensor,
        }

    def value(self, skeleton: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise self._damaged(f"at most {_DEEPEST} levels", "more")
        if skeleton is None or isinstance(skeleton, str | bool):
            return skeleton
        if isinstance(skeleton, int):
            return self._plain_int(skeleton)
        if isinstance(skeleton, float) and math.isfinite(skeleton):
            return skeleton
        if isinstance(skeleton, list):
            return [self.value(item, depth + 1) for item in skeleton]
        if isinstance(skeleton, dict):
            maker = self._makers.get(tuple(sorted(skeleton)))
            if maker is not None:
                return maker(skeleton, depth)
        raise self._damaged("a value of a state dict", skeleton)

    def _plain_int(self, given: int) -> int:
        if abs(given) > _EXACT:
            raise self._damaged("an int of at most 2^53", "a larger one")
        return given

    def _int(self, skeleton: dict[str, Any], _: int) -> int:
        text = skeleton["int"]
        # Hexadecimal takes time in proportion to its digits; decimal takes their square.
        if not isinstance(text, str) or not _HEX.fullmatch(text) or abs(number := int(text, 16)) <= _EXACT:
            raise self._damaged("an int beyond 2^53 in hexadecimal", text)
        return number

    def _float(self, skeleton: dict[str, Any], _: int) -> float:
        bits = skeleton["float"]
        if isinstance(bits, str) and _BITS.fullmatch(bits):
            (number,) = _DOUBLE.unpack(bytes.fromhex(bits))
            if not math.isfinite(number):
                return float(number)
        raise self._damaged("the bits of infinity or NaN", bits)

    def _tuple(self, skeleton: dict[str, Any], depth: int) -> tuple[Any, ...]:
        if not isinstance(skeleton["tuple"], list):
            raise self._damaged("a list in a tuple", skeleton["tuple"])
        return tuple(self.value(item, depth + 1) for item in skeleton["tuple"])

    def _dict(self, skeleton: dict[str, Any], depth: int) -> dict[Any, Any]:
        return self._fill({}, skeleton["dict"], depth)

    def _counter(self, skeleton: dict[str, Any], depth: int) -> dict[Any, Any]:
        return self._fill(Counter(), skeleton["counter"], depth)

    def _ordered(self, skeleton: dict[str, Any], depth: int) -> dict[Any, Any]:
        ordered = self._fill(OrderedDict(), skeleton["ordered"], depth)
        if "metadata" in skeleton:
            ordered._metadata = self.value(skeleton["metadata"], depth + 1)  # type: ignore[attr-defined]
        return ordered

    def _fill(self, filled: dict[Any, Any], pairs: Any, depth: int) -> dict[Any, Any]:
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            raise self._damaged("a list of keys and values", pairs)
        for given, value in pairs:
            key = self.value(given, depth) if not isinstance(given, dict) or "int" in given else given
            if type(key) is not str and type(key) is not int:
                raise self._damaged("a key that is a str or an int", given)
            if key in filled:
                raise self._damaged("every key once", f"{excerpt(key)} again")
            filled[key] = self.value(value, depth + 1)
        return filled

    def _tensor(self, skeleton: dict[str, Any], _: int) -> Tensor:
        name = skeleton["tensor"]
        if not isinstance(name, str) or name not in self._tensors:
            raise self._damaged("the name of a tensor that is there", name)
        if name in self.used:
            raise self._damaged("every tensor once", f"{excerpt(name)} again")
        self.used.add(name)
        return self._tensors[name]

    def _damaged(self, wanted: str, came: object) -> StorageError:
        return StorageError(f"[{self._where}] wanted {wanted}; got {excerpt(came)}. Is it damaged?")


def _step(key: str | int) -> str:
    # Python prints no int of thousands of decimal digits.
    return hex(key) if isinstance(key, int) and abs(key) > _EXACT else str(key)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
