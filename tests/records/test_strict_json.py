"""JSON as the records have it: text with two meanings, or none, is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import InputError, StorageError
from shoal.records import strict_json

text = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)


@given(values)
def test_values_come_back_exactly(value):
    encoded = strict_json.encode(value, "here")
    assert repr(strict_json.parse(encoded, "here")) == repr(value)
    assert repr(strict_json.parse(memoryview(encoded), "here")) == repr(value)


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"{",
        b"[1,]",
        b"nul",
        b"\xff",
        b"\xef\xbb\xbf{}",
        b'{"a": 1, "a": 2}',
        b'[{"b": {"a": 1, "a": 1}}]',
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"9" * 5000,
        b'"\\ud800"',
        b'{"\\udfff": 1}',
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000,
        b"{} {}",
    ],
    ids=lambda given: repr(given[:24]),
)
def test_what_is_not_one_value_is_refused(given):
    with pytest.raises(StorageError, match=r"^\[log\] wanted JSON; got"):
        strict_json.parse(given, "log")


def test_escaped_pairs_of_surrogates_are_read():
    assert strict_json.parse(b'"\\ud83d\\ude00"', "here") == "\U0001f600"


def test_many_names_twice_are_refused_in_reasonable_time():
    names = ",".join(f'"{i % 200_000}":0' for i in range(200_001))
    with pytest.raises(StorageError, match="'0' more than once"):
        strict_json.parse(b"{" + names.encode() + b"}", "here")


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), {1: 2}, [{"a": {None: 1}}], {1}, b"", "\ud800", object()]
)
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(InputError, match=r"^\[commit\] wanted"):
        strict_json.encode(value, "commit")


def test_circles_are_refused():
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(InputError):
        strict_json.encode(circle, "here")
