"""Every exception that Shoal raises on purpose,

    ShoalError
    ├── ConfigError       (ValueError)       an impossible or unknown setting
    ├── InputError        (ValueError)       a bad batch or argument
    ├── NotFoundError     (KeyError)         an unknown table or feature
    ├── DeviceError       (RuntimeError)     a wrong or unavailable device
    ├── CapacityError     (RuntimeError)     a tier's byte budget is full
    ├── OutOfMemoryError  (MemoryError)      the operating system refused memory
    ├── NonFiniteError    (ArithmeticError)  NaN or infinity in the gradients
    ├── BackwardError     (RuntimeError)     a backward pass that cannot be applied
    ├── StateDictError    (RuntimeError)     a state dict that cannot be made or loaded
    ├── StorageError      (OSError)          a file or disk that failed, or what is on it is damaged
    ├── CheckpointError   (RuntimeError)     a log or checkpoint that is not there, or does not fit
    └── ForkError         (RuntimeError)     use in a forked child process

and every warning that it gives, none of them more than once for each collection:

    ShoalWarning          (UserWarning)
    ├── ModeWarning        rows are born in a lookup without gradients, or frozen in one that wants them
    ├── OptimizerWarning   an optimizer that nobody named, or gradients that look scaled
    ├── RanksWarning       several ranks train tables that are not shared
    ├── StateWarning       a state dict was loaded in part
    └── PrefetchWarning    a storage failed while rows were brought ahead

`warnings.filterwarnings("ignore", category=shoal.errors.ModeWarning)` silences one kind.

`except ShoalError` catches them all; the built-in class in brackets is a base too, so that code which knows nothing of
Shoal catches what it would expect. Messages read "[where] what was wanted; got what came. What to do."

A `StorageError` of a table's tier has the table's name, `table`. Where rows on an `Ssd` cannot be read, it also has
`keys`: all keys of the call whose rows these are, int64 in ascending order, on the table's device. In all other cases
both are None. Whoever can do without the rows goes on by

    except StorageError as error:
        if error.keys is None:
            raise
        bags.table(error.table).erase(error.keys)

and makes the call again: it has changed nothing. Where the disk may only have been away, try that alone first: what is
erased does not come back. `bags.table(...).unreadable()` finds all such keys of a table.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BackwardError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "ForkError",
    "InputError",
    "ModeWarning",
    "NonFiniteError",
    "NotFoundError",
    "OptimizerWarning",
    "OutOfMemoryError",
    "PrefetchWarning",
    "RanksWarning",
    "ShoalError",
    "ShoalWarning",
    "StateDictError",
    "StateWarning",
    "StorageError",
]


class ShoalError(Exception):
    """Base of every exception that Shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """A setting is unknown or impossible; raised where the value is constructed."""


class InputError(ShoalError, ValueError):
    """A batch or an argument is malformed; raised before anything changes."""


class NotFoundError(ShoalError, KeyError):
    """A table or feature of that name does not exist."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which puts quotes around a sentence and escapes its newlines.
        return Exception.__str__(self)


class DeviceError(ShoalError, RuntimeError):
    """A tensor or module is on the wrong device, or the device is not available."""


class CapacityError(ShoalError, RuntimeError):
    """A tier's byte budget is full, so a new key has no room."""


class OutOfMemoryError(ShoalError, MemoryError):
    """The operating system refused memory that the byte budget would have allowed."""


class NonFiniteError(ShoalError, ArithmeticError):
    """A gradient holds NaN or infinity, and `Clip(nonfinite="raise")` is set; no row has changed."""


class BackwardError(ShoalError, RuntimeError):
    """A backward pass runs a second time, or after the lease of its forward is gone."""


class StateDictError(ShoalError, RuntimeError):
    """A state dict is too large to make, or does not fit the tables it is loaded into."""


class StorageError(ShoalError, OSError):
    """A file, a disk or a user's storage failed, or what is on it is not what was written."""

    table: str | None = None
    keys: "Tensor | None" = None


class CheckpointError(ShoalError, RuntimeError):
    """A log, a checkpoint or a version of it is not there, or does not fit the tables."""


class ForkError(ShoalError, RuntimeError):
    """A table made before `fork` is used in the child process."""


class ShoalWarning(UserWarning):
    """Base of every warning that Shoal gives."""


class ModeWarning(ShoalWarning):
    """A lookup gives birth to rows where gradients are off, or freezes rows in eval() where gradients are wanted."""


class OptimizerWarning(ShoalWarning):
    """Tables train with an optimizer that nobody named, or with gradients that a GradScaler scaled."""


class RanksWarning(ShoalWarning):
    """Several ranks train tables of the same name apart from each other."""


class StateWarning(ShoalWarning):
    """A state dict lacks a part of a table, which is as at birth now."""


class PrefetchWarning(ShoalWarning):
    """A storage failed while rows were brought ahead, which lookups then bring themselves, or raise."""
