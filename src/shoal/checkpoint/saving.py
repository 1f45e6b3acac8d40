"""Saving tables: a log whose newest version is a snapshot of them as they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.loading import require_path
from shoal.checkpoint.progress import progress_bar
from shoal.checkpoint.ranks import Rank, require_kind
from shoal.log import ChangeLog
from shoal.log.tables import LoggedTables


def save(
    path: str | Path,
    bags: Any,
    *,
    dense: Any = None,
    optimizer: Any = None,
    step: int | None = None,
    event_time: float | None = None,
    metadata: Mapping[str, Any] | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: bool | None = None,
) -> int:
    """Write all rows of tables, what they remember, dense weights and optimizers to a folder; returns the version.

    bags: a collection, or a list of them. A checkpoint that is there already is replaced once the new one is complete,
    as one version more. `ChangeLog(path)` can go on from it. rank, ranks: each of several processes saves its part,
    in which no other's keys are.
    progress: whether to show a bar; None is where standard error is a terminal.
    """
    require_path("save", path)
    here = Rank(rank, ranks)
    require_kind(Path(path), here)
    rows = sum(len(table.table) for table in LoggedTables(f"save {path}", bags).values())
    with ChangeLog(str(here.folder(Path(path)))) as log, progress_bar("saving", rows, progress) as bar:
        return log.rewrite(
            bags,
            step=step,
            event_time=event_time,
            dense=dense,
            optimizer=optimizer,
            metadata=metadata,
            progress=bar,
        )
