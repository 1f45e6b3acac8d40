"""How the features of a batch, in the order it brings them, meet the features of tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import Feature, Table
from shoal.errors import InputError, NotFoundError


@dataclass(frozen=True)
class Part:
    """One feature of one table: where it stands in the batch and in the output."""

    table: int
    feature: Feature
    source: int
    slot_list: int  # the number of this table's slot list: a feature has one for each table that it feeds
    column: int
    dim: int
    trains: bool  # inserts unseen keys and updates rows, in training


def parts_of(configs: Sequence[Table], names: Sequence[str]) -> tuple[list[Part], int, int]:
    """The parts of a lookup in the order of tables, the columns of its output, and how many slot lists it needs.

    Features that no table has are in no part: batches often carry more than one collection's features.
    """
    sources = {name: number for number, name in enumerate(names)}
    if len(sources) < len(names):
        raise InputError(f"[lookup] wanted each feature of the batch once; got {', '.join(map(repr, names))}.")
    parts: list[Part] = []
    columns = 0
    uses: dict[str, int] = {}
    for number, config in enumerate(configs):
        for feature in config.features:
            if feature.name not in sources:
                raise NotFoundError(
                    f"[lookup] table {config.name!r} wants the feature {feature.name!r}; the batch has "
                    f"{', '.join(map(repr, names)) or 'no features'}."
                )
            trains = feature.mode != "read" and config.optimizer is not None
            slot_list = uses[feature.name] = uses.get(feature.name, -1) + 1
            parts.append(Part(number, feature, sources[feature.name], slot_list, columns, config.dim, trains))
            if config.pooling != "none":  # sequences have an output each, and no columns
                columns += config.dim
    return parts, columns, max(uses.values()) + 1
