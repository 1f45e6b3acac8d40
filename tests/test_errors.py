"""The exception tree: what each class is, how it reads, and that its drawing is true."""

import copy
import pickle
import re

import pytest

from shoal import errors
from shoal.errors import NotFoundError, ShoalError, ShoalWarning

BUILTIN_BASES = {
    "ConfigError": ValueError,
    "InputError": ValueError,
    "NotFoundError": KeyError,
    "DeviceError": RuntimeError,
    "CapacityError": RuntimeError,
    "OutOfMemoryError": MemoryError,
    "NonFiniteError": ArithmeticError,
    "BackwardError": RuntimeError,
    "StateDictError": RuntimeError,
    "StorageError": OSError,
    "CheckpointError": RuntimeError,
    "ForkError": RuntimeError,
}
WARNINGS = [
    "ModeWarning",
    "OptimizerWarning",
    "RanksWarning",
    "StateWarning",
    "WeightsWarning",
    "NonFiniteWarning",
    "PrefetchWarning",
]


def test_every_exception_is_exported_and_is_a_shoal_error():
    defined = {name for name, item in vars(errors).items() if isinstance(item, type)}
    assert defined == set(errors.__all__) == {*BUILTIN_BASES, "ShoalError", *WARNINGS, "ShoalWarning"}
    assert all(issubclass(getattr(errors, name), ShoalError) for name in defined - {*WARNINGS, "ShoalWarning"})


def test_every_warning_is_a_shoal_warning():
    assert issubclass(ShoalWarning, UserWarning)
    assert all(issubclass(getattr(errors, name), ShoalWarning) for name in WARNINGS)


@pytest.mark.parametrize("name", BUILTIN_BASES)
def test_exception_is_caught_as_the_builtin_too(name):
    with pytest.raises(BUILTIN_BASES[name], match="wanted this"):
        raise getattr(errors, name)("[here] wanted this; got that.")


def test_docstring_draws_the_tree_as_it_is():
    drawn = dict(re.findall(r"[├└]── (\w+) +\((\w+)\)", errors.__doc__))
    assert drawn == {name: base.__name__ for name, base in BUILTIN_BASES.items()}
    assert re.findall(r"[├└]── (\w+Warning) ", errors.__doc__) == WARNINGS


@pytest.mark.parametrize("name", errors.__all__)
def test_message_is_shown_as_written_and_survives_pickle_and_copy(name):
    error = getattr(errors, name)("[here] wanted 'this'; got that.\nDo so.")
    for same in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(same) is type(error)
        assert str(same) == "[here] wanted 'this'; got that.\nDo so."


@pytest.mark.parametrize("name", errors.__all__)
def test_docstring_is_one_line(name):
    assert getattr(errors, name).__doc__.strip().count("\n") == 0


def test_not_found_error_without_arguments_is_shown():
    assert str(NotFoundError()) == ""
