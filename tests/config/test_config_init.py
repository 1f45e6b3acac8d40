"""Initial values of rows."""

import math
from fractions import Fraction

import numpy as np
import pytest

from shoal.config import Constant, Normal, Uniform, Zeros
from shoal.errors import ConfigError

FLOAT32_MAX = float(np.finfo(np.float32).max)


def test_defaults():
    assert Uniform() == Uniform(-0.01, 0.01) == Uniform(low=-0.01, high=0.01)
    assert Normal() == Normal(0.0, 0.01)
    assert Zeros() == Zeros()


def test_numbers_become_python_floats():
    for value in (Constant(1), Constant(np.float32(1)), Constant(np.int64(1)), Constant(Fraction(1))):
        assert type(value.value) is float
        assert value == Constant(1.0)


def test_equal_bounds_and_no_deviation_are_fine():
    assert Uniform(0.5, 0.5).bound == 0.5
    assert Normal(1.0, 0.0).std == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39, -1e39, 10**400, True, "1", None, 1j])
def test_numbers_that_float32_does_not_have_are_refused(bad):
    for make in (Constant, lambda bad: Uniform(bad, 1.0), lambda bad: Uniform(-1.0, bad), Normal):
        with pytest.raises(ConfigError, match=r"wanted a finite float32 number; got"):
            make(bad)


def test_impossible_ranges_are_refused():
    with pytest.raises(ConfigError, match="low <= high"):
        Uniform(0.1, -0.1)
    with pytest.raises(ConfigError, match="high - low finite"):
        Uniform(-FLOAT32_MAX, FLOAT32_MAX)
    with pytest.raises(ConfigError, match="std: wanted a finite float32 number >= 0"):
        Normal(0.0, -1.0)
    with pytest.raises(ConfigError, match="rows finite in float32"):
        Normal(0.0, FLOAT32_MAX / 2)


def test_bound_is_the_largest_magnitude():
    assert Uniform(-3.0, 2.0).bound == 3.0
    assert Constant(-4.0).bound == 4.0
    assert Constant(FLOAT32_MAX).bound == FLOAT32_MAX
    assert Zeros().bound == 0.0
    assert Normal(-1.0, 0.5).bound == 6.0
