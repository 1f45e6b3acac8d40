"""How a setting is declared and checked, so that every class of this folder refuses the same mistakes alike."""

import ctypes
import difflib
import functools
import inspect
import math
import numbers
import operator
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from shoal.errors import ConfigError

T = TypeVar("T")

FLOAT32_MAX = 3.4028234663852886e38
INT32_MAX = 2**31 - 1


@dataclass_transform(frozen_default=True)
def value(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose constructor answers wrong arguments with ConfigError.

    A class that takes more types than it stores writes its own `__init__`, and the dataclass keeps it.
    """
    return checked_arguments(dataclass(frozen=True, init="__init__" not in cls.__dict__)(cls))


def checked_arguments(cls: type[T]) -> type[T]:
    """Let the constructor of `cls` answer unknown and missing arguments with ConfigError."""
    construct: Callable[..., None] = cls.__init__
    signature = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise ConfigError(_wrong_call(cls.__name__, signature, kwargs, error)) from None
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


def _wrong_call(where: str, signature: inspect.Signature, given: dict[str, Any], error: TypeError) -> str:
    accepted = [parameter for name, parameter in signature.parameters.items() if name != "self"]
    names = [parameter.name for parameter in accepted]
    unknown = [name for name in given if name not in names]
    positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in accepted)
    shown = [*names[:positional], *(["*"] if positional < len(names) else []), *names[positional:]]
    wanted = f"[{where}] wanted {where}({', '.join(shown)}); got"
    if not unknown:
        return f"{wanted} a call with {error}."
    close = difflib.get_close_matches(unknown[0], names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{wanted} the unknown {', '.join(map(repr, unknown))}.{hint}"


def settle(instance: object, **values: object) -> None:
    """Store normalised values in a frozen instance, during its construction only."""
    for name, checked in values.items():
        object.__setattr__(instance, name, checked)


def number(
    where: str, name: str, given: object, *, low: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """`given` as a float that is finite in float32 too, `>= low`, `> above` and `< below`."""
    limits = ((">=", low if low > above else math.inf), (">", above if above >= low else math.inf), ("<", below))
    bounds = [f"{sign} {limit:g}" for sign, limit in limits if not math.isinf(limit)]
    wanted = " ".join(["a finite float32 number", " and ".join(bounds)]).strip()
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise ConfigError(f"[{where}] {name}: wanted {wanted}; got {given!r} of type {type(given).__name__}.")
    try:
        result = float(given)
    except OverflowError:  # an int beyond float64
        result = math.inf
    # NaN fails the first comparison.
    # The kernels read it as a float32, where 0.99999999 is 1.
    rounded = ctypes.c_float(result).value
    if not (abs(result) <= FLOAT32_MAX and result >= low and result > above and rounded < below):
        raise ConfigError(f"[{where}] {name}: wanted {wanted}; got {given!r}.")
    return result


def integer(where: str, name: str, given: Any, *, low: int, high: int = INT32_MAX) -> int:
    """`given` as an int in [low, high]; numpy's integers are taken, bool and float are not."""
    wanted = f"an integer from {low} to {high}"
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise ConfigError(f"[{where}] {name}: wanted {wanted}; got {given!r} of type {type(given).__name__}.")
    try:
        result = operator.index(given)
    except TypeError:  # an array with more than one element, say
        raise ConfigError(f"[{where}] {name}: wanted {wanted}; got {given!r}.") from None
    if not low <= result <= high:
        raise ConfigError(f"[{where}] {name}: wanted {wanted}; got {result}.")
    return result


def flag(where: str, name: str, given: object) -> bool:
    """`given` as it is, if it is True or False."""
    if not isinstance(given, bool):
        raise ConfigError(f"[{where}] {name}: wanted True or False; got {given!r}.")
    return given


def choice(where: str, name: str, given: object, choices: tuple[str, ...]) -> str:
    """`given` as it is, if it is one of `choices`."""
    if not isinstance(given, str) or given not in choices:
        close = difflib.get_close_matches(given.lower(), choices, n=1) if isinstance(given, str) else []
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"[{where}] {name}: wanted one of {', '.join(map(repr, choices))}; got {given!r}.{hint}")
    return given


def label(where: str, name: str, given: object) -> str:
    """`given` as it is, if it is a non-empty str that can be hashed, stored and printed on one line."""
    if not isinstance(given, str) or not given:
        raise ConfigError(f"[{where}] {name}: wanted a non-empty str; got {given!r}.")
    # Cc: control characters; Cs: lone surrogates, which have no UTF-8.
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in given):
        raise ConfigError(f"[{where}] {name}: wanted no control characters; got {given!r}.")
    return given
