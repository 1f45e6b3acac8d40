"""What to do with ids that a table does not take."""

from typing import Any

import torch


def hint_for(ids: Any) -> str:
    """A sentence for the end of an error about these ids, with a space before it; nothing where none helps."""
    if getattr(ids, "dtype", None) == torch.uint64:
        return " Ids in uint64 become int64 by .view(torch.int64), which loses nothing, or by shoal.hash_ids."
    kind = getattr(getattr(ids, "dtype", None), "kind", "")  # of NumPy's arrays: strings and bytes
    if kind in ("U", "S", "T") or (isinstance(ids, list | tuple) and ids and isinstance(ids[0], str | bytes)):
        return " shoal.hash_ids makes int64 of strings."
    return ""
