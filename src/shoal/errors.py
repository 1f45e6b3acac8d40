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

and every warning that it gives. A collection gives the first three and WeightsWarning once for each cause. StateWarning
and NonFiniteWarning come with each load that they are true of, PrefetchWarning once for each pass over a loader:

    ShoalWarning          (UserWarning)
    ├── ModeWarning        a lookup without gradients inserts rows, or an optimizer makes steps after lookups in eval()
    ├── OptimizerWarning   tables train with a default optimizer, or with gradients that a GradScaler scaled
    ├── RanksWarning       several ranks train tables that are not shared
    ├── StateWarning       a state dict was loaded in part
    ├── WeightsWarning     per-sample weights are ignored, and the user did not say so
    ├── NonFiniteWarning   rows that were loaded have NaN or infinity
    └── PrefetchWarning    a storage failed while `shoal.prefetch` read from it

`warnings.filterwarnings("ignore", category=shoal.errors.ModeWarning)` silences one kind.

`except ShoalError` catches every exception. The built-in class in brackets is a base too, for code that does not know
Shoal. Messages read "[where] what was wanted; got what came. What to do."

A `StorageError` of a table's tier has the table's name, `table`. Where rows on an `Ssd` cannot be read, it also has
`keys`: all keys of the call whose rows these are, int64 in ascending order, on the table's device. In all other cases
both are None. To go on without these rows,

    except StorageError as error:
        if error.keys is None:
            raise
        bags.table(error.table).erase(error.keys)

and make the call again: the failed one has changed nothing. Where the disk may only have been unreachable for a moment,
first make the call again without the erase: erased rows do not come back. `bags.table(...).unreadable()` finds all such
keys of a table.
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
    "NonFiniteWarning",
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
    "WeightsWarning",
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
    """A backward pass runs a second time, or its forward's lookup is no longer remembered."""


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
    """A lookup in train() without gradients inserts rows, or an optimizer makes steps after lookups in eval()."""


class OptimizerWarning(ShoalWarning):
    """Tables train with an optimizer that was not named, or with gradients that a GradScaler scaled."""


class RanksWarning(ShoalWarning):
    """Several ranks train tables of the same name apart from each other."""


class StateWarning(ShoalWarning):
    """A state dict lacks a part of a table, which is now as in a new row."""


class WeightsWarning(ShoalWarning):
    """A batch has per-sample weights, which are ignored: `is_weighted=` of tables of TorchRec configs was not given."""


class NonFiniteWarning(ShoalWarning):
    """Rows that were loaded from a log or a checkpoint have NaN or infinity in their weights or state."""


class PrefetchWarning(ShoalWarning):
    """A storage failed while `shoal.prefetch` read from it. The lookup reads the rows itself, or raises the error."""
