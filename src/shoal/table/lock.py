"""What a group does before it takes its lock, and after it lets it go."""

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
    """Makes a group's device the current one while the group's lock is held, and turns memory that was refused
    meanwhile into an OutOfMemoryError that says where. `_native.Held` calls its methods."""

    __slots__ = ("_before", "_entered", "_group")

    def __init__(self, group: "Group", entered: Callable[[], bool | None]) -> None:
        self._group = group
        self._entered = entered
        self._before: int | None = None

    def begin(self) -> None:
        """Called before the lock is taken. Raises where the group may not be used."""
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
        """Called once the lock is held. False: `settle` has to run without the lock, which is then taken again."""
        return self._entered()

    def settle(self) -> None:
        """Do what interrupted calls left: a holder of the shared lock may not."""
        with self._group.writing():
            pass

    def leave(self, error: BaseException | None) -> None:
        """Called after the lock was released, or could not be taken."""
        if self._before is not None:
            torch.cuda.set_device(self._before)
        if error is None or not is_refused_memory(error):
            return
        text = str(error)
        if not isinstance(error, OutOfMemoryError):
            what, tier = ("the operating system", "Dram") if self._group.device.type == "cpu" else ("the device", "Hbm")
            text = (
                f"{what} refused memory for a tensor. Free memory, use smaller batches, or bound the tables with "
                f"Table(tiers=[{tier}(...)])."
            )
        refused = OutOfMemoryError(f"[{self._group.name}] {text}")
        for note in getattr(error, "__notes__", ()):  # of what it left
            refused.add_note(note)
        raise refused from error
