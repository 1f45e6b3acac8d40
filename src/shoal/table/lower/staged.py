"""Rows from below that were read ahead of their use."""

import torch
from torch import Tensor

from shoal.storage import Answer

# What many have most of the time. Made once: a batch has one of each for every table.
NO_KEYS = torch.empty(0, dtype=torch.int64, device="cpu")
NOTHING = Answer(
    torch.empty(0, 0, dtype=torch.uint8, device="cpu"), torch.zeros(0, dtype=torch.bool, device="cpu"), has=0
)


class Staged:
    """What a storage said of some keys. It holds until one of them is written or erased."""

    def __init__(self) -> None:
        self.keys = NO_KEYS  # all different, in ascending order
        self.asked = NO_KEYS  # the same, and those that came to memory since
        self._rows, self._found, self._has = NOTHING
        self._spoiled: list[Tensor] = []
        self._expected = 0  # bytes that are being read
        self._is_answered = self._is_void = False
        self.is_unread = False  # and will say so when it is to be read

    def set(self, answer: Answer) -> None:
        """The answer, in the order of `keys`."""
        self._rows, self._found, self._has = answer
        self._is_answered = True

    def expect(self, row_bytes: int) -> None:
        """Its rows are being read from here on."""
        self._expected = len(self.keys) * row_bytes

    @property
    def bytes(self) -> int:
        """Bytes of memory that its rows have outside of the table's, or will have once they are read."""
        return self._rows.numel() if self._is_answered else self._expected

    @property
    def comes(self) -> bool:
        """Whether its rows are on their way: being read, or read and not placed."""
        return not self._is_answered or self.found > 0

    def spoil(self, keys: Tensor) -> None:
        """Hear that these keys are written or erased."""
        self._spoiled.append(keys)

    def settle(self, keys: Tensor) -> None:
        """Hear that the write of keys, of which it heard, is done: what is read from now on is right."""
        if self.is_unread:
            self._spoiled = [one for one in self._spoiled if one is not keys]

    def spoil_all(self) -> None:
        """Hear that every key is erased."""
        self._is_void = True

    @property
    def is_spoiled(self) -> bool:
        """Whether that concerns any of its keys."""
        if self._is_void or not self._spoiled:
            return self._is_void
        return bool(torch.isin(torch.cat(self._spoiled), self.asked).any())

    @property
    def found(self) -> int:
        """How many have a row."""
        return self._has

    def known(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each key's answer still holds, and where it is."""
        if self._is_void or not len(self._found):
            return torch.zeros(len(keys), dtype=torch.bool, device="cpu"), torch.zeros_like(keys)
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        holds = self.keys[at] == keys
        if self._spoiled:
            holds &= ~torch.isin(keys, torch.cat(self._spoiled))
        return holds, at

    def rows_at(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Rows, and whether there were any."""
        return self._rows[at], self._found[at]

    def place(self) -> tuple[Tensor, Tensor]:
        """The keys that were found and not spoiled, and their rows, which are the caller's from here on."""
        if not self._spoiled and not self._is_void and self._has == len(self.keys):
            keys, rows = self.keys, self._rows
            self.keys = NO_KEYS
            self.set(NOTHING)
            return keys, rows
        usable = self._found & self.known(self.keys)[0]
        keys, rows = self.keys[usable], self._rows[usable]
        # That the others are not below is still worth knowing.
        self.keys = self.keys[~self._found]
        self.set(
            Answer(
                torch.empty(len(self.keys), 0, dtype=torch.uint8, device="cpu"),
                torch.zeros(len(self.keys), dtype=torch.bool, device="cpu"),
                has=0,
            )
        )
        return keys, rows
