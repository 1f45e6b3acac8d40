"""Rows in device memory: slabs of equal length, reached through a table of addresses, shared by the tables of a group.

Slots are numbers of the whole group. A family is the tables whose rows have one layout; each slab belongs to one. A
family of tables with a tier below has its slabs in pinned host memory, and further slabs in device memory for copies
of rows: kernels reach either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Column, RowFormat
from shoal.config.dtypes import torch_dtype
from shoal.errors import CapacityError, ConfigError
from shoal.ops.launch import blocks, power_of_two
from shoal.storage import kernels
from shoal.storage.packed import PackedRows
from shoal.storage.pinned import pinned_bytes

_UNIT = 16  # bytes: rows begin at multiples of it, for wide loads
_MOST_SLOTS = 2**31
_WEIGHTS, _TAILS = 0, 1
CHANGED_FLAGS = 11  # as ops/library/rows.py has them
CHANGED_FLAG = 1  # since the last seal
DIRTY_FLAG = 2
ERASED_FLAG = 4
UNSAVED_FLAG = 8
_HOME_BYTES = 8


def _units(size: int) -> int:
    return (size + _UNIT - 1) // _UNIT


@dataclass(frozen=True)
class Layout:
    """Where the parts of a row lie in device memory.

    whole: a row's tail comes right after its weights, not after the weights of all rows. Lookups, which read weights
    alone, are then a little slower; but a row that crosses the bus is one access to host memory, which costs most.
    """

    format: RowFormat
    whole: bool = False

    def __post_init__(self) -> None:
        if others := [column.name for column in self.format.other_facts]:
            raise ConfigError(
                f"[device] rows in device memory hold weights, optimizer state and score; got the columns {others} of "
                f"policies too. Only tables in host memory have these yet."
            )

    @property
    def dim(self) -> int:
        """Weights of a row."""
        return self.format.dim

    @property
    def dtype(self) -> str:
        """The name of the weights' type."""
        return self.format.dtype

    @property
    def columns(self) -> tuple[Column, ...]:
        """The optimizer's columns."""
        return self.format.state

    @property
    def weight_type(self) -> torch.dtype:
        """The type of the weights."""
        return torch_dtype(self.format.dtype)

    @property
    def weight_units(self) -> int:
        """Units of 16 bytes that a row's weights take."""
        return _units(self.format.weight_bytes)

    @property
    def _tail_units(self) -> int:
        return _units(self.format.tail_bytes)

    @property
    def row_units(self) -> int:
        """Units that a row takes; a whole one begins where the memory does an access of its own."""
        units = self.weight_units + self._tail_units
        return units + units % 2 if self.whole else units

    @property
    def weight_stride(self) -> int:
        """From one row's weights to the next one's, in units of 16 bytes."""
        return self.row_units if self.whole else self.weight_units

    @property
    def state_floats(self) -> int:
        """Floats of state."""
        return self.format.state_floats

    @property
    def tail_stride(self) -> int:
        """From one row's tail (state, score and flags) to the next one's, in units of 16 bytes."""
        return self.row_units if self.whole else self._tail_units

    @property
    def score_at(self) -> int:
        """The word of the tail where the score begins, an even one."""
        return (self.state_floats + 1) // 2 * 2

    @property
    def flags_at(self) -> int:
        """The word of the tail with the flags: between state and score where one is left over, else after them."""
        return self.state_floats if self.state_floats % 2 else self.state_floats + 2

    @property
    def row_bytes(self) -> int:
        """Bytes of device memory that a row takes."""
        return _UNIT * self.row_units

    def state_at(self, name: str) -> int:
        """The first word of a state column in the tail."""
        return self.format.tail_at[self.format.column(name)] // 4


class _Family:
    """The slabs and free slots of one layout."""

    def __init__(self, layout: Layout, below: bool, device: torch.device) -> None:
        self.layout = layout
        self.below = below  # whether its rows are in host memory
        self.packed = PackedRows(layout.format)
        self.first_state = torch.tensor(
            [column.initial for column in layout.columns for _ in range(column.width)] or [0.0],
            dtype=torch.float32,
        ).to(device)
        self.free = torch.empty(0, dtype=torch.int32, device=device)
        self.slots = 0


