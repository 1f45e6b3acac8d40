"""Which rank of a job of several processes writes a log: a second one would replace what the first wrote.

`WRITER.json` beside the manifest names the job and the rank that wrote last. A job draws its name once, in the store of
its process group, where all ranks find it: another job, also one that begins at the same address, has another name.
"""

import os
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shoal.errors import CheckpointError, ShoalError
from shoal.log.files import Files, read_sealed_json, sealed_json, write_file

_KEY = "shoal/job"
ADVICE = (
    "Give shoal.save rank= and ranks= to save a part on each rank, or save and commit on one rank only, or give each "
    "rank a path of its own; ChangeLog(path, mode='r') reads beside a writer."
)
# The store of the process group that was asked last, and what it answered: a store may be on another machine.
_asked: tuple[Any, str] | None = None


def claim(files: Files, where: str) -> None:
    """Say that this rank writes a log. Raises CheckpointError where another rank of the same job did. Outside of a job
    of several ranks nothing is said or asked. REQUIRES: the log's write lock."""
    here = this_rank()
    if here is None:
        return
    found: dict[str, Any] = {}
    with suppress(ShoalError):  # not there, or damaged: then nothing is known
        found = read_sealed_json(files.writer)
    if found.get("job") == here["job"] and found.get("rank") != here["rank"]:
        raise CheckpointError(
            f"[{where}] wanted a log that no other rank of this job writes; rank {found.get('rank')} wrote it, and "
            f"this is rank {here['rank']}: its rows would replace those. {ADVICE}"
        )
    if found != here:
        write_file(files.writer, sealed_json(here))


def this_rank() -> dict[str, Any] | None:
    """The job and the rank of this process; None where it is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    job = _job()
    return None if job is None else {"job": job, "rank": dist.get_rank()}


def _job() -> str | None:
    global _asked
    try:
        store = dist.distributed_c10d._get_default_store()
        if _asked is None or _asked[0] is not store:
            # The first rank to ask decides; the others get what it set.
            _asked = store, store.compare_set(_KEY, "", os.urandom(16).hex()).decode()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None  # a backend without a store, or one whose host is gone
    return _asked[1]
