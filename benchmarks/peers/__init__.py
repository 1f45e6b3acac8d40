"""The peers. Each file wraps one other system in the same methods: `load`, `lookup`, `forward`, `step`, `rows`."""

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from benchmarks.work import Batch


class Bags(Protocol):
    """Eight tables with sum pooling and their optimizer, ours or a peer's."""

    name: str

    def load(self, table: int, rows: Tensor) -> None:
        """Sets the rows of ids 0 to n - 1."""

    def lookup(self, batch: Batch) -> object:
        """Returns pooled rows without gradient, in any number of tensors. This is timed."""

    def forward(self, batch: Batch) -> Tensor:
        """Returns the same as one tensor, for the check. [batch, tables x dim]"""

    def step(self, batch: Batch, gradient: Tensor) -> None:
        """Runs forward, backward and update."""

    def rows(self, table: int, ids: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Peer:
    """A system that may not be installed. If it is not, cases leave its contenders out: then benchmarks.run refuses to
    measure, and the tests run the other contenders."""

    name: str
    contenders: tuple[str, ...]
    find: Callable[[], object]  # None if it is not installed

    @property
    def is_installed(self) -> bool:
        return self.find() is not None


def _module(name: str, *contenders: str) -> Peer:
    return Peer(name, contenders, lambda: importlib.util.find_spec(name))


FBGEMM = _module("fbgemm_gpu", "fbgemm", "fbgemm x 2", "fbgemm map (int32)", "fbgemm op (int64)")
ROCKSDB = _module("rocksdict", "rocksdb")
PANDAS = _module("pandas", "pandas")
# "limit" and "asked" are computed from its measurements.
FIO = Peer("fio", ("fio", "misses by fio", "limit", "asked"), lambda: shutil.which("fio"))
