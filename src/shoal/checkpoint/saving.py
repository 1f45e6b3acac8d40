"""Saving tables: the result is a log whose newest version is a snapshot of them."""

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
    """Writes all rows of tables, what they remember, dense weights and optimizers to a folder; returns the version.

    A checkpoint that is there already is replaced once the new one is complete, as one more version. `ChangeLog(path)`
    can go on from it. A path that another rank of the same torch.distributed job wrote to is refused.

    bags: a collection, a module that holds some, or a list of them.
    dense, optimizer: as `ChangeLog.commit` takes them.
    step, event_time, metadata: the user's own, which `load` and `recover` return.
    rng: whether the states of torch's generators are saved, for `recover` and `load(rng=True)`.
    rank, ranks: each of several processes saves its part, which has keys that no other part has; all give one `step`.
    save_id: an id that all parts of one save share, and no other save: parts of two saves are not loaded together.
        Ranks of a torch.distributed job need not give it, even after `destroy_process_group`; other ranks must.
    progress: whether to show a bar; None means if standard error is a terminal.
    trust: whether files of another user may be there, as `ChangeLog` takes it.

    Each rank replaces its own part, and no rank waits for another. If one dies before it has replaced its part, the
    parts are of two saves, and cannot be loaded until all ranks have saved again; to keep the last checkpoint until
    then, save to another folder. Where a save fails on one rank, all ranks save again: in a job, the second save of a
    step gets another id than the first.
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
    """Returns the version that a rank's part gets. It is the same for all ranks of a save, in whatever order they save.
    Parts that are at different versions, because some ranks died, get one version again with the next save."""
    versions = {}
    saving = 0
    for rank in range(here.ranks):
        commit, versions[rank] = _newest(Rank(rank, here.ranks).folder(path))
        if commit is not None and rank != here.rank and commit.save == save_id:
            saving = max(saving, commit.version)
    return saving if saving > versions[here.rank] else max(versions.values()) + 1


def _newest(part: FilePath) -> tuple[Commit | None, int]:
    """Returns the newest commit of a part, and the highest version that it cannot use again: a repair may have skipped
    some."""
    with suppress(ShoalError):  # not there, being made, or damaged
        reader = LogReader(Files(part))
        if (commit := reader.newest()) is not None:
            return commit, reader.manifest.after(commit.version) - 1
    return None, 0
