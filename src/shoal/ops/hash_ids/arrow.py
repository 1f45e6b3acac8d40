"""Ids from Arrow arrays: buffers go to the core as they are. pyarrow is imported by the first call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError, OutOfMemoryError
from shoal.ops.hash_ids.cpu import WHERE, hash_strings, not_unicode, null_at


def ids_of_arrow(array: Any) -> Tensor:
    """Ids of a pyarrow Array or ChunkedArray."""
    import pyarrow as pa

    _require_kind(array.type)
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    parts, before = [torch.empty(0, dtype=torch.int64, device="cpu")], 0
    for chunk in chunks:
        if chunk.null_count:
            raise null_at(before + chunk.is_null().index(True).as_py())
        parts.append(_ids_of_chunk(chunk, before))
        before += len(chunk)
    return parts[1] if len(parts) == 2 else torch.cat(parts)


def ids_of_objects(objects: Sequence[Any]) -> Tensor:
    """Ids of Python strings, in a sequence or in a NumPy array of objects."""
    import pyarrow as pa

    try:
        # Arrow encodes str and takes bytes as they are; from_pandas has it know NaN and pandas' NA for nulls.
        array = pa.array(objects, type=pa.large_binary(), from_pandas=True)
    except MemoryError as error:
        raise OutOfMemoryError(f"[{WHERE}] wanted memory for the bytes of {len(objects)} strings; got none.") from error
    except (pa.ArrowException, UnicodeError, TypeError, ValueError, OverflowError) as error:
        raise _wrong_object(objects, error) from None
    return ids_of_arrow(array)


def _wrong_object(objects: Sequence[Any], error: Exception) -> InputError:
    """What is wrong with the first that is."""
    for position, one in enumerate(objects):
        if isinstance(one, str):
            try:
                one.encode()
            except UnicodeEncodeError:
                return not_unicode(position)
        elif one is None or (isinstance(one, float) and one != one) or type(one).__name__ in ("NAType", "NaTType"):
            return null_at(position)
        elif not isinstance(one, bytes | bytearray | memoryview):
            hint = " Integers go into a tensor or an array of integers." if isinstance(one, int) else ""
            return InputError(f"[{WHERE}] wanted str or bytes; got {type(one).__name__} at {position}.{hint}")
    return InputError(f"[{WHERE}] wanted str or bytes; got what Arrow does not take: {error}.")


def _require_kind(kind: Any) -> None:
    import pyarrow.types as of

    value = kind.value_type if of.is_dictionary(kind) else kind
    strings = (of.is_string, of.is_large_string, of.is_string_view)
    binaries = (of.is_binary, of.is_large_binary, of.is_binary_view, of.is_fixed_size_binary)
    if not any(is_kind(value) for is_kind in (*strings, *binaries, of.is_integer, of.is_null)):
        raise InputError(f"[{WHERE}] wanted strings, bytes or integers, or a dictionary of them; got Arrow's {kind}.")


def _ids_of_chunk(array: Any, before: int) -> Tensor:
    """Ids of an array, without nulls, or with nulls that are not read. `before`: how many ids are before it."""
    import pyarrow as pa
    import pyarrow.types as of

    kind = array.type
    if len(array) == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    if of.is_dictionary(kind):
        return _ids_of_dictionary(array, before)
    if of.is_integer(kind):
        return _integers(array.view(pa.int64()) if of.is_uint64(kind) else array.cast(pa.int64()))
    if of.is_string_view(kind) or of.is_binary_view(kind) or of.is_fixed_size_binary(kind):
        array = array.cast(pa.large_binary())
    are_wide = of.is_large_string(array.type) or of.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    size, begins = (8 if are_wide else 4), array.offset
    if offsets is None or offsets.size < (begins + len(array) + 1) * size:
        raise InputError(f"[{WHERE}] wanted an Arrow array with an offset for every string; got fewer of them.")
    address, data_bytes = (0, 0) if data is None else (data.address, data.size)
    return hash_strings(address, data_bytes, offsets.address + begins * size, are_wide, len(array))


def _ids_of_dictionary(array: Any, before: int) -> Tensor:
    import pyarrow as pa

    values, indices = array.dictionary, _integers(array.indices.cast(pa.int64()))
    if bool(((indices < 0) | (indices >= len(values))).any()):
        raise InputError(f"[{WHERE}] wanted a dictionary that has a value for every index; got one of {len(values)}.")
    if values.null_count:
        # An index may point to a null: its own validity does not say so.
        is_null = torch.tensor(values.is_null().to_pylist(), device="cpu")[indices]
        if bool(is_null.any()):
            raise null_at(before + int(is_null.nonzero()[0]))
    return _ids_of_chunk(values, 0)[indices]


def _integers(array: Any) -> Tensor:
    """A copy: Arrow's memory is not to be written to, and torch has no tensors that are not."""
    _, data = array.buffers()
    begins, n = array.offset * 8, len(array)
    if n == 0:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.frombuffer(bytearray(memoryview(data)[begins : begins + n * 8]), dtype=torch.int64)
