"""Which rank of which job this process is, of those that torch.distributed or torchrun started together.

A job draws its name once, in the store of its process group, where all ranks find it: another job, also one that begins
at the same address, has another name. A process remembers its own when the group is gone.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from shoal import torch_private

_KEY = "shoal/job"
# torchrun's: its store is the same after a restart of the workers, which is another job.
_ATTEMPT = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_NONCE = os.urandom(16).hex()


@dataclass(frozen=True)
class JobRank:
    """A rank of a job. process: no other process has it, also of those that are forked from one."""

    job: str
    rank: int
    process: str


# The store of the process group that was asked last, and what it answered: a store may be on another machine.
_asked: tuple[Any, str] | None = None
_newest: JobRank | None = None


def this_rank() -> JobRank | None:
    """What this process is, or was before its process group was destroyed; None where it has always been alone."""
    global _newest
    if not dist.is_available() or not dist.is_initialized():
        return _newest
    if dist.get_world_size() < 2:
        return None
    job = _job()
    if job is not None:
        _newest = JobRank(job, dist.get_rank(), f"{_NONCE}-{os.getpid()}")
    return None if job is None else _newest


def _job() -> str | None:
    global _asked
    try:
        store = torch_private.default_store()
        if _asked is None or _asked[0] is not store:
            key = "/".join([_KEY, *(os.environ.get(name, "") for name in _ATTEMPT)])
            # The first rank to ask decides; the others get what it set.
            _asked = store, store.compare_set(key, "", os.urandom(16).hex()).decode()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None  # a backend without a store, or one whose host is gone
    return _asked[1]
