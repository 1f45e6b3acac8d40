"""Which rows of a group's memory are in use, and so may not leave it."""

from collections.abc import Mapping

from shoal import _native
from shoal.table.host.forward import Forward, pin
from shoal.table.host.staging import HostStaging
from shoal.table.lease import Leases


class InUse:
    """The batches whose rows must stay: those that wait for a backward, the one that a lookup is bringing, and those
    that are staged. Tables call it, so it does not know their group: they would keep each other, and files, alive."""

    def __init__(self, leases: Leases[Forward], staged: Mapping[tuple[int, int], HostStaging]) -> None:
        self._leases = leases
        self._staged = staged
        self.arriving: Forward | None = None  # its rows are being brought

    def pin(self, number: int, pins: _native.Pins, staged: bool, finding: bool) -> None:
        """Pin the rows of a table. `staged`: also those of staged batches; `finding`: also of the ones that are still
        looking for their rows, which they do under the shared lock of the indexes."""
        for forward in self._leases.live():
            if not forward.applied:
                forward.pin(number, pins)
        if self.arriving is not None:
            self.arriving.pin(number, pins)
        if staged:
            for staging in list(self._staged.values()):
                if finding or staging.is_found:
                    pin(staging.plan, staging.bags, number, pins)

    def most_keys(self) -> int:
        """Returns an upper bound of the rows that wait for a backward."""
        return sum(forward.keys for forward in self._leases.live() if not forward.applied)
