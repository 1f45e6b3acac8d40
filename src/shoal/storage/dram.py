"""Rows in host memory by slot: weights, and the columns of their format."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Column, RowFormat, get_num_threads
from shoal.config.dtypes import torch_dtype
from shoal.config.rows import SCORE
from shoal.storage.packed import PackedRows, empty_packed

_NO_SCORE = torch.tensor([torch.nan], dtype=torch.float64, device="cpu")
_NO_STATE = torch.empty(0, dtype=torch.float32, device="cpu")


def native_dtype(name: str) -> _native.Dtype:
    """The type of weights, as the core takes it."""
    dtype: _native.Dtype = getattr(_native.Dtype, name)
    return dtype


def _first(column: Column) -> Tensor:
    """The values that a row has in a column when it is born, [width]."""
    return torch.full((column.width,), column.initial, dtype=torch_dtype(column.dtype), device="cpu")


class DramStorage:
    """Rows of one table in slabs of host memory. Growing moves no row; compaction does."""

    def __init__(self, format: RowFormat) -> None:
        self.format = format
        self.packed = PackedRows(format)
        self._first = {column.name: _first(column) for column in format.columns}
        self.first_state = torch.cat([_NO_STATE, *(self._first[column.name] for column in format.state)])
        first_facts = b"".join(self._first[column.name].numpy().tobytes() for column in format.other_facts)
        self.native = _native.DramStore(format.dim, native_dtype(format.dtype), format.state_floats, first_facts)

    @property
    def rows(self) -> _native.Rows:
        """Where the rows lie, for the kernels."""
        return self.native.rows

    @property
    def bytes(self) -> int:
        """Bytes in use."""
        return self.native.bytes

    def bytes_after(self, more: int) -> int:
        """Bytes in use once `more` rows came."""
        return self.native.bytes_after(more)

    def reserve(self, more: int) -> None:
        """Make sure that `more` slots can be taken."""
        self.native.reserve(more)

    def take(self, n: int) -> Tensor:
        """The n lowest free slots, after `reserve(n)`. Their rows hold whatever was there."""
        slots = torch.empty(n, dtype=torch.int32, device="cpu")
        self.native.take(slots)
        return slots

    def give(self, slots: Tensor) -> None:
        """Free slots."""
        self.native.give(slots)

    def read(self, slots: Tensor, missing: _native.Init, keys: Tensor) -> Tensor:
        """Weights as float32 [n, dim]; a key whose slot is -1 reads as `missing` makes it."""
        out = torch.empty(len(slots), self.format.dim, dtype=torch.float32, device="cpu")
        _native.read_weights(self.rows, missing, keys, slots, out, get_num_threads())
        return out

    def write(self, slots: Tensor, weights: Tensor) -> None:
        """Weights from float32 [n, dim]; of a slot that comes twice, the last wins."""
        _native.write_weights(self.rows, slots, weights)

    def read_column(self, column: Column, slots: Tensor) -> Tensor:
        """A column in its type, [n, width]; -1 reads as a row is born."""
        return self._read(column, slots, self._first[column.name])

    def write_column(self, column: Column, slots: Tensor, values: Tensor) -> None:
        """A column from values of its type, [n, width]."""
        if values.dtype != torch_dtype(column.dtype) or values.shape != (len(slots), column.width):
            raise ValueError(f"{column} takes [{len(slots)}, {column.width}]; got {values.dtype} {list(values.shape)}")
        at = self.format.tail_at[column]
        _native.write_column(self.rows, slots, at, values.contiguous().view(torch.uint8))

    def _read(self, column: Column, slots: Tensor, missing: Tensor) -> Tensor:
        out = torch.empty(len(slots), column.width, dtype=torch_dtype(column.dtype), device="cpu")
        at = self.format.tail_at[column]
        _native.read_column(self.rows, slots, at, missing.view(torch.uint8), out.view(torch.uint8))
        return out

    def read_scores(self, slots: Tensor) -> Tensor:
        """Scores, float64 [n]; -1 reads as NaN."""
        return self._read(SCORE, slots, _NO_SCORE)[:, 0]

    def write_scores(self, slots: Tensor, scores: Tensor) -> None:
        """Scores from float64 [n]."""
        self.write_column(SCORE, slots, scores[:, None])

    # ---- whole rows in columns, as they leave the process

    def export(self, slots: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Weights [n, dim] in their own dtype, state columns, scores and other facts of slots."""
        n, format = len(slots), self.format
        weights = torch.empty(n, format.dim, dtype=torch_dtype(format.dtype), device="cpu")
        columns = {
            column.name: torch.empty(n, column.width, dtype=torch_dtype(column.dtype), device="cpu")
            for column in format.columns
        }
        _native.export_rows(self.rows, slots, weights.data_ptr(), self._addresses(columns), get_num_threads())
        state = {column.name: columns[column.name] for column in format.state}
        facts = {column.name: columns[column.name] for column in format.other_facts}
        return weights, state, columns[SCORE.name][:, 0], facts

    def put(
        self,
        slots: Tensor,
        weights: Tensor,
        columns: Mapping[str, Tensor],
        score: float,
        clock: int,
        changed: bool,
    ) -> None:
        """Write whole rows from weights and columns of their own types. Columns that are not given are as at birth, the
        score as `score`."""
        _native.import_rows(
            self.rows,
            slots,
            weights.data_ptr(),
            self._addresses(columns),
            self.first_state,
            score,
            clock,
            changed,
            get_num_threads(),
        )

    def _addresses(self, columns: Mapping[str, Tensor]) -> list[tuple[int, int, int]]:
        """Memory, place in the tail and bytes of a row for each of these columns that the format has."""
        return [
            (columns[column.name].data_ptr(), self.format.tail_at[column], column.bytes)
            for column in self.format.columns
            if column.name in columns
        ]

    def is_changed(self, slots: Tensor) -> Tensor:
        """Whether each row changed since that was cleared."""
        out = torch.empty(len(slots), dtype=torch.bool, device="cpu")
        _native.is_changed(self.rows, slots, out)
        return out

    def keep_keys(self, index: _native.Index) -> None:
        """Keep the key of every slot, 8 bytes a row, and take all rows as unchanged. `index`: of the rows."""
        self.native.keep_keys()
        _native.begin_tracking(index, self.rows, get_num_threads())

    def forget_keys(self) -> None:
        """Keep no keys any longer."""
        self.native.forget_keys()

    def name(self, slots: Tensor, keys: Tensor) -> None:
        """Keep the keys of slots, if keys are kept."""
        self.native.name(slots, keys)

    def changed_keys(self, slots: Tensor) -> Tensor:
        """The keys of those rows that changed since that was cleared. REQUIRES: they are kept."""
        return _native.changed_keys(self.rows, slots)

    def clear_changed(self, slots: Tensor) -> None:
        """Clear the rows' changed flags: every cursor has their keys."""
        _native.clear_changed(self.rows, slots)

    # ---- whole rows as bytes, as they are below memory

    def pack(self, slots: Tensor) -> Tensor:
        """Whole rows, uint8 [n, packed.bytes]."""
        out = empty_packed(len(slots), self.packed.bytes)
        _native.pack(self.rows, slots, out, get_num_threads())
        return out

    def unpack(self, slots: Tensor, packed: Tensor, clock: int) -> None:
        """Put whole rows at slots, where they are clean and were used at `clock`."""
        _native.unpack(self.rows, slots, packed, clock, get_num_threads())

    def set_dirty(self, slots: Tensor, dirty: bool) -> None:
        """Say whether rows differ from what is below memory."""
        _native.set_dirty(self.rows, slots, dirty)

    def is_dirty(self, slots: Tensor) -> Tensor:
        """Whether each row differs from what is below memory."""
        out = torch.empty(len(slots), dtype=torch.bool, device="cpu")
        _native.is_dirty(self.rows, slots, out)
        return out

    def stamp(self, slots: Tensor, clock: int) -> None:
        """Say that rows were used at `clock`."""
        _native.stamp(self.rows, slots, clock)

    @property
    def sparse(self) -> bool:
        """Whether moving rows to the front would free memory worth the work."""
        return self.native.sparse

    @property
    def compact_from(self) -> int:
        """Rows at this slot and beyond would fit into free slots before it."""
        return self.native.compact_from

    def release_tail(self) -> None:
        """Give empty slabs at the end back to the system."""
        self.native.release_tail()
