"""Births by the native core."""

from torch import Tensor

from shoal import _native
from shoal.config import Constant, Init, Normal, Uniform, get_num_threads


def native_init(init: Init, stream: int) -> _native.Init:
    """The initialiser as the kernels take it; `stream` is the table's birth stream."""
    match init:
        case Uniform(low, high):
            return _native.Init(_native.InitKind.uniform, low, high - low, stream)
        case Normal(mean, std):
            return _native.Init(_native.InitKind.normal, mean, std, stream)
        case Constant(value):
            return _native.Init(_native.InitKind.constant, value)
        case _:
            return _native.Init(_native.InitKind.zeros)


def birth(
    rows: _native.Rows, init: _native.Init, state: Tensor, score: float, clock: int, keys: Tensor, slots: Tensor
) -> None:
    """Write first rows: weights from `init`, `state` as it is, `score`; flagged changed and dirty, used at `clock`."""
    _native.birth(rows, init, state, score, clock, keys, slots, get_num_threads())
