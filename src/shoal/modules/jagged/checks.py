"""What the jagged and keyed tensors refuse, in the words of all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.errors import DeviceError, InputError, NotFoundError
from shoal.modules.jagged.known import can_be_read, certainly
from shoal.ops.hash_ids import hint_for

_INDEX_DTYPES = (torch.int32, torch.int64)
# Lengths that are compared with offsets at a time.
_COMPARED = 16384


def position(where: str, keys: list[str], key: str) -> int:
    """The place of `key` among the keys."""
    if key not in keys:
        raise NotFoundError(f"[{where}] wanted one of {', '.join(keys) or 'no keys'}; got {key!r}.")
    return keys.index(key)


def require_tensor(where: str, name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        hint = hint_for(given) if name == "values" else ""
        raise InputError(f"[{where}] {name}: wanted a tensor; got {type(given).__name__}.{hint}")


def require_indices(where: str, name: str, given: Tensor) -> None:
    require_tensor(where, name, given)
    if given.dim() != 1 or given.dtype not in _INDEX_DTYPES:
        raise InputError(
            f"[{where}] {name}: wanted a 1-D tensor of int32 or int64; got {given.dim()}-D of {given.dtype}."
            f"{hint_for(given) if name == 'values' else ''}"
        )


def require_device(where: str, name: str, given: Tensor, values: Tensor) -> None:
    if given.device != values.device:
        raise DeviceError(
            f"[{where}] {name}: wanted them on {values.device}, as the values; got {given.device}. Use .to(device)."
        )


def require_agreement(where: str, lengths: Tensor, offsets: Tensor) -> None:
    """Lengths and offsets that say the same, as far as that is known without waiting for a device."""
    if certainly(lengths.shape[0] + 1 != offsets.shape[0]):
        raise InputError(
            f"[{where}] offsets: wanted one element more than the {lengths.shape[0]} lengths; "
            f"got {offsets.shape[0]}. Give only one of the two."
        )
    if not (can_be_read(lengths) and can_be_read(offsets)):
        return
    total, begin = torch.zeros(1, dtype=torch.int64, device="cpu"), 0
    # Few at a time: with more, torch wakes all its threads, which then spin on the cores that the lookup needs. In
    # int64, so that lengths in int32 cannot wrap around to agree.
    for some in lengths.split(_COMPARED):
        sums = torch.cat([total, some]).cumsum(0, dtype=torch.int64)
        differ = sums != offsets[begin : begin + len(sums)]
        if differ.any():
            at = int(differ.nonzero()[0])
            raise InputError(
                f"[{where}] offsets: wanted the running sums of the lengths, from 0; got {int(offsets[begin + at])} at "
                f"{begin + at}, where the sum is {int(sums[at])}. Give only one of the two."
            )
        total, begin = sums[-1:], begin + len(some)


def require_keys(where: str, keys: Sequence[str]) -> list[str]:
    if isinstance(keys, str):
        raise InputError(f"[{where}] keys: wanted a list of names; got the str {keys!r}. Write keys=[{keys!r}].")
    listed = list(keys)
    for key in listed:
        if not isinstance(key, str):
            raise InputError(f"[{where}] keys: wanted names; got {key!r}.")
    if len(set(listed)) < len(listed):
        raise InputError(f"[{where}] keys: wanted each name once; got {listed}.")
    return listed


def require_sum(where: str, lengths: Sequence[int], total: int) -> None:
    if sum(lengths) != total or any(length < 0 for length in lengths):
        raise InputError(
            f"[{where}] lengths: wanted none negative, and a sum of {total}, the number of values; got a sum of "
            f"{sum(lengths)} with a minimum of {min(lengths, default=0)}."
        )
