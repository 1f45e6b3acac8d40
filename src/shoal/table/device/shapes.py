"""How the kernels of an update are cut: see docs/tuning.md."""

from dataclasses import dataclass

from shoal.ops.launch import power_of_two
from shoal.storage.hbm import Layout

# Of the largest of today's devices, for kernels of as many programs as run at a time.
_PROCESSORS = 132


@dataclass(frozen=True)
class Shape:
    """How one kernel is cut."""

    rows: int  # or pieces of them, that a program has in hand
    items: int  # of a piece that are on their way at a time
    warps: int
    most_programs: int

    @staticmethod
    def of(layout: Layout) -> "Shape":
        """What was fastest for rows like these with several items."""
        d = power_of_two(layout.dim)
        if layout.state_floats >= layout.dim or d >= 128:  # such rows leave no registers for others
            return Shape(max(1, 128 // d), 8, 1, 32 * _PROCESSORS)
        return Shape(min(32, 256 // d), 4, 1, 24 * _PROCESSORS)

    @staticmethod
    def of_single(layout: Layout) -> "Shape":
        """The same with one item."""
        d = power_of_two(layout.dim)
        if layout.state_floats >= layout.dim:
            return Shape(max(1, 128 // d), 1, 1, 32 * _PROCESSORS)
        return Shape(max(1, min(16, 1024 // d)), 1, 1, 2**31 - 1)
