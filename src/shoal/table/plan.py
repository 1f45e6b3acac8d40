"""How the features of a batch, in the order it brings them, meet the tables of a group. Made once for each order."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal import _native
from shoal.config import Feature
from shoal.errors import InputError, NotFoundError
from shoal.table.host import HostTable

POOLINGS = {"none": _native.Pooling.none, "sum": _native.Pooling.sum, "mean": _native.Pooling.mean}


@dataclass(frozen=True)
class Part:
    """One feature of one table: where it stands in the batch and in the output."""

    table: int
    feature: Feature
    source: int
    copy: int  # which of the batch's slots are this table's; a feature may feed several
    column: int
    dim: int
    trains: bool  # inserts unseen keys and updates rows, in training


class Plan:
    """The parts of a lookup, and their form for the kernels."""

    def __init__(self, tables: Sequence[HostTable], names: Sequence[str]) -> None:
        sources = {name: number for number, name in enumerate(names)}
        if len(sources) < len(names):
            raise InputError(f"[lookup] wanted each feature of the batch once; got {', '.join(map(repr, names))}.")
        self.names = tuple(names)
        self.parts: list[Part] = []
        self.columns = 0
        uses: dict[str, int] = {}
        for number, table in enumerate(tables):
            for feature in table.config.features:
                if feature.name not in sources:
                    raise NotFoundError(
                        f"[lookup] table {table.config.name!r} wants the feature {feature.name!r}; the batch has "
                        f"{', '.join(map(repr, names)) or 'no features'}."
                    )
                trains = feature.mode != "read" and table.config.optimizer is not None
                copy = uses[feature.name] = uses.get(feature.name, -1) + 1
                part = Part(number, feature, sources[feature.name], copy, self.columns, table.config.dim, trains)
                self.parts.append(part)
                if table.config.pooling != "none":  # sequences have an output each, and no columns
                    self.columns += table.config.dim
        unknown = [name for name in names if name not in uses]
        if unknown:
            raise NotFoundError(
                f"[lookup] no table has the feature {', '.join(map(repr, unknown))} of the batch; the tables have "
                f"{', '.join(map(repr, uses))}. Leave it out, or name it in a Table's features."
            )
        self.lookup = _native.Lookup()
        for part in self.parts:
            table = tables[part.table]
            self.lookup.add(
                table.index.native,
                table.storage.rows,
                table.tally,
                part.source,
                part.copy,
                POOLINGS[table.config.pooling],
                part.feature.mode == "write",
                table.missing,
                part.column,
                part.trains,
            )
        self.copies = max(uses.values()) + 1

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
        return _native.UpdateFeature(table, part.source, part.copy, pooling, part.column)
