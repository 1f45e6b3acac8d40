"""What every configuration value does with the arguments of its constructor, and as a value."""

import copy
import dataclasses
import inspect
import pickle

import pytest

from shoal import config
from shoal.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Clip,
    Column,
    Constant,
    Dram,
    Feature,
    Ftrl,
    Hbm,
    Normal,
    PartialRowwiseAdam,
    RowFormat,
    RowwiseAdagrad,
    Ssd,
    Table,
    Uniform,
    Zeros,
)
from shoal.errors import ConfigError

VALUES = [
    SGD(0.1, momentum=0.9),
    Adagrad(0.1),
    RowwiseAdagrad(),
    Adam(),
    AdamW(),
    PartialRowwiseAdam(),
    Ftrl(),
    Assign(),
    Clip(value=1.0),
    Column("sum", 1),
    Constant(1.0),
    Dram("1GiB"),
    Hbm("1GiB"),
    Ssd("/nvme", "1GiB"),
    Feature("user"),
    Normal(),
    RowFormat(4),
    Uniform(),
    Zeros(),
    Table("user", 8, features=["user", Feature("item", "read")], tiers=[Dram(4096)]),
]
by_class = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)


def test_every_concrete_class_is_in_the_list_above():
    exported = {getattr(config, name) for name in config.__all__}
    concrete = {item for item in exported if dataclasses.is_dataclass(item) and not inspect.isabstract(item)}
    assert concrete == {type(value) for value in VALUES}


def test_all_is_sorted_and_exists():
    assert all(hasattr(config, name) for name in config.__all__)
    assert len(set(config.__all__)) == len(config.__all__)


@by_class
def test_unknown_keyword_is_a_config_error_that_names_it(value):
    with pytest.raises(ConfigError, match="colour") as caught:
        type(value)(**vars(value), colour="red")
    assert str(caught.value).startswith(f"[{type(value).__name__}] wanted {type(value).__name__}(")


@by_class
def test_too_many_positional_arguments_are_a_config_error(value):
    with pytest.raises(ConfigError, match="too many positional"):
        type(value)(*range(20))


@by_class
def test_is_frozen_hashable_and_equal_to_its_copies(value):
    names = [field.name for field in dataclasses.fields(value)]
    for name in names or ["anything"]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
    for same in (copy.deepcopy(value), pickle.loads(pickle.dumps(value)), dataclasses.replace(value)):
        assert same == value
        assert hash(same) == hash(value)


def test_misspelt_keyword_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"'optimiser'\. Did you mean 'optimizer'\?"):
        Table("user", 8, optimiser=SGD())
    with pytest.raises(ConfigError, match=r"'learning'\.$"):
        SGD(learning=0.1)


def test_accepted_arguments_are_listed_with_the_keyword_only_ones_behind_a_star():
    with pytest.raises(ConfigError, match=r"wanted Table\(name, dim, \*, features, .*buckets\)"):
        Table("user", 8, capacity=1)


def test_missing_argument_is_a_config_error_that_names_it():
    with pytest.raises(ConfigError, match="missing a required argument: 'dim'"):
        Table("user")


def test_argument_given_twice_is_a_config_error():
    with pytest.raises(ConfigError, match="multiple values for argument 'dim'"):
        Table("user", 8, dim=8)


def test_signature_stays_readable_by_tools():
    assert next(iter(inspect.signature(SGD).parameters)) == "lr"
    assert inspect.signature(Table).parameters["buckets"].default == 4096
