"""The values a row's weights are born with.

They depend on (seed, table name, key, element) alone, never on the order or batch in which keys come.
"""

from shoal.config.checked import FLOAT32_MAX, number, settle, value
from shoal.errors import ConfigError


@value
class Uniform:
    """Each weight uniform from low to high."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        low, high = number("Uniform", "low", self.low), number("Uniform", "high", self.high)
        if low > high:
            raise ConfigError(f"[Uniform] wanted low <= high; got low={low}, high={high}.")
        if high - low > FLOAT32_MAX:
            raise ConfigError(f"[Uniform] wanted high - low finite in float32; got low={low}, high={high}.")
        settle(self, low=low, high=high)

    @property
    def bound(self) -> float:
        """No weight is born larger than this in magnitude."""
        return max(abs(self.low), abs(self.high))


@value
class Normal:
    """Each weight normal with that mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        settle(self, mean=number("Normal", "mean", self.mean), std=number("Normal", "std", self.std, low=0.0))
        if self.bound > FLOAT32_MAX:
            raise ConfigError(f"[Normal] wanted rows finite in float32; got mean={self.mean}, std={self.std}.")

    @property
    def bound(self) -> float:
        """No weight is born larger than this in magnitude."""
        return abs(self.mean) + 10.0 * self.std  # a 32-bit draw reaches 6.4 deviations


@value
class Zeros:
    """Each weight zero."""

    @property
    def bound(self) -> float:
        """No weight is born larger than this in magnitude."""
        return 0.0


@value
class Constant:
    """Each weight the same value."""

    value: float

    def __post_init__(self) -> None:
        settle(self, value=number("Constant", "value", self.value))

    @property
    def bound(self) -> float:
        """No weight is born larger than this in magnitude."""
        return abs(self.value)


Init = Uniform | Normal | Zeros | Constant