class HbmStorage:
    """Rows of a group's tables in slabs of device memory, and of pinned host memory below it. Growing moves no row."""

    def __init__(
        self, anchor: Tensor, layouts: Sequence[Layout], below: Sequence[bool], taken: Tensor, slab_bits: int = 15
    ) -> None:
        device = anchor.device
        self.anchor = anchor
        self.slab_bits = slab_bits
        self.families = [_Family(layout, host, device) for layout, host in zip(layouts, below, strict=True)]
        # How many of each family's free slots the kernels took since the list was made.
        self.taken = taken
        self._memory: list[Tensor] = []
        self._host_memory: list[Tensor] = []
        most = _MOST_SLOTS >> slab_bits
        # Weights and tails of each slab, in units from the anchor, and the family it belongs to.
        self.slabs = torch.zeros(min(most, 1 << 16), 2, dtype=torch.int64, device=device)
        self.family_of = torch.full((len(self.slabs),), -1, dtype=torch.int32, device=device)
        # Where the slots of a slab keep their homes, in words of 64 bits from the anchor.
        self.homes = torch.zeros(len(self.slabs), dtype=torch.int64, device=device)
        self._slab_count = 0

    @property
    def bound(self) -> int:
        """All slots are below it."""
        return self._slab_count << self.slab_bits

    @property
    def bytes(self) -> int:
        """Bytes of all slabs in device memory."""
        return sum(memory.numel() for memory in self._memory)

    @property
    def host_bytes(self) -> int:
        """Bytes of all slabs in host memory."""
        return sum(memory.numel() for memory in self._host_memory)

    def supply(self, family: int) -> int:
        """Slots that were free when the list of them was made."""
        return len(self.families[family].free)

    def grow(self, family: int, rows: int) -> None:
        """Add slabs for so many rows, at least one; the last slab has no more than it must.

        Waits for the device: it asks how many of the free slots were taken.
        """
        held = self.families[family]
        self._require_slabs(rows)
        size = rows * held.layout.row_bytes
        device = self.anchor.device
        memory = pinned_bytes(size, device) if held.below else torch.empty(size, dtype=torch.uint8, device=device)
        slots, table = self._next_slots(rows), self._addresses(family, rows, memory)
        self._relist(family, slots)  # the last that asks for memory
        self._add_slabs(family, table)
        (self._host_memory if held.below else self._memory).append(memory)
        held.slots += rows

    def grow_above(self, family: int, rows: int) -> tuple[Tensor, Tensor]:
        """Add slabs of device memory for copies of so many rows that are in host memory; returns their slots, and where
        each keeps its home: the slot below and, in the upper half, its key's entry in the index there; -1 while it has
        none."""
        self._require_slabs(rows)
        layout, device = self.families[family].layout, self.anchor.device
        memory = torch.empty(rows * self.copy_bytes(layout), dtype=torch.uint8, device=device)
        copies, raw = memory.split([rows * layout.row_bytes, rows * _HOME_BYTES])
        slots, table = self._next_slots(rows), self._addresses(family, rows, copies)
        homes = raw.view(torch.int64).fill_(-1)
        begins = torch.arange(len(table), dtype=torch.int64) << self.slab_bits
        begins += (homes.data_ptr() - self.anchor.data_ptr()) // _HOME_BYTES
        self.homes[self._slab_count : self._slab_count + len(table)] = begins.to(device)
        self._add_slabs(family, table)
        self._memory.append(memory)
        return slots, homes

    @staticmethod
    def copy_bytes(layout: Layout) -> int:
        """Bytes of device memory that the copy of a row takes."""
        return layout.row_bytes + _HOME_BYTES

    def _require_slabs(self, rows: int) -> None:
        slab_rows = 1 << self.slab_bits
        if self._slab_count + blocks(rows, slab_rows) > len(self.slabs):
            raise CapacityError(
                f"[device] a collection's tables have up to {len(self.slabs)} slabs of {slab_rows} rows; these have "
                f"{self._slab_count}, and {rows} more rows were wanted. Spread the tables over several collections."
            )

    def _next_slots(self, rows: int) -> Tensor:
        return torch.arange(self.bound, self.bound + rows, dtype=torch.int32).to(self.anchor.device)

    def _addresses(self, family: int, rows: int, memory: Tensor) -> Tensor:
        """Where weights and tails of the next slabs are, if they are in this memory."""
        layout, slab_rows = self.families[family].layout, 1 << self.slab_bits
        slabs = blocks(rows, slab_rows)
        lengths = torch.full((slabs,), slab_rows)
        lengths[-1] = rows - (slabs - 1) * slab_rows
        slab_bytes = slab_rows * layout.row_bytes
        begins = (memory.data_ptr() - self.anchor.data_ptr() + slab_bytes * torch.arange(slabs)) // _UNIT
        tails = begins + (layout.weight_units if layout.whole else lengths * layout.weight_units)
        return torch.stack([begins, tails], dim=1).to(self.anchor.device)

    def _add_slabs(self, family: int, table: Tensor) -> None:
        first, slabs = self._slab_count, len(table)
        self.slabs[first : first + slabs] = table
        self.family_of[first : first + slabs] = family
        self._slab_count += slabs

    def give(self, family: int, slots: Tensor) -> None:
        """Free slots. Waits for the device."""
        self._relist(family, slots)

    def _relist(self, family: int, more: Tensor) -> None:
        held = self.families[family]
        if held.free.is_cuda:  # it may be of another stream; what was launched there is before this
            held.free.record_stream(torch.cuda.current_stream(held.free.device))
        left = held.free[min(int(self.taken[family]), len(held.free)) :]
        held.free = torch.cat([left, more])
        self.taken[family] = 0

    # ---- rows by slot, for a table's handle

    def read(self, family: int, slots: Tensor) -> Tensor:
        """Weights as float32 [n, dim]; rows of slots that are -1 are left undefined."""
        layout = self.families[family].layout
        words = 4 * layout.weight_units
        raw = self._move(slots, None, words, _WEIGHTS, 0, layout.weight_stride)
        return raw.view(layout.weight_type)[:, : layout.dim].to(torch.float32)

    def write(self, family: int, slots: Tensor, weights: Tensor) -> None:
        """Weights from float32 [n, dim], each slot once."""
        layout = self.families[family].layout
        padded = torch.zeros(
            len(slots),
            _UNIT * layout.weight_units // layout.weight_type.itemsize,
            dtype=layout.weight_type,
            device=slots.device,
        )
        padded[:, : layout.dim] = weights.to(layout.weight_type)
        self._move(slots, padded.view(torch.int32), 4 * layout.weight_units, _WEIGHTS, 0, layout.weight_stride)

    def read_state(self, family: int, column: Column, slots: Tensor) -> Tensor:
        """A state column, [n, width]; undefined for slots of -1."""
        layout = self.families[family].layout
        return self._move(slots, None, column.width, _TAILS, layout.state_at(column.name), layout.tail_stride).view(
            torch.float32
        )

    def write_state(self, family: int, column: Column, slots: Tensor, values: Tensor) -> None:
        """A state column from float32 [n, width]."""
        layout = self.families[family].layout
        at = layout.state_at(column.name)
        self._move(slots, values.contiguous().view(torch.int32), column.width, _TAILS, at, layout.tail_stride)

    def read_scores(self, family: int, slots: Tensor) -> Tensor:
        """Scores, float64 [n]; undefined for slots of -1."""
        layout = self.families[family].layout
        return self._move(slots, None, 2, _TAILS, layout.score_at, layout.tail_stride).view(torch.float64).view(-1)

    def write_scores(self, family: int, slots: Tensor, scores: Tensor) -> None:
        """Scores from float64 [n]."""
        layout = self.families[family].layout
        self._move(slots, scores.contiguous().view(torch.int32), 2, _TAILS, layout.score_at, layout.tail_stride)

    def read_flags(self, family: int, slots: Tensor) -> Tensor:
        """Flags, int32 [n]; undefined for slots of -1."""
        layout = self.families[family].layout
        return self._move(slots, None, 1, _TAILS, layout.flags_at, layout.tail_stride).view(-1)

    def add_flags(self, family: int, slots: Tensor, flags: int) -> None:
        """Set flags of rows, each slot once."""
        self.set_flags(family, slots, self.read_flags(family, slots) | flags)

    def set_flags(self, family: int, slots: Tensor, flags: Tensor) -> None:
        """Flags, int32 [n], each slot once."""
        layout = self.families[family].layout
        self._move(slots, flags[:, None].contiguous(), 1, _TAILS, layout.flags_at, layout.tail_stride)

    def pack(self, family: int, slots: Tensor) -> Tensor:
        """Whole rows as they are below all memory, uint8 [n, packed.bytes]."""
        held = self.families[family]
        layout, packed = held.layout, held.packed.format
        weights = self._move(slots, None, 4 * layout.weight_units, _WEIGHTS, 0, layout.weight_stride)
        parts = [weights.view(torch.uint8)[:, : packed.weight_bytes]]
        if layout.state_floats:
            state = self._move(slots, None, layout.state_floats, _TAILS, 0, layout.tail_stride)
            parts.append(state.view(torch.uint8))
        scores = self._move(slots, None, 2, _TAILS, layout.score_at, layout.tail_stride)
        return torch.cat([*parts, scores.view(torch.uint8)], dim=1)

    def unpack(self, family: int, slots: Tensor, rows: Tensor) -> None:
        """Put whole rows at slots, each once, where they differ from nothing below."""
        held = self.families[family]
        layout, packed = held.layout, held.packed.format
        weights = torch.zeros(len(slots), _UNIT * layout.weight_units, dtype=torch.uint8, device=slots.device)
        weights[:, : packed.weight_bytes] = rows[:, : packed.weight_bytes]
        self._move(slots, weights.view(torch.int32), 4 * layout.weight_units, _WEIGHTS, 0, layout.weight_stride)
        tails = rows[:, packed.weight_bytes :].clone(memory_format=torch.contiguous_format).view(torch.int32)
        if layout.state_floats:
            state = tails[:, : layout.state_floats].contiguous()
            self._move(slots, state, layout.state_floats, _TAILS, 0, layout.tail_stride)
        scores = tails[:, layout.state_floats :].contiguous()
        self._move(slots, scores, 2, _TAILS, layout.score_at, layout.tail_stride)
        self.set_flags(family, slots, torch.zeros_like(slots))

    def _move(
        self, slots: Tensor, given: Tensor | None, words: int, column: int, first_word: int, stride: int
    ) -> Tensor:
        n = len(slots)
        buffer = torch.empty(n, words, dtype=torch.int32, device=slots.device) if given is None else given
        if n:
            width = power_of_two(words)
            block = max(1, 1024 // width)
            kernels.move[(blocks(n, block),)](
                self.anchor, self.slabs, slots, buffer, n, words, column, first_word, stride,
                READ=given is None, SLAB_BITS=self.slab_bits, W=width, BLOCK=block,
            )  # fmt: skip
        return buffer
