"""Ids of strings by the native core, which takes them by address: the caller keeps the memory alive."""

import ctypes

import torch
from torch import Tensor

from shoal import _native
from shoal.config import get_num_threads
from shoal.errors import InputError

WHERE = "hash_ids"

_LAST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def hash_strings(data: int, data_bytes: int, offsets: int, are_wide: bool, n: int) -> Tensor:
    """Ids of n strings, one after another; n + 1 offsets into the data, of 64 bits if they are wide, else of 32."""
    out = torch.empty(n, dtype=torch.int64, device="cpu")
    wrong = _native.hash_strings(data, data_bytes, offsets, are_wide, out, get_num_threads())
    if wrong >= 0:
        raise InputError(
            f"[{WHERE}] wanted an Arrow array whose offsets ascend within its data; those of string {wrong} do not. "
            f"validate(full=True) says what is wrong with it."
        )
    return out


def hash_padded(data: int, width: int, n: int) -> Tensor:
    """Ids of n strings of `width` bytes each; NULs at the end of one are no part of it."""
    out = torch.empty(n, dtype=torch.int64, device="cpu")
    _native.hash_padded(data, width, out, get_num_threads())
    return out


def hash_utf32(data: int, width: int, n: int) -> Tensor:
    """Ids of n strings of `width` code points each; NULs at the end of one are no part of it."""
    out = torch.empty(n, dtype=torch.int64, device="cpu")
    wrong = _native.hash_utf32(data, width, out, get_num_threads())
    if wrong >= 0:
        points = (ctypes.c_uint32 * width).from_address(data + 4 * width * wrong)
        raise not_unicode(wrong, next(point for point in points if point > _LAST or point in _SURROGATES))
    return out


def null_at(position: int) -> InputError:
    return InputError(f"[{WHERE}] wanted an id in every place; got a null at {position}. Drop it, or fill it first.")


def not_unicode(position: int, point: int = _SURROGATES.start) -> InputError:
    what = "a lone surrogate" if point <= _LAST else f"the code point 0x{point:x}, and the last one is 0x{_LAST:x}"
    return InputError(
        f"[{WHERE}] wanted strings that have UTF-8; the one at {position} has {what}. Encode it yourself, and give "
        f"bytes."
    )
