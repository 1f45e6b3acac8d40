"""Which rank of a job of several processes writes a log: a second one would replace what the first wrote.

`WRITER.json` in the log's folder names the job, the rank and the process that wrote last. A rank that opens the log is
refused if another wrote it; it names itself when it is about to write.
"""

from contextlib import suppress
from typing import Any

from shoal.errors import CheckpointError, ShoalError
from shoal.log.files import Files, read_sealed_json, sealed_json, write_file
from shoal.table import JobRank, this_rank

ADVICE = (
    "Give shoal.save rank= and ranks= to save a part on each rank, or save and commit on one rank only, or give each "
    "rank a path of its own; ChangeLog(path, mode='r') reads while another process writes."
)


_MOST_BYTES = 64 << 10


def require_own(files: Files, where: str) -> None:
    """Raises CheckpointError where another rank of the same job wrote a log. For a process that has never been one of
    several nothing is checked. REQUIRES: the log's write lock is held."""
    _checked(files, where)


def claim(files: Files, where: str, claimed: JobRank | None) -> JobRank | None:
    """Writes that this rank writes a log, before the rank's first byte; returns the rank. claimed: what an earlier call
    returned. Raises as `require_own` does."""
    here = this_rank()
    if here is None or here == claimed:
        return here
    value = {"job": here.job, "rank": here.rank, "process": here.process}
    if _checked(files, where) != value:
        write_file(files.writer, sealed_json(value))
    return here


def _checked(files: Files, where: str) -> dict[str, Any]:
    """Returns what WRITER.json says, checked."""
    here = this_rank()
    found: dict[str, Any] = {}
    if here is None:
        return found
    with suppress(ShoalError):  # not there, or damaged: then nothing is known
        found = read_sealed_json(files.writer, limit=_MOST_BYTES)
    # A process may be another rank of a group that it joins anew, and goes on with its own log.
    is_own = found.get("rank") == here.rank or found.get("process") == here.process
    if found.get("job") == here.job and not is_own:
        raise CheckpointError(
            f"[{where}] wanted a log that no other rank of this job writes; rank {found.get('rank')} wrote it, and "
            f"this is rank {here.rank}: its rows would replace those. {ADVICE}"
        )
    return found
