"""Reading batches of more rows than memory holds: in pieces, straight to the output.

No row comes into a table's memory, and none leaves it. A piece is a run of positions of one feature whose distinct keys
fit into a small area; their weights are copied there, from memory and from below, and pooled by the kernel that pools
rows in memory. Pieces end between bags. A bag that is larger is summed in order: its sum so far is the first row of its
next piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal import _native
from shoal.config import RowFormat
from shoal.index import NO_SLOT, HostIndex
from shoal.ops.pool import bags_of, pool
from shoal.ops.update import weight_gradients
from shoal.storage import DramStorage
from shoal.table.host.plan import Plan
from shoal.table.parts import Part

if TYPE_CHECKING:
    from shoal.table.host.table import HostTable

# Rows of a piece take bytes outside of the table's memory: this part of it, and no more than so many, as rows that are
# read ahead. At 16 MiB a disk has long all the requests that it can use.
_PIECE_PART = 4
_MOST_PIECE_BYTES = 16 << 20


def rows_of_a_piece(table: "HostTable") -> int:
    """Rows of a table that are outside of its memory at a time."""
    most = _MOST_PIECE_BYTES if table.budget is None else min(table.budget // _PIECE_PART, _MOST_PIECE_BYTES)
    rows: int = most // table.storage.packed.bytes
    return max(rows, 1)


class Run:
    """The positions of one feature of a batch, to be cut into pieces by their distinct keys."""

    def __init__(self, keys: Tensor, most: int) -> None:
        self.distinct, self._which = torch.unique(keys.to(torch.int64), return_inverse=True)
        self._most = most
        # Where the key of each position stood last, or -1: it is new to a piece that begins after that.
        order = torch.argsort(self._which, stable=True)
        again = self._which[order[1:]] == self._which[order[:-1]]
        self._last = torch.full_like(order, -1)
        self._last[order[1:][again]] = order[:-1][again]

    def __len__(self) -> int:
        return len(self._which)

    def end(self, begin: int) -> int:
        """Where a piece ends at the latest that begins there."""
        wide = self._most
        while True:
            end = min(begin + wide, len(self))
            new = (self._last[begin:end] < begin).cumsum(0)
            if len(new) and int(new[-1]) > self._most:
                return begin + int(torch.searchsorted(new, self._most, right=True))
            if end == len(self):
                return end
            wide *= 2

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The pieces of some positions."""
        while begin < end:
            stop = min(self.end(begin), end)
            yield begin, stop
            begin = stop

    def piece(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The distinct keys of a piece, and which of them each position has."""
        numbers, which = torch.unique(self._which[begin:end], return_inverse=True)
        return self.distinct[numbers], which


class _Area:
    """Some float32 rows, numbered from 0 on, as a table that kernels pool. The last is for the sum of a large bag."""

    def __init__(self, dim: int, rows: int) -> None:
        self._storage, self._index = DramStorage(RowFormat(dim)), HostIndex()
        self._storage.reserve(rows + 1)
        self._slots = torch.empty(rows + 1, dtype=torch.int32, device="cpu")
        numbers = torch.arange(rows + 1, device="cpu")
        _native.arrive([(self._index.native, self._storage.native)], [numbers], [self._slots], 1)
        self.dim, self._sum = dim, rows
        self._tally = _native.Tally()
        self._none = _native.Init(_native.InitKind.zeros)
        self._lookups = {pooling: self._lookup(pooling) for pooling in (_native.Pooling.sum, _native.Pooling.mean)}
        self._indexes = _native.RwLock()

    def _lookup(self, pooling: _native.Pooling) -> _native.Lookup:
        lookup = _native.Lookup()
        rows = self._storage.rows
        lookup.add(self._index.native, rows, self._tally, 0, 0, pooling, False, self._none, 0, False, False)
        return lookup

    def write(self, rows: Tensor) -> None:
        """Have these rows."""
        self._storage.write(self._slots[: len(rows)], rows.contiguous())

    def pool(
        self, which: Tensor, offsets: Tensor, weights: Tensor | None, pooling: _native.Pooling, dtype: torch.dtype
    ) -> Tensor:
        """Bags of rows by number, pooled."""
        bags = bags_of(which, offsets, weights, 1, 1)
        out, _lacking = pool(self._lookups[pooling], bags, len(offsets) - 1, self.dim, dtype, False, False)
        return out

    def add(self, sum_so_far: Tensor | None, which: Tensor, weights: Tensor | None) -> Tensor:
        """The sum of rows, float32 [1, dim], to that of rows before: as one sum in order."""
        if sum_so_far is not None:
            self._storage.write(self._slots[self._sum :], sum_so_far)
            which = torch.cat([torch.tensor([self._sum], device="cpu"), which])
            if weights is not None:
                weights = torch.cat([torch.ones(1, device="cpu"), weights])
        offsets = torch.tensor([0, len(which)], device="cpu")
        return self.pool(which, offsets, weights, _native.Pooling.sum, torch.float32)

    def weight_gradients(self, which: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
        """Of each position, the gradient of its bag's sum times its row."""
        bags = bags_of(which, offsets, None, 1, 1)
        bags.begin_ahead()
        self._lookups[_native.Pooling.sum].find(bags, self._indexes, [], 1)
        feature = _native.UpdateFeature(0, 0, 0, _native.Pooling.sum, 0)
        return weight_gradients([self._storage.rows], [feature], [grad], [self._none], bags, len(which))


@dataclass
class Seen:
    """What the forward of a batch with per-sample weights saw: their gradient is of these rows, also where other calls
    erased some, or made rows for keys that had none."""

    keys: dict[int, Tensor] = field(default_factory=dict)  # by table, in ascending order
    absent: dict[int, Tensor] = field(default_factory=dict)  # of them, those without a row
    erased: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)  # keys, and their weights until then

    def keep(self, number: int, table: "HostTable", keys: Tensor) -> None:
        """Keep the rows of keys that are about to be erased."""
        if number not in self.keys:
            return
        keys = keys[torch.isin(keys, self.keys[number])].unique()
        for known in (self.absent[number], *(some for some, _rows in self.erased.get(number, []))):
            keys = keys[~torch.isin(keys, known)]
        kept, weights = [], []
        for some in keys.split(rows_of_a_piece(table)):
            rows, is_here, is_below = table.weights_from(some, None)
            has = is_here | is_below
            kept.append(some[has])
            weights.append(rows[has])
        self.erased.setdefault(number, []).append((torch.cat(kept), torch.cat(weights)))

    def forget(self, number: int, keys: Tensor) -> None:
        """These were not erased."""
        kept = self.erased.get(number, [])
        for at, (some, rows) in enumerate(kept):
            still = ~torch.isin(some, keys)
            kept[at] = some[still], rows[still]

    def put(self, number: int, table: "HostTable", keys: Tensor, rows: Tensor) -> None:
        """Have the rows of these distinct keys as the forward saw them, in place of what others made of them."""
        absent = torch.isin(keys, self.absent[number])
        nowhere = torch.full((int(absent.sum()),), NO_SLOT, dtype=torch.int32, device="cpu")
        rows[absent] = table.storage.read(nowhere, table.missing, keys[absent])
        for some, were in self.erased.get(number, []):
            if not len(some):
                continue
            at = torch.searchsorted(some, keys).clamp_(max=len(some) - 1)  # they are in ascending order
            mine = some[at] == keys
            rows[mine] = were[at[mine]]


