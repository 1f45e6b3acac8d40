"""Which buckets belong to which rank, where the parts of a checkpoint are, and which parts were saved together."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from shoal.config.checked import integer
from shoal.errors import CheckpointError, InputError
from shoal.log.commit import MOST_SAVE_ID
from shoal.log.files import AnyPath, FilePath, as_path, names_in, size_of
from shoal.table import this_rank

_FOLDER = re.compile(r"rank-(\d{5})-of-(\d{5})")


@dataclass(frozen=True)
class Rank:
    """One of several processes that share tables by buckets."""

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        integer("rank", "ranks", self.ranks, low=1, high=99_999)
        integer("rank", "rank", self.rank, low=0, high=self.ranks - 1)

    def buckets(self, buckets: int) -> tuple[int, int]:
        """Returns the first bucket of the rank, and the one after its last."""
        return buckets * self.rank // self.ranks, buckets * (self.rank + 1) // self.ranks

    def folder(self, path: AnyPath) -> FilePath:
        """Returns the folder of the rank's part of a checkpoint."""
        root = as_path(path)
        return root if self.ranks == 1 else root / f"rank-{self.rank:05}-of-{self.ranks:05}"


# How often this process saved a step to a path, for the last saves. All ranks of a job get the same counts.
_saved: dict[tuple[str, int | None], int] = {}
_MOST_SAVED = 1024


def save_id_of(path: AnyPath, here: Rank, step: int | None, given: Any) -> str | None:
    """Returns the id that all parts of one save have; None where there is one rank and no id was given. No other rank
    is asked.

    Ranks of one torch.distributed job make it of the job's name, the step, and how often each has saved that step to
    that path, failed saves included. Raises InputError where no id was given and the ranks are not known to be of one
    job.
    """
    if given is not None:
        if not isinstance(given, str) or not 0 < len(given) <= MOST_SAVE_ID or not given.isprintable():
            raise InputError(
                f"[save {path}] save_id: wanted a printable str of at most {MOST_SAVE_ID} characters; got "
                f"{given!r:.100}."
            )
        return given
    if here.ranks == 1:
        return None
    known = this_rank()
    if known is None:
        raise InputError(
            f"[save {path}] save_id: wanted a str that the {here.ranks} ranks share, and another one for each save, as "
            f"it tells their parts from those of another run; got none, and torch.distributed, which would give one, "
            f"is not initialized or has no store. Initialize it, or draw an id in one rank (uuid.uuid4().hex) and give "
            f"it to all."
        )
    key = (str(as_path(path)), step)
    count = _saved[key] = _saved.pop(key, 0) + 1
    for oldest in list(_saved)[:-_MOST_SAVED]:
        del _saved[oldest]
    said = f"{known.job} {here.ranks} {step} {count}"
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def _rank_folders(path: AnyPath) -> dict[str, re.Match[str]]:
    return {name: match for name in names_in(as_path(path)) if (match := _FOLDER.fullmatch(name))}


def _has_log(path: FilePath) -> bool:
    return size_of(path / "MANIFEST.json") is not None


def require_kind(path: AnyPath, rank: Rank) -> None:
    """Raises CheckpointError where a folder has a checkpoint of another number of ranks: it would then have both."""
    others = [name for name, match in _rank_folders(path).items() if int(match[2]) != rank.ranks]
    if rank.ranks > 1 and _has_log(as_path(path)):
        others.append("MANIFEST.json")
    if others:
        raise CheckpointError(
            f"[save {path}] wanted a new folder, or one that {rank.ranks} ranks saved to; got one with {others[0]}. "
            f"Name another path."
        )


def require_no_ranks(where: str, path: AnyPath) -> None:
    """Raises CheckpointError where a folder has parts that several ranks saved: it is not a log itself."""
    if found := _rank_folders(path):
        raise CheckpointError(
            f"[{where}] wanted a log; got a folder that ranks saved to ({min(found)}). Use shoal.load, which reads all "
            f"parts, or recover this rank's own folder."
        )


def parts_of(path: AnyPath) -> list[FilePath]:
    """Returns the parts of a checkpoint: one for each rank that saved it."""
    found = _rank_folders(path)
    if _has_log(as_path(path)):
        if found:
            raise CheckpointError(
                f"[checkpoint {path}] holds a checkpoint of one process and parts of several ({min(found)}). Move "
                f"away what is not wanted."
            )
        return [as_path(path)]
    if not found:
        raise CheckpointError(f"[checkpoint {path}] wanted a checkpoint or a log; there is none. Is the path right?")
    counts = {int(match[2]) for match in found.values()}
    ranks = max(counts)
    wanted = [Rank(rank, ranks).folder(path) for rank in range(ranks)]
    missing = [part.name for part in wanted if not _has_log(part)]
    if len(counts) > 1 or missing:
        what = f"parts of {sorted(counts)} ranks" if len(counts) > 1 else f"no {', '.join(missing[:3])}"
        raise CheckpointError(
            f"[checkpoint {path}] wanted one part for each rank that saved; got {what}. Was a save interrupted?"
        )
    return wanted
