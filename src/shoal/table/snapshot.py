"""A table's content as tensors, and back: what state_dict and deepcopy move."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.config import Table
from shoal.table.group import Group
from shoal.table.host import HostTable


@dataclass(frozen=True)
class TableContent:
    """All that a table remembers: rows, in ascending order of keys where `take` made it."""

    keys: Tensor  # int64 [n]
    weights: Tensor  # [n, dim] in the table's dtype
    state: Mapping[str, Tensor]  # float32 [n, width] by column; one that is not there is as at birth
    scores: Tensor  # float64 [n]
    step: int


def content_bytes(config: Table, rows: int) -> int:
    """Bytes of the content of a table with that many rows."""
    return rows * (config.row_bytes + 16)


def take(group: Group, number: int) -> TableContent:
    """A table's content now. Call while reading."""
    table = group.tables[number]
    keys = table.all_keys()
    slots = table.find(keys)
    storage = table.storage
    return TableContent(
        keys,
        storage.read(slots, table.missing, keys).to(getattr(torch, table.config.dtype)),
        {column.name: storage.read_state(column, slots) for column in table.config.columns},
        storage.read_scores(slots),
        table.step,
    )


def put(group: Group, contents: Mapping[int, TableContent]) -> None:
    """Replace the rows of tables; if there is no room for all, none changes. Call while writing.

    REQUIRES: the contents fit the tables' configs.
    """
    filled = {number: _filled(group.tables[number].config, group.seed, content) for number, content in contents.items()}
    group.clear(list(contents))
    for number, made in filled.items():
        group.tables[number].take_over(made)


def _filled(config: Table, seed: int, content: TableContent) -> HostTable:
    table = HostTable(config, seed)
    slots = table.upsert(content.keys)
    table.storage.write(slots, content.weights.to(torch.float32))
    for column in config.columns:
        if column.name in content.state:
            table.storage.write_state(column, slots, content.state[column.name])
    table.storage.write_scores(slots, content.scores)
    table.step = content.step
    return table
