"""What is done around a group's lock."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from shoal import torch_private
from shoal.errors import ConfigError, OutOfMemoryError
from shoal.table.refused import is_refused_memory

if TYPE_CHECKING:
    from shoal.table.group import Group


def in_lock_order(groups: "Iterable[Group]") -> "list[Group]":
    """The groups, each once, in the one order in which all code locks several, so that two threads that do so do not
    wait for each other."""
    return sorted(set(groups), key=lambda group: (group.name, id(group)))


class Around:
    """What is done around a group's lock: its device is the current one, and memory that was refused meanwhile is an
    OutOfMemoryError that says where."""

    __slots__ = ("_before", "_entered", "_group")

    def __init__(self, group: "Group", entered: Callable[[], bool | None]) -> None:
        self._group = group
        self._entered = entered
        self._before: int | None = None

    def begin(self) -> None:
        """Before the lock."""
        self._group.process.require(self._group.name)
        if self._group.retired is not None:
            raise ConfigError(self._group.retired)
        if self._group.device.type == "cuda":
            # Kernels are launched on the current device.
            before = torch_private.current_device()
            if before != self._group.device.index:
                self._before = before
                torch.cuda.set_device(self._group.device)

    def entered(self) -> bool | None:
        """Once it is held. False: it is let go for `settle`, and entered again."""
        return self._entered()

    def settle(self) -> None:
        """Do what interrupted calls left, for those who may not change anything."""
        with self._group.writing():
            pass

    def leave(self, error: BaseException | None) -> None:
        """Once it is not held any more, or could not be."""
        if self._before is not None:
            torch.cuda.set_device(self._before)
        if error is None or not is_refused_memory(error):
            return
        text = str(error)
        if not isinstance(error, OutOfMemoryError):
            who, tier = ("the operating system", "Dram") if self._group.device.type == "cpu" else ("the device", "Hbm")
            text = (
                f"{who} refused memory for a tensor. Free memory, use smaller batches, or bound the tables with "
                f"Table(tiers=[{tier}(...)])."
            )
        refused = OutOfMemoryError(f"[{self._group.name}] {text}")
        for note in getattr(error, "__notes__", ()):  # of what it left
            refused.add_note(note)
        raise refused from error
