"""State dicts as a skeleton and tensors, and back: equal, and of the same types."""

import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_rows import bits_of

from shoal.errors import StateDictError, StorageError
from shoal.records import nested, strict_json, tensors

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
keys = text | st.integers()
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | text
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, st.integers(0, 9), max_size=3).map(Counter)
    ),
    max_leaves=12,
)


def through(value, where="here"):
    """As a log has it: the skeleton as JSON, the tensors as a file."""
    skeleton, flat = nested.flatten(value, where)
    header, pieces = tensors.encode(flat, {})
    found, _ = tensors.decode(b"".join([header, *pieces]), where)
    return nested.unflatten(strict_json.parse(strict_json.encode(skeleton, where), where), found, where)


def assert_exact(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert bits_of(found).equal(bits_of(wanted))
    elif isinstance(wanted, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in wanted]
        for key in wanted:
            assert_exact(found[key], wanted[key])
        assert hasattr(found, "_metadata") == hasattr(wanted, "_metadata")
        if hasattr(wanted, "_metadata"):
            assert_exact(found._metadata, wanted._metadata)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_exact(one, other)
    elif isinstance(wanted, float):
        assert struct.pack("<d", found) == struct.pack("<d", wanted)
    else:
        assert found == wanted


@given(values)
def test_values_come_back_exactly(value):
    assert_exact(through(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**53,
        2**53 + 1,
        -(2**53) - 1,
        2**64,
        10**10_000,
        -0.0,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        struct.unpack("<d", struct.pack("<Q", 0xFFF0000000000123))[0],
        1.0,
        True,
        {0: 1, "0": 2, "a": {}, -5: ()},
        {2**70: 1, 10**5000: torch.ones(1)},
        {"tensor": "x", "dict": [], "int": 5},
        [{"tuple": 1}],
        torch.ones(2),
        {"__metadata__": torch.ones(1)},
        {"a.b": torch.ones(1), "a": {"b": torch.ones(2), "b#2": torch.ones(4)}, "": torch.ones(3)},
        {0: torch.ones(1), "0": torch.ones(2)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_extremes_come_back_exactly(value):
    assert_exact(through(value), value)


def trained(make):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.1),
        lambda p: torch.optim.Adagrad(p, 0.1),
        lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
        lambda p: torch.optim.NAdam(p, 0.1),
    ],
)
def test_modules_and_optimizers_of_torch(make):
    model, optimizer = trained(make)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = through(state)
    assert_exact(found, state)
    other_model, other_optimizer = trained(make)
    other_model.load_state_dict(found["model"])
    other_optimizer.load_state_dict(found["optimizer"])
    assert_exact(other_model.state_dict(), model.state_dict())


def test_a_scheduler_of_torch():
    _, optimizer = trained(lambda p: torch.optim.SGD(p, 0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    assert_exact(through(scheduler.state_dict()), scheduler.state_dict())


def test_names_are_the_way_to_a_tensor():
    _, flat = nested.flatten({"state": {0: {"exp_avg": torch.ones(1)}, 1: [torch.ones(2)]}}, "here")
    assert list(flat) == ["state.0.exp_avg", "state.1.0"]


def test_tensors_are_not_copied():
    tensor = torch.ones(3)
    _, flat = nested.flatten([tensor, tensor], "here")
    assert [found.data_ptr() for found in flat.values()] == [tensor.data_ptr()] * 2


class Color(IntEnum):
    RED = 1


class Named(dict):
    pass


def with_attribute() -> OrderedDict:
    made = OrderedDict()
    made.more = 1
    return made


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (torch.float32, "torch.dtype"),
        (torch.device("cpu"), "torch.device"),
        (torch.Size([1]), "torch.Size"),
        (np.float64(1.0), "numpy.float64"),
        (np.int64(1), "numpy.int64"),
        (np.zeros(2), "numpy.ndarray"),
        (Color.RED, "Color"),
        (Named(), "Named"),
        (defaultdict(int), "collections.defaultdict"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (b"x", "bytes"),
        ({1}, "set"),
        (1j, "complex"),
        (lambda: 1, "function"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(1, requires_grad=True), "without gradient"),
        ({1.5: 1}, "keys that are str or int; got 1.5 of type float"),
        ({True: 1}, "of type bool"),
        ({None: 1}, "of type NoneType"),
        ({(1,): 1}, "of type tuple"),
        ("\ud800", "UTF-8"),
        ({"\udfff": 1}, "UTF-8"),
        (with_attribute(), "without attributes"),
    ],
)
def test_everything_else_is_refused_by_name(value, complaint):
    with pytest.raises(StateDictError, match=r"^\[dense\] at 'optimizer\.3':") as caught:
        nested.flatten({"optimizer": [0, 1, 2, value]}, "dense")
    assert complaint in str(caught.value)


def test_circles_and_depths_are_refused():
    circle: dict[str, object] = {}
    circle["again"] = circle
    with pytest.raises(StateDictError, match="or a circle"):
        nested.flatten(circle, "here")
    deep: list[object] = []
    for _ in range(64):
        deep = [deep]
    assert_exact(through(deep), deep)
    with pytest.raises(StateDictError, match="at most 64 levels"):
        nested.flatten([deep], "here")


@pytest.mark.parametrize(
    "skeleton",
    [
        {},
        {"more": 1},
        {"tuple": 1},
        {"tuple": [], "dict": []},
        {"dict": {}},
        {"dict": [1]},
        {"dict": [["a"]]},
        {"dict": [["a", 1, 2]]},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[1, 1], [1, 2]]},
        {"dict": [[1.5, 1]]},
        {"dict": [[True, 1]]},
        {"dict": [[None, 1]]},
        {"dict": [[[], 1]]},
        {"dict": [[{"tensor": "a"}, 1]]},
        {"dict": [[{"tuple": []}, 1]]},
        {"dict": [[{"int": hex(10**5000)}, 1], [{"int": hex(10**5000)}, 1]]},
        {"metadata": []},
        {"int": 5},
        {"int": "5"},
        {"int": "0x5"},
        {"int": "0x0" + "f" * 20},
        {"int": "0x" + "f" * 20 + "\n"},
        {"int": "0x" + "F" * 20},
        {"int": "0x" + "f_" * 20},
        2**53 + 1,
        {"float": "inf"},
        {"float": "3ff0000000000000"},
        {"float": 1.0},
        {"tensor": "b"},
        {"tensor": 1},
        {"tensor": ["a"]},
        [{"tensor": "a"}, {"tensor": "a"}],
        [],
        math.inf,
    ],
    ids=repr,
)
def test_damaged_skeletons_are_refused(skeleton):
    with pytest.raises(StorageError, match=r"^\[here\] wanted"):
        nested.unflatten(skeleton, {"a": torch.ones(1)}, "here")


def test_deep_skeletons_are_refused():
    deep: list[object] = []
    for _ in range(65):
        deep = [deep]
    with pytest.raises(StorageError, match="at most 64 levels"):
        nested.unflatten(deep, {}, "here")
    for wrong in ({"tuple": {"x": deep}}, {"dict": [[deep, 1]]}, {"int": deep}):
        with pytest.raises(StorageError):
            nested.unflatten(wrong, {}, "here")
