"""Tensors by name in the safetensors format, which every framework reads.

    8 bytes       length of the header, little-endian
    header        a JSON object, filled up with spaces: {name: {"dtype", "shape", "data_offsets": [begin, end]}}, with
                  offsets counted from the header's end, and a dict of str under "__metadata__"
    data          the tensors one after another in row-major order, with nothing between or after them

Wide types come first in the data, so that every tensor lies at a multiple of its type's size.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from shoal.config.dtypes import NUMBER_TYPES
from shoal.errors import InputError, StorageError
from shoal.records import strict_json
from shoal.records.excerpt import excerpt

Buffer = bytes | bytearray | memoryview

METADATA = "__metadata__"

# By the names of the format. It also has types of less than a byte, which torch has only in pairs.
_DTYPES = {one.safetensors: one.torch for one in NUMBER_TYPES}
_NAMES = {one.torch: one.safetensors for one in NUMBER_TYPES}
_WHERE = "tensors"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MOST_HEADER_BYTES = 100_000_000  # other libraries refuse files with larger ones
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**63 - 1


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[memoryview]]:
    """Returns header and data, to be written one after another.

    The data are the tensors' own memory, which must not change before it is written; what is not contiguous or not on
    the CPU is copied.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise InputError(
                f"[{_WHERE}] {name!r}: wanted a dense tensor of {', '.join(map(str, _NAMES))}; got {tensor.dtype}, "
                f"{tensor.layout}, on {tensor.device}."
            )
    header, places = encode_header({name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}, metadata)
    in_order = sorted(tensors, key=lambda name: places[name])
    return header, [_bytes_of(tensors[name]) for name in in_order if tensors[name].nbytes]


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """Returns the header of tensors of these types and shapes, and where in the file the data of each begins."""
    header: dict[str, Any] = {METADATA: _checked_metadata(metadata, _WHERE)} if metadata else {}
    for name, (dtype, shape) in tensors.items():
        header[_checked_name(name, _WHERE)] = {"dtype": _dtype_name(name, dtype, _WHERE), "shape": list(shape)}
    at = 0
    places = {}
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        places[name] = at
        at += math.prod(shape) * dtype.itemsize
        header[name]["data_offsets"] = [places[name], at]
    text = strict_json.encode(header, _WHERE)
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MOST_HEADER_BYTES:
        raise InputError(
            f"[{_WHERE}] wanted names and metadata of at most {_MOST_HEADER_BYTES} bytes; got {len(text)}. Write "
            "several files."
        )
    begin = _LENGTH.size + len(text)
    return _LENGTH.pack(len(text)) + text, {name: begin + place for name, place in places.items()}


