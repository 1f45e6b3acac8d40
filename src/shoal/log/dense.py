"""Files of dense weights and optimizers: tensors, and the rest of the state dicts in the header."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shoal import _native
from shoal.errors import OutOfMemoryError, StorageError
from shoal.log.commit import DenseFile
from shoal.log.files import FilePath, Files, remove_file, require_held, size_of
from shoal.log.states import MODEL, OPTIMIZER
from shoal.records import nested, tensors

_SKELETON = "shoal.state"


def write_dense(
    files: Files, version: int, where: str, given: Mapping[str, Any], before: DenseFile | None = None
) -> DenseFile | None:
    """Writes the state dicts of a version; returns None where none are given. Those that are not given stay as in the
    file before."""
    if not given:
        return None
    states = dict(given)
    absent = {MODEL, OPTIMIZER} - states.keys()
    if before is not None and absent and (before.holds is None or absent & before.holds):
        for name, held in read_dense(files.dense_of(before.version), before).items():
            states.setdefault(name, held)
    skeleton, found = nested.flatten(states, where)
    header, pieces = tensors.encode(_on_host(found), {_SKELETON: json.dumps(skeleton)})
    path = files.dense_of(version)
    remove_file(path)  # one of a writer that died
    file = _native.FileWriter.create(path)
    try:
        crc = file.append_checked(header, 0)
        for piece in pieces:
            crc = file.append_checked(piece, crc)
        size = file.position
        file.finish()
    except BaseException:
        file.abandon()
        raise
    _native.sync_directory(files.dense)
    return DenseFile(version, size, crc, frozenset(states))


def _on_host(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().to("cpu") for name, tensor in found.items()}


def read_dense(path: FilePath, wanted: DenseFile, held: Any = None) -> dict[str, Any]:
    """Returns the state dicts of a file, checked. held: the file, where it is open already."""
    size = size_of(path) if held is None else held.size()
    if size != wanted.bytes:
        got = "nothing" if size is None else f"{size} bytes"
        raise StorageError(f"[file {path}] wanted {wanted.bytes} bytes; got {got}. Restore it from another copy.")
    require_held(path)
    try:
        data = bytearray(size)
    except MemoryError:
        raise OutOfMemoryError(
            f"[file {path}] the operating system refused memory for its {size} bytes. Free memory, or leave dense= and "
            f"optimizer= out."
        ) from None
    if held is not None:
        held.read(0, data)
    else:
        with _native.File.open_to_read(path) as file:
            file.read(0, data)
    if _native.crc32c(data) != wanted.crc32c:
        raise StorageError(
            f"[file {path}] its checksum is wrong. Restore it from another copy, recover an older version (version=), "
            f"or leave dense= and optimizer= out: rows do not need it."
        )
    found, metadata = tensors.decode(data, f"file {path}")
    try:
        skeleton = json.loads(metadata.get(_SKELETON, ""))
    except (ValueError, RecursionError):
        raise StorageError(f"[file {path}] wanted the shape of state dicts in its header. Restore the file.") from None
    states = nested.unflatten(skeleton, found, f"file {path}")
    if not isinstance(states, dict):
        raise StorageError(f"[file {path}] wanted a dict of states; got {type(states).__name__}. Restore the file.")
    return states
