"""The chain of a log's commits: each names the one before it, so that commits of another writer are found."""

from collections.abc import Iterable

from shoal.log.commit import Commit
from shoal.log.manifest import Manifest


def broken(before: Commit, commit: Commit) -> str | None:
    """Returns why `commit` was not written right after `before`; None where it was. REQUIRES: its number is the
    next."""
    advice = "Two writers wrote to the log at once, or commits of another copy were put into it."
    if before.epoch and not commit.epoch:
        return f"it is of format 1, and version {before.version} before it of format 2. {advice}"
    if commit.epoch < before.epoch:
        return f"its writer has epoch {commit.epoch}, and that of version {before.version} {before.epoch}. {advice}"
    # A commit of format 1 names none; nor does a commit after a snapshot of format 1, which has no id.
    if not commit.epoch or (commit.before is None and not before.epoch) or not before.id:
        return None
    if commit.before == before.id:
        return None
    named = "none" if commit.before is None else commit.before
    return f"it names {named} as the commit before it; version {before.version} is {before.id}. {advice}"


class Chain:
    """Checks commits as they are read, in order, against the one before each and against those of snapshots."""

    def __init__(self, manifest: Manifest, snapshots: Iterable[Commit] = ()) -> None:
        self._manifest = manifest
        self._known = {one.version: one for one in snapshots}

    def add(self, commit: Commit) -> str | None:
        """Takes the next commit. Returns why it does not follow the one before, or is not the one of the snapshot; None
        where all is well."""
        at = self._manifest.before(commit.version)
        problem = None
        if at in self._known:
            problem = broken(self._known[at], commit)
        elif at == 0 and commit.before is not None:
            problem = f"it names {commit.before} as the commit before it, and is the first one of the log."
        same = self._known.get(commit.version)
        if problem is None and same is not None and same.id and same.id != commit.id:
            problem = f"it is {commit.id}; the snapshot of that version is of {same.id}."
        self._known[commit.version] = commit
        self._known.pop(at, None)
        return problem
