"""What a user says of a commit: step, event time, metadata."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.config.checked import integer
from shoal.errors import InputError
from shoal.log.commit import Commit, TableCommit
from shoal.records.excerpt import excerpt

# Of metadata. The code that reads it may itself be deep in calls.
_MOST_DEPTH = 64


@dataclass(frozen=True)
class Label:
    """What a user says of a commit. fields: of a commit that is made again, those that this Shoal does not know."""

    time: float
    step: int | None = None
    event_time: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    save: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def checked(where: str, step: Any, event_time: Any, metadata: Any) -> "Label":
        """Returns the label of a commit that is made now. Raises InputError where it is not what a commit can hold."""
        step = None if step is None else integer(where, "step", step, low=-(2**63), high=2**63 - 1)
        if event_time is not None and (not isinstance(event_time, (int, float)) or isinstance(event_time, bool)):
            raise InputError(f"[{where}] event_time: wanted a number; got {event_time!r:.100}.")
        if event_time is not None and not abs(event_time) <= 2**63:
            raise InputError(f"[{where}] event_time: wanted seconds; got {excerpt(event_time)}.")
        event_time = None if event_time is None else float(event_time)
        return Label(time.time(), step, event_time, checked_metadata(where, metadata))

    def commit(self, version: int, tables: Mapping[str, TableCommit], rng: Mapping[str, bytes]) -> Commit:
        """Returns a commit with this label, of these tables only."""
        return Commit(
            version,
            self.time,
            self.step,
            self.event_time,
            tables,
            rng=rng,
            metadata=self.metadata,
            save=self.save,
            fields=self.fields,
        )


def _depth(value: Any, most: int) -> int:
    """Returns how deep dicts and lists are in each other, or some number above `most`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return 1 + (max((_depth(one, most - 1) for one in inner), default=0) if most >= 0 else 0)


def checked_metadata(where: str, metadata: Any, name: str = "metadata") -> dict[str, Any]:
    """Returns what was given as `name`. Raises InputError where JSON does not keep it as it is."""
    if metadata is None:
        return {}
    if _depth(metadata, _MOST_DEPTH) > _MOST_DEPTH:
        raise InputError(f"[{where}] {name}: wanted a dict that is at most {_MOST_DEPTH} deep; got one that is deeper.")
    try:
        text = json.dumps(metadata, allow_nan=False, ensure_ascii=False).encode()
        same = isinstance(metadata, dict) and json.loads(text) == metadata
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise InputError(
            f"[{where}] {name}: wanted a dict of what JSON has, with str keys; got {excerpt(metadata)}. Turn other "
            f"values into str, numbers or lists."
        )
    return dict(metadata)
