"""Rows in host memory: weights, state columns and score, by slot."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Column, get_num_threads
from shoal.storage.packed import PackedRows, empty_packed

_DTYPES = {
    "float32": _native.Dtype.float32,
    "float16": _native.Dtype.float16,
    "bfloat16": _native.Dtype.bfloat16,
}


class DramStorage:
    """Rows of one table in slabs of host memory. Growing moves no row; `compact` does, when asked."""

    def __init__(self, dim: int, dtype: str, columns: Sequence[Column]) -> None:
        self.dim = dim
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.columns = tuple(columns)
        self.packed = PackedRows(dim, dtype, columns)
        self._at: dict[str, int] = {}
        width = 0
        for column in columns:
            self._at[column.name] = width
            width += column.width
        self.first_state = torch.tensor(
            [column.initial for column in columns for _ in range(column.width)], dtype=torch.float32, device="cpu"
        )
        self.native = _native.DramStore(dim, _DTYPES[dtype], width)

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
        out = torch.empty(len(slots), self.dim, dtype=torch.float32, device="cpu")
        _native.read_weights(self.rows, missing, keys, slots, out, get_num_threads())
        return out

    def write(self, slots: Tensor, weights: Tensor) -> None:
        """Weights from float32 [n, dim]; of a slot that comes twice, the last wins."""
        _native.write_weights(self.rows, slots, weights)

    def read_state(self, column: Column, slots: Tensor) -> Tensor:
        """A state column, [n, width]; -1 reads as a row is born."""
        out = torch.empty(len(slots), column.width, dtype=torch.float32, device="cpu")
        first = torch.full((column.width,), column.initial, dtype=torch.float32, device="cpu")
        _native.read_state(self.rows, slots, self._at[column.name], first, out)
        return out

    def write_state(self, column: Column, slots: Tensor, values: Tensor) -> None:
        """A state column from float32 [n, width]."""
        _native.write_state(self.rows, slots, self._at[column.name], values)

    def read_scores(self, slots: Tensor) -> Tensor:
        """Scores, float64 [n]; -1 reads as NaN."""
        out = torch.empty(len(slots), dtype=torch.float64, device="cpu")
        _native.read_scores(self.rows, slots, out)
        return out

    def write_scores(self, slots: Tensor, scores: Tensor) -> None:
        """Scores from float64 [n]."""
        _native.write_scores(self.rows, slots, scores)

    # ---- whole rows in columns, as they leave the process

    def export(self, slots: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Weights [n, dim] in their own dtype, state columns and scores of slots."""
        n = len(slots)
        weights = torch.empty(n, self.dim, dtype=self._dtype, device="cpu")
        state = {
            column.name: torch.empty(n, column.width, dtype=torch.float32, device="cpu") for column in self.columns
        }
        scores = torch.empty(n, dtype=torch.float64, device="cpu")
        _native.export_rows(self.rows, slots, weights.data_ptr(), self._addresses(state), scores, get_num_threads())
        return weights, state, scores

    def put(
        self,
        slots: Tensor,
        weights: Tensor,
        state: Mapping[str, Tensor],
        scores: Tensor | None,
        score: float,
        clock: int,
        changed: bool,
    ) -> None:
        """Whole rows from columns of their own dtypes; state that is not given is as at birth, and so is the score."""
        _native.import_rows(
            self.rows,
            slots,
            weights.data_ptr(),
            self._addresses(state),
            scores,
            self.first_state,
            score,
            clock,
            changed,
            get_num_threads(),
        )

    def _addresses(self, state: Mapping[str, Tensor]) -> list[tuple[int, int, int]]:
        return [
            (state[column.name].data_ptr(), self._at[column.name], column.width)
            for column in self.columns
            if column.name in state
        ]

    def is_changed(self, slots: Tensor) -> Tensor:
        """Whether each row changed since that was cleared."""
        out = torch.empty(len(slots), dtype=torch.bool, device="cpu")
        _native.is_changed(self.rows, slots, out)
        return out

    def keep_keys(self, index: _native.Index) -> None:
        """Know whose each slot is, 8 bytes a row, and that none has changed. `index`: of the rows that are there."""
        self.native.keep_keys()
        _native.begin_tracking(index, self.rows, get_num_threads())

    def forget_keys(self) -> None:
        """Do so no longer."""
        self.native.forget_keys()

    def name(self, slots: Tensor, keys: Tensor) -> None:
        """Say whose slots are, if that is kept."""
        self.native.name(slots, keys)

    def changed_keys(self, slots: Tensor) -> Tensor:
        """The keys of those rows that changed since that was cleared. REQUIRES: they are kept."""
        return _native.changed_keys(self.rows, slots)

    def clear_changed(self, slots: Tensor) -> None:
        """Forget that rows changed: no reader needs to hear it again."""
        _native.clear_changed(self.rows, slots)

    # ---- whole rows, as they are below memory: weights, state, score

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