def decode(data: Buffer, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors, as views of `data` (clone before writing into them), and the metadata.

    REQUIRES: `data` begins at a multiple of 8 bytes, as files and memory do.
    """
    view = memoryview(data).cast("B")
    header, begin = _header(view, where)
    memory = pa.py_buffer(view)
    # Through Arrow: torch.frombuffer would warn of memory that is read-only.
    flat: Tensor = from_dlpack(pa.Array.from_buffers(pa.uint8(), memory.size, [None, memory], null_count=0))
    if flat.data_ptr() % _ALIGNMENT:
        raise InputError(f"[{where}] wanted a buffer at a multiple of {_ALIGNMENT}; got one at {flat.data_ptr():#x}.")
    entries, metadata = _entries(header, begin, len(view), where)
    return {name: entry.tensor(flat) for name, entry in entries.items()}, metadata


def header_bytes(data: Buffer, size: int, where: str) -> int:
    """Returns how many bytes of a file of that size are the header, from its first eight bytes."""
    if len(data) < _LENGTH.size:
        raise StorageError(f"[{where}] wanted tensors, which begin with 8 bytes of length; got {len(data)} bytes.")
    (length,) = _LENGTH.unpack_from(data)
    room = min(size - _LENGTH.size, _MOST_HEADER_BYTES)
    if length > room:
        raise StorageError(f"[{where}] wanted a header of at most {room} bytes; got one of {length}. Is it damaged?")
    return _LENGTH.size + int(length)


def decode_header(data: Buffer, size: int, where: str) -> tuple[dict[str, "Entry"], dict[str, str]]:
    """Returns what the header of a file of that size says of its tensors, checked, and the metadata; for reading parts
    of tensors. REQUIRES: `data` is the first `header_bytes` of the file."""
    header, begin = _header(memoryview(data).cast("B"), where)
    return _entries(header, begin, size, where)


def _entries(header: dict[str, Any], begin: int, size: int, where: str) -> tuple[dict[str, "Entry"], dict[str, str]]:
    metadata = _read_metadata(header.pop(METADATA, {}), where)
    entries = {name: Entry(entry, begin, f"{where}, tensor {excerpt(name)}") for name, entry in header.items()}
    _require_partition(entries, size - begin, where)
    return entries, metadata


class Entry:
    """What the header says of a tensor, checked without the others. first: where in the file its data begins."""

    def __init__(self, given: Any, data_begin: int, where: str) -> None:
        if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
            raise StorageError(f"[{where}] wanted dtype, shape and data_offsets; got {excerpt(given)}. Is it damaged?")
        dtype = given["dtype"]
        if not isinstance(dtype, str) or dtype not in _DTYPES:
            raise StorageError(f"[{where}] dtype: wanted one of {', '.join(_DTYPES)}; got {excerpt(dtype)}.")
        shape, offsets = _sizes(given["shape"], "shape", where), _sizes(given["data_offsets"], "data_offsets", where)
        if len(shape) > _MOST_DIMS:
            raise StorageError(f"[{where}] shape: wanted at most {_MOST_DIMS} dimensions; got {len(shape)}.")
        if len(offsets) != 2 or offsets[0] > offsets[1]:
            raise StorageError(f"[{where}] data_offsets: wanted a begin and an end; got {excerpt(offsets)}.")
        self.dtype, self.shape = _DTYPES[dtype], shape
        self.begin, self.end = offsets
        self.first = data_begin + self.begin
        self._where = where
        size = _elements(shape, where) * self.dtype.itemsize
        if size != self.end - self.begin:
            raise StorageError(
                f"[{where}] wanted {size} bytes for {dtype} {shape}; got {self.end - self.begin}. Is it damaged?"
            )
        if self.first % self.dtype.itemsize:
            raise StorageError(
                f"[{where}] wanted {dtype} at a multiple of {self.dtype.itemsize} bytes; got byte {self.first}."
            )

    def tensor(self, flat: Tensor) -> Tensor:
        data = flat[self.first : self.first + self.end - self.begin]
        # Any other byte is no bool.
        if self.dtype is torch.bool and data.numel() and int(data.max()) > 1:
            raise StorageError(f"[{self._where}] wanted bools of 0 and 1; got {int(data.max())}. Is it damaged?")
        return data.view(self.dtype).view(self.shape)


def _header(view: memoryview, where: str) -> tuple[dict[str, Any], int]:
    """Returns the header, and where the data begins."""
    begin = header_bytes(view, len(view), where)
    if bytes(view[_LENGTH.size : begin][:1]) != b"{":
        raise StorageError(f"[{where}] wanted a header that is a JSON object; got something else. Is it damaged?")
    header: dict[str, Any] = strict_json.parse(view[_LENGTH.size : begin], where)
    return header, begin


def _require_partition(entries: Mapping[str, Entry], size: int, where: str) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps another" if entry.begin < at else "has a hole before it"
            raise StorageError(f"[{where}] wanted tensors one after another; got {excerpt(name)}, which {what}.")
        at = entry.end
    if at != size:
        raise StorageError(f"[{where}] wanted {at} bytes of data; got {size}. Is it damaged?")


def _elements(shape: list[int], where: str) -> int:
    count = 1
    for size in shape:
        # As if no dimension were empty: strides are products of the other dimensions.
        count *= max(size, 1)
        if count > _MOST_ELEMENTS:
            raise StorageError(f"[{where}] shape: wanted at most {_MOST_ELEMENTS} elements; got {excerpt(shape)}.")
    return 0 if 0 in shape else count


def _sizes(given: Any, name: str, where: str) -> list[int]:
    if not isinstance(given, list) or any(type(size) is not int or size < 0 for size in given):
        raise StorageError(f"[{where}] {name}: wanted a list of sizes; got {excerpt(given)}. Is it damaged?")
    return given


def _read_metadata(given: Any, where: str) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(text, str) for text in given.values()):
        raise StorageError(f"[{where}] {METADATA}: wanted str by name; got {excerpt(given)}. Is it damaged?")
    return given


def _checked_metadata(given: Mapping[str, str], where: str) -> dict[str, str]:
    for name, text in given.items():
        if not isinstance(text, str):
            raise InputError(f"[{where}] metadata {name!r}: wanted a str; got {text!r}.")
    return dict(given)


def _checked_name(name: str, where: str) -> str:
    if not isinstance(name, str) or name == METADATA:
        raise InputError(f"[{where}] wanted a name that is a str and not {METADATA!r}; got {name!r}.")
    return name


def _dtype_name(name: str, dtype: torch.dtype, where: str) -> str:
    found = _NAMES.get(dtype)
    if found is None:
        raise InputError(f"[{where}] {name!r}: wanted one of {', '.join(map(str, _NAMES))}; got {dtype}.")
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(pa.foreign_buffer(tensor.data_ptr(), tensor.nbytes, base=tensor)).cast("B")
