"""Sizes in bytes and the tier that takes one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import Dram, format_size, parse_size
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (4096, 4096),
        (1, 1),
        (np.int64(7), 7),
        ("4096", 4096),
        ("4096B", 4096),
        ("100KB", 100_000),
        ("100 kib", 102_400),
        ("2GB", 2_000_000_000),
        ("512MiB", 512 * 2**20),
        ("8GiB", 8 * 2**30),
        ("8gib", 8 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 1.5 GiB ", 3 * 2**29),
        (".5KiB", 512),
        ("2.KB", 2000),
        ("0.1GiB", 107_374_182),
        ("3TB", 3 * 10**12),
        ("3TiB", 3 * 2**40),
        ("2PB", 2 * 10**15),
        ("2PiB", 2**51),
        ("9007199254740993", 2**53 + 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_size_is_read(written, size):
    assert parse_size(written) == size
    assert type(parse_size(written)) is int


@pytest.mark.parametrize(
    "written",
    [
        True, False, 0, -1, 2**63, 1.5, math.nan, math.inf, None, b"8GiB", [8], np.array([1, 2]),
        "", " ", "GiB", "8G", "8Gi", "8 gigabytes", "-8GiB", "+8GiB", "0", "0GiB", "0.0001B", "nan", "inf", "1e3",
        "1_000", "1,5GiB", "1.5.0GiB", "8GiB8", "٣GiB", "8192PiB", "8GiB\x00",
    ],
    ids=repr,
)  # fmt: skip
def test_nonsense_is_refused(written):
    with pytest.raises(ConfigError, match=r"\[parse_size\] size: wanted .*; got "):
        parse_size(written)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0B"),
        (1, "1B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**20 - 1, "1MiB"),
        (10**9, "953.67MiB"),
        (8 * 2**30, "8GiB"),
        (2**60, "1024PiB"),
    ],
)
def test_size_is_shown(size, shown):
    assert format_size(size) == shown


@given(st.integers(1, 2**60))
def test_shown_size_reads_back_within_its_two_decimals(size):
    # One byte more, since parse_size cuts a fraction of one off.
    assert abs(parse_size(format_size(size)) - size) <= 0.005 * size + 1


def test_dram_keeps_its_size_as_written_and_knows_the_bytes():
    assert Dram().bytes is None
    assert Dram("2GiB").size == "2GiB"
    assert Dram("2GiB").bytes == 2**31
    assert Dram(size=4096).bytes == 4096


@pytest.mark.parametrize("size", [0, -5, True, "lots", math.nan])
def test_dram_refuses_a_bad_size_by_its_own_name(size):
    with pytest.raises(ConfigError, match=r"\[Dram\] size"):
        Dram(size)
