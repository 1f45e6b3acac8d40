"""A lookup in host memory, in the form that the kernels take. Made once for each order of a batch's features."""

from collections.abc import Sequence

from shoal import _native
from shoal.table.host.table import HostTable
from shoal.table.parts import Part, parts_of

POOLINGS = {"none": _native.Pooling.none, "sum": _native.Pooling.sum, "mean": _native.Pooling.mean}


class Plan:
    """The parts of a lookup, and their form for the kernels."""

    def __init__(self, tables: Sequence[HostTable], names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.parts, self.columns, self.slot_lists = parts_of([table.config for table in tables], names)
        self.lookup = _native.Lookup()
        for part in self.parts:
            table = tables[part.table]
            self.lookup.add(
                table.index.native,
                table.storage.rows,
                table.tally,
                part.source,
                part.slot_list,
                POOLINGS[table.config.pooling],
                part.feature.mode == "write",
                table.missing,
                part.column,
                part.trains,
                table.below is not None,
            )

        # What is below memory: the parts of tables that have something there.
        self.fetching = [part for part in self.parts if tables[part.table].below is not None]
        self.deep = sorted({part.table for part in self.fetching})
        self.deep_parts = [[at for at, part in enumerate(self.parts) if part.table == number] for number in self.deep]

        # Backward: the tables that train, and which of the parts feed them.
        self.trained = sorted({part.table for part in self.parts if part.trains})
        self.training_parts = [at for at, part in enumerate(self.parts) if part.trains]
        self.update_features = [
            self._update_feature(tables, self.parts[at], self.trained.index(self.parts[at].table))
            for at in self.training_parts
        ]
        # Per-sample weights have a gradient wherever the output depends on them.
        weighted = [part for part in self.parts if part.feature.mode != "write"]
        self.weight_features = [self._update_feature(tables, part, 0) for part in weighted]
        self.weight_rows = [tables[part.table].storage.rows for part in weighted]
        self.weight_missing = [tables[part.table].missing for part in weighted]

    @staticmethod
    def _update_feature(tables: Sequence[HostTable], part: Part, table: int) -> _native.UpdateFeature:
        pooling = POOLINGS[tables[part.table].config.pooling]
        return _native.UpdateFeature(table, part.source, part.slot_list, pooling, part.column)