class Reader:
    """Rows of a batch, read in pieces. REQUIRES: the group's lock is held, at least the shared one.

    `to_bear`: by table, the keys that will be born once all is read, which already read so. `seen`: what a forward
    fills, and its backward is given.
    """

    def __init__(
        self,
        tables: "Sequence[HostTable]",
        plan: Plan,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        to_bear: dict[int, Tensor],
        seen: Seen,
    ) -> None:
        self._seen = seen
        self._pieces_seen: dict[int, list[tuple[Tensor, Tensor]]] = {}  # keys, and those without a row
        self._tables, self._plan = tables, plan
        self._values, self._offsets, self._weights = values, offsets.to(torch.int64), weights
        self._size = (len(offsets) - 1) // max(len(plan.names), 1)
        self._to_bear = to_bear
        self._newest_area: tuple[int, _Area] | None = None
        self._counts: list[tuple[HostTable, int, int, int]] = []

    def count(self) -> None:
        """Count what was read, and tell what was seen: nothing failed."""
        for number, pieces in self._pieces_seen.items():
            self._seen.keys[number] = torch.cat([keys for keys, _absent in pieces]).unique()
            self._seen.absent[number] = torch.cat([absent for _keys, absent in pieces]).unique()
        for table, keys, here, below in self._counts:
            table.tally.add(keys, here, below)

    def read(self, out: Tensor) -> None:
        """Every part's pooled rows in its columns of [size, columns], or its rows behind those of the one before."""
        if self._plan.columns:
            self._pool_all(out)
        else:
            self._each(out)

    def _pool_all(self, out: Tensor) -> None:
        for part in self._plan.parts:
            target = out[:, part.column : part.column + part.dim]
            if part.feature.mode == "write":
                target.zero_()
                self._count_alone(part)
            else:
                self._pool(part, target)

    def _each(self, out: Tensor) -> None:
        at = 0
        for part in self._plan.parts:
            begin, end = self._range(part)
            target = out[at : at + (end - begin) * part.dim].view(end - begin, part.dim)
            at += target.numel()
            if part.feature.mode == "write":
                target.zero_()
                self._count_alone(part)
                continue
            run = self._run(part)
            for first, stop in run.pieces(0, len(run)):
                rows, which = self._read(part, run, first, stop)
                target[first:stop] = rows[which].to(out.dtype)

    def weight_gradients(self, grad: Tensor) -> Tensor:
        """The gradient of every per-sample weight, from the rows as they are now. `grad`: [size, columns]."""
        result = torch.zeros(len(self._values), dtype=torch.float32, device="cpu")
        for part in self._plan.parts:
            if part.feature.mode == "write":
                continue
            begin, _end = self._range(part)
            run, offsets, area = self._run(part), self._bags(part), self._area(part.table)
            counts = offsets.diff()
            bag_of = torch.repeat_interleave(torch.arange(self._size, device="cpu"), counts)
            for first, stop in run.pieces(0, len(run)):
                rows, which = self._read(part, run, first, stop, is_forward=False)
                area.write(rows)
                low, high = int(bag_of[first]), int(bag_of[stop - 1]) + 1
                bags = offsets[low : high + 1].clamp(first, stop) - first
                some = area.weight_gradients(which, bags, grad[low:high, part.column : part.column + part.dim])
                if self._tables[part.table].config.pooling == "mean":
                    some /= counts[bag_of[first:stop]].to(torch.float32)
                result[begin + first : begin + stop] += some
        return result

    def _pool(self, part: Part, target: Tensor) -> None:
        run, offsets, area = self._run(part), self._bags(part), self._area(part.table)
        weights = None if self._weights is None else self._weights[slice(*self._range(part))]
        pooling = self._tables[part.table].config.pooling
        native = _native.Pooling.mean if pooling == "mean" else _native.Pooling.sum
        bag = 0
        while bag < self._size:
            first = int(offsets[bag])
            end = run.end(first)
            after = min(int(torch.searchsorted(offsets, end, right=True)) - 1, self._size)
            if after > bag:
                stop = int(offsets[after])
                if first == stop:
                    target[bag:after] = 0
                else:
                    rows, which = self._read(part, run, first, stop)
                    area.write(rows)
                    some = None if weights is None else weights[first:stop]
                    bags = offsets[bag : after + 1] - first
                    target[bag:after] = area.pool(which, bags, some, native, target.dtype)
                bag = after
                continue
            total: Tensor | None = None
            last = int(offsets[bag + 1])
            for begin, stop in run.pieces(first, last):
                rows, which = self._read(part, run, begin, stop)
                area.write(rows)
                total = area.add(total, which, None if weights is None else weights[begin:stop])
            assert total is not None
            if pooling == "mean":
                total /= torch.tensor([float(last - first)], device="cpu")
            target[bag] = total[0].to(target.dtype)
            bag += 1

    def _range(self, part: Part) -> tuple[int, int]:
        first = part.source * self._size
        return int(self._offsets[first]), int(self._offsets[first + self._size])

    def _bags(self, part: Part) -> Tensor:
        """Where the bags of a part begin among its positions, and the end."""
        first = part.source * self._size
        offsets = self._offsets[first : first + self._size + 1]
        return offsets - offsets[0]

    def _run(self, part: Part) -> Run:
        return Run(self._values[slice(*self._range(part))], rows_of_a_piece(self._tables[part.table]))

    def _area(self, number: int) -> _Area:
        newest = self._newest_area
        if newest is None or newest[0] != number:  # parts come by table: one has an area at a time
            table = self._tables[number]
            newest = self._newest_area = number, _Area(table.config.dim, rows_of_a_piece(table))
        return newest[1]

    def _read(self, part: Part, run: Run, begin: int, end: int, is_forward: bool = True) -> tuple[Tensor, Tensor]:
        """The weights of a piece's keys, and which of them each position has."""
        table = self._tables[part.table]
        keys, which = run.piece(begin, end)
        rows, is_here, is_below = table.weights_from(keys, self._to_bear.get(part.table))
        if not is_forward:
            self._seen.put(part.table, table, keys, rows)
            return rows, which
        here, below = int(is_here[which].sum()), int(is_below[which].sum())
        self._counts.append((table, end - begin, here, below))
        if self._weights is not None:
            absent = keys[~(is_here | is_below)]
            if part.table in self._to_bear:
                absent = absent[~torch.isin(absent, self._to_bear[part.table])]
            self._pieces_seen.setdefault(part.table, []).append((keys, absent))
        return rows, which

    def _count_alone(self, part: Part) -> None:
        """Count the keys of a part whose rows are not read."""
        table, run = self._tables[part.table], self._run(part)
        for begin, end in run.pieces(0, len(run)):
            keys, which = run.piece(begin, end)
            is_here, is_below = table.places_of(keys)
            here, below = int(is_here[which].sum()), int(is_below[which].sum())
            self._counts.append((table, end - begin, here, below))
