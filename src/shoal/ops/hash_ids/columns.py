"""`hash_ids`: whatever holds ids, known by what it looks like, as NumPy and pandas need not be installed."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.ops.hash_ids.arrow import ids_of_arrow, ids_of_objects
from shoal.ops.hash_ids.cpu import WHERE, hash_padded, hash_utf32, null_at

if TYPE_CHECKING:
    import numpy as np

_INTEGERS = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


def hash_ids(ids: Any) -> Tensor:
    """Ids as tables want them: an int64 tensor [n], on the CPU, or on the device of the tensor that was given.

    ids: a list or tuple of str or bytes; a NumPy array, a pandas Series, Index or array, or an Arrow array of strings,
        bytes or integers, categories included; a tensor of integers.

    A string becomes the XXH64 of its UTF-8, seed 0, and bytes that of themselves: the same number in every container,
    on every platform and in every version, and one that other languages compute too (docs/formats.md). Two of n
    different strings share an id with a probability of about n^2 / 2^65: 3e-8 for a million, 2.7 % for a billion.

    uint64 becomes the int64 of the same bits, and other integers stay what they are: neither is hashed, and both may
    share memory with what was given. Do not mix strings and integers in one table: a string's id can be any integer.

    Nulls (None, NaN, NA) are refused, with the place of the first. NumPy's fixed-width strings have no NULs at their
    end, since NumPy does not tell those from padding.
    """
    if isinstance(ids, Tensor):
        return _of_tensor(ids)
    if isinstance(ids, str | bytes):
        raise InputError(f"[{WHERE}] wanted several ids; got one {type(ids).__name__}. Write [{ids!r}].")
    if isinstance(ids, list | tuple):
        return ids_of_objects(ids)
    if _is_of(ids, "numpy", "ndarray"):
        return _of_numpy(ids)
    if _is_of(ids, "pandas", "NumpyExtensionArray"):  # Arrow does not know it
        return _of_numpy(ids.to_numpy())
    if any(_is_of(ids, "pandas", kind) for kind in ("Series", "Index", "ExtensionArray")):
        return _of_pandas(ids)
    if _is_of(ids, "pandas", "DataFrame"):
        raise InputError(f"[{WHERE}] wanted ids in one dimension; got a DataFrame. Give one column of it.")
    return _of_arrow(ids)


def _is_of(given: Any, package: str, name: str) -> bool:
    return any(one.__name__ == name and one.__module__.split(".")[0] == package for one in type(given).__mro__)


def _require_one_dimension(shape: tuple[int, ...]) -> None:
    if len(shape) != 1:
        raise InputError(f"[{WHERE}] wanted ids in one dimension; got the shape {shape}. Use .reshape(-1).")


def _of_tensor(ids: Tensor) -> Tensor:
    _require_one_dimension(tuple(ids.shape))
    if ids.dtype not in _INTEGERS:
        raise InputError(f"[{WHERE}] wanted a tensor of integers; got {ids.dtype}.")
    return ids.view(torch.int64) if ids.dtype == torch.uint64 else ids.to(torch.int64)


def _of_numpy(ids: "np.ndarray[Any, Any]") -> Tensor:
    import numpy as np

    _require_one_dimension(ids.shape)
    if isinstance(ids, np.ma.MaskedArray):
        masked = np.ma.getmaskarray(ids)
        if masked.any():
            raise null_at(int(masked.argmax()))
        ids = ids.data
    kind = ids.dtype.kind
    if kind == "O":
        return ids_of_objects(ids)  # type: ignore[arg-type]
    if kind == "T":  # NumPy's strings of any length
        return ids_of_objects(ids.astype(object))  # type: ignore[arg-type]
    if kind not in "USiu":
        raise InputError(f"[{WHERE}] wanted an array of strings, bytes or integers; got {ids.dtype}.")
    ids = np.ascontiguousarray(ids, dtype=ids.dtype.newbyteorder("="))
    if kind == "U":
        return hash_utf32(ids.ctypes.data, ids.dtype.itemsize // 4, len(ids))
    if kind == "S":
        return hash_padded(ids.ctypes.data, ids.dtype.itemsize, len(ids))
    ids = ids.view(np.int64) if ids.dtype == np.uint64 else ids.astype(np.int64, copy=False)
    return torch.from_numpy(ids if ids.flags.writeable else ids.copy())


def _of_pandas(ids: Any) -> Tensor:
    if ids.dtype == object:
        return ids_of_objects(ids.to_numpy())
    import pyarrow as pa

    try:
        array = pa.array(ids, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
        raise InputError(
            f"[{WHERE}] wanted a {type(ids).__name__} of strings, bytes or integers; got {ids.dtype} ({error})."
        ) from None
    return ids_of_arrow(array)


def _of_arrow(ids: Any) -> Tensor:
    """pyarrow's arrays, and those of others that speak Arrow's protocol."""
    if not any(hasattr(ids, method) for method in ("__arrow_c_array__", "__arrow_c_stream__")):
        raise InputError(
            f"[{WHERE}] wanted a list of str or bytes, a NumPy array, a pandas Series, an Arrow array or a tensor of "
            f"integers; got {type(ids).__name__}."
        )
    import pyarrow as pa

    if not isinstance(ids, pa.Array | pa.ChunkedArray):
        try:
            ids = pa.array(ids) if hasattr(ids, "__arrow_c_array__") else pa.chunked_array(ids)
        except (pa.ArrowException, TypeError, ValueError, NotImplementedError) as error:
            raise InputError(f"[{WHERE}] wanted one Arrow array; got {type(ids).__name__} ({error}).") from None
    return ids_of_arrow(ids)
