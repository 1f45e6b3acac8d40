"""Saving tables: a log whose newest version is a snapshot of them as they are."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.checkpoint.loading import require_path
from shoal.checkpoint.progress import progress_bar
from shoal.checkpoint.ranks import Rank, require_kind, save_id_of
from shoal.errors import ShoalError
from shoal.log import ChangeLog, Commit
from shoal.log.files import FilePath, Files
from shoal.log.reader import LogReader
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
    rng: bool = True,
    rank: int = 0,
    ranks: int = 1,
    save_id: str | None = None,
    progress: bool | None = None,
    trust: bool = False,
) -> int:
    """Write all rows of tables, what they remember, dense weights and optimizers to a folder; returns the version.

    A checkpoint that is there already is replaced once the new one is complete, as one version more. `ChangeLog(path)`
    can go on from it. A path that another rank of the same torch.distributed job wrote to is refused.

    bags: a collection, a module that holds some, or a list of them.
    dense, optimizer: as `ChangeLog.commit` takes them.
    step, event_time, metadata: of the user's own; `load` and `recover` give them back.
    rng: whether the states of torch's generators are saved, for `recover` and `load(rng=True)`.
    rank, ranks: each of several processes saves its part, in which no other's keys are, with one `step`.
    save_id: what all parts of one save have, and no other save: parts of two saves are not loaded together. Ranks of a
        torch.distributed job need not give it, also after `destroy_process_group`; each of several ranks that are not
        must, and the same.
    progress: whether to show a bar; None is where standard error is a terminal.
    trust: as `ChangeLog` takes it: whether files of another user may be there.

    Each rank's part is replaced by itself, and no rank waits for another: should one die before its own part is, the
    parts are of two saves, and none is loaded until all have saved again. Save to another folder to have the last one
    until then. Where a save fails on one rank, all ranks save again: of ranks of a job, the second save of a step is
    another than the first.
    """
    require_path("save", path)
    here = Rank(rank, ranks)
    require_kind(path, here)
    together = save_id_of(path, here, step, save_id)
    rows = sum(len(table.table) for table in LoggedTables(f"save {path}", bags).values())
    version = None if ranks == 1 else _version_together(path, here, together)
    with ChangeLog(here.folder(path), rng=rng, trust=trust) as log, progress_bar("saving", rows, progress) as bar:
        return log.rewrite(
            bags,
            step=step,
            event_time=event_time,
            dense=dense,
            optimizer=optimizer,
            metadata=metadata,
            progress=bar,
            version=version,
            save_id=together,
        )


def _version_together(path: str | Path, here: Rank, save_id: str | None) -> int:
    """The version that a rank's part gets: the same for all ranks of a save, whoever is first. Parts that were left at
    different versions, because some ranks died, come together again with the next save."""
    versions = {}
    saving = 0
    for rank in range(here.ranks):
        commit, versions[rank] = _newest(Rank(rank, here.ranks).folder(path))
        if commit is not None and rank != here.rank and commit.save == save_id:
            saving = max(saving, commit.version)
    return saving if saving > versions[here.rank] else max(versions.values()) + 1


def _newest(part: FilePath) -> tuple[Commit | None, int]:
    """The newest commit of a part, and the highest number that it cannot use again: a repair may have skipped some."""
    with suppress(ShoalError):  # not there, being made, or damaged
        reader = LogReader(Files(part))
        if (commit := reader.newest()) is not None:
            return commit, reader.manifest.after(commit.version) - 1
    return None, 0
