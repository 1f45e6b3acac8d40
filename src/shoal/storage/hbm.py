"""Rows in device memory: slabs of equal length behind a table of addresses, shared by the tables of a group.

Slots are numbers of the whole group. A family is the tables whose rows have one layout; each slab belongs to one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Column
from shoal.errors import CapacityError
from shoal.ops.launch import blocks, power_of_two
from shoal.ops.rows import triton as kernels

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_UNIT = 16  # bytes: rows begin at multiples of it, for wide loads
_MOST_SLOTS = 2**31
_WEIGHTS, _TAILS = 0, 1
ERASED_FLAG = 4


def _units(size: int) -> int:
    return (size + _UNIT - 1) // _UNIT


@dataclass(frozen=True)
class Layout:
    """What a row is made of."""

    dim: int
    dtype: str
    columns: tuple[Column, ...]

    @property
    def weight_type(self) -> torch.dtype:
        """The type of the weights."""
        return _DTYPES[self.dtype]

    @property
    def weight_stride(self) -> int:
        """From one row's weights to the next one's, in units of 16 bytes."""
        return _units(self.dim * self.weight_type.itemsize)

    @property
    def state_floats(self) -> int:
        """Floats of state."""
        return sum(column.width for column in self.columns)

    @property
    def tail_stride(self) -> int:
        """From one row's tail (state, score and flags) to the next one's, in units of 16 bytes."""
        return _units(4 * (self.state_floats + 3))

    @property
    def score_at(self) -> int:
        """The word of the tail where the score begins, an even one."""
        return (self.state_floats + 1) // 2 * 2

    @property
    def flags_at(self) -> int:
        """The word of the tail with the flags: between state and score where one is left over, else behind them."""
        return self.state_floats if self.state_floats % 2 else self.state_floats + 2

    @property
    def row_bytes(self) -> int:
        """Bytes of device memory that a row takes."""
        return _UNIT * (self.weight_stride + self.tail_stride)

    def state_at(self, name: str) -> int:
        """The first word of a state column in the tail."""
        at = 0
        for column in self.columns:
            if column.name == name:
                break
            at += column.width
        return at


class _Family:
    """The slabs and free slots of one layout."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.first_state = torch.tensor(
            [column.initial for column in layout.columns for _ in range(column.width)] or [0.0],
            dtype=torch.float32,
        ).to(device)
        self.free = torch.empty(0, dtype=torch.int32, device=device)
        self.slots = 0


class HbmStorage:
    """Rows of a group's tables in slabs of device memory. Growing moves no row."""

    def __init__(self, anchor: Tensor, layouts: Sequence[Layout], taken: Tensor, slab_bits: int = 15) -> None:
        device = anchor.device
        self.anchor = anchor
        self.slab_bits = slab_bits
        self.families = [_Family(layout, device) for layout in layouts]
        # How many of each family's free slots the kernels took since the list was made.
        self.taken = taken
        self._memory: list[Tensor] = []
        most = _MOST_SLOTS >> slab_bits
        # Weights and tails of each slab, in units from the anchor, and the family it belongs to.
        self.slabs = torch.zeros(min(most, 1 << 16), 2, dtype=torch.int64, device=device)
        self.family_of = torch.full((len(self.slabs),), -1, dtype=torch.int32, device=device)
        self._slab_count = 0

    @property
    def bound(self) -> int:
        """All slots are below it."""
        return self._slab_count << self.slab_bits

    @property
    def bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(memory.numel() for memory in self._memory)

    def supply(self, family: int) -> int:
        """Slots that were free when the list of them was made."""
        return len(self.families[family].free)

    def grow(self, family: int, rows: int) -> None:
        """Add slabs for so many rows, at least one; the last slab has no more than it must.

        Waits for the device: it asks how many of the free slots were taken.
        """
        held = self.families[family]
        layout, slab_rows = held.layout, 1 << self.slab_bits
        slabs = (rows + slab_rows - 1) // slab_rows
        first = self._slab_count
        if first + slabs > len(self.slabs):
            raise CapacityError(
                f"[device] a collection's tables have up to {len(self.slabs)} slabs of {slab_rows} rows; these have "
                f"{first}, and {rows} more rows were wanted. Spread the tables over several collections."
            )
        lengths = torch.full((slabs,), slab_rows)
        lengths[-1] = rows - (slabs - 1) * slab_rows
        slab_bytes = slab_rows * layout.row_bytes
        memory = torch.empty(int(lengths.sum()) * layout.row_bytes, dtype=torch.uint8, device=self.anchor.device)
        begins = (memory.data_ptr() - self.anchor.data_ptr() + slab_bytes * torch.arange(slabs)) // _UNIT
        table = torch.stack([begins, begins + lengths * layout.weight_stride], dim=1).to(self.anchor.device)
        begin = first << self.slab_bits
        fresh = torch.arange(begin, begin + int(lengths.sum()), dtype=torch.int32).to(self.anchor.device)
        self._relist(family, fresh)  # the last that asks for memory
        self.slabs[first : first + slabs] = table
        self.family_of[first : first + slabs] = family
        self._slab_count += slabs
        self._memory.append(memory)
        held.slots += len(fresh)

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
        words = 4 * layout.weight_stride
        raw = self._move(slots, None, words, _WEIGHTS, 0, layout.weight_stride)
        return raw.view(layout.weight_type)[:, : layout.dim].to(torch.float32)

    def write(self, family: int, slots: Tensor, weights: Tensor) -> None:
        """Weights from float32 [n, dim], each slot once."""
        layout = self.families[family].layout
        padded = torch.zeros(
            len(slots),
            _UNIT * layout.weight_stride // layout.weight_type.itemsize,
            dtype=layout.weight_type,
            device=slots.device,
        )
        padded[:, : layout.dim] = weights.to(layout.weight_type)
        self._move(slots, padded.view(torch.int32), 4 * layout.weight_stride, _WEIGHTS, 0, layout.weight_stride)

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

    def add_flags(self, family: int, slots: Tensor, flags: int) -> None:
        """Set flags of rows, each slot once."""
        layout = self.families[family].layout
        at = layout.flags_at
        held = self._move(slots, None, 1, _TAILS, at, layout.tail_stride)
        self._move(slots, held | flags, 1, _TAILS, at, layout.tail_stride)

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
