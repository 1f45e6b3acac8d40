"""Checkpoints of torch.distributed.checkpoint (DCP), of one process: docs/log.md says how to use them.

`torch.distributed.checkpoint.save({"model": model, "optimizer": adam}, checkpoint_id=path)` writes a model that holds
tables as any other, and so does `save` here. `torch.distributed.checkpoint.load` reads into tensors of the saved
shapes, which a table with other rows does not have. `load` here takes the shapes from the checkpoint, and checks all of
it before anything changes.

The optimizer state of rows is among the model's entries, so training goes on from a load bit for bit. A load holds what
it reads in memory, beside what the tables have before and after it.

DCP keeps its metadata as a pickle, which runs code that whoever wrote it chose: load only checkpoints that you trust.
`shoal.save` and `shoal.load` use none.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from shoal.checkpoint.loading import require_path
from shoal.config import format_size
from shoal.errors import CheckpointError, InputError, ShoalError, StateDictError
from shoal.modules.collection import Collection
from shoal.records.excerpt import excerpt
from shoal.table import without_rows

_UNHARMED = "Nothing was loaded."
_METADATA = ".metadata"  # DCP writes it last


def save(state: Mapping[str, Any], path: str | Path) -> None:
    """Write the state dicts of modules, optimizers and schedulers, by name, to a new folder, as DCP does.

    state: for instance {"model": model, "optimizer": adam}. Collections count as modules, `bags.optimizer` as an
    optimizer. Tables above their collection's `state_dict_limit` are refused.
    """
    require_path("dcp.save", path)
    where = f"dcp.save {path}"
    _require_state(where, state)
    _require_one_process(where)
    if (Path(path) / _METADATA).exists():
        raise CheckpointError(
            f"[{where}] wanted a new folder; got one with a checkpoint, which DCP would overwrite in place. Save to "
            f"another, and remove this one afterwards."
        )
    with _said_as(where, "a folder that can be written", "Nothing there is complete."), _quiet():
        state_dict_saver.save({name: one.state_dict() for name, one in state.items()}, checkpoint_id=path, no_dist=True)


def load(state: Mapping[str, Any], path: str | Path) -> None:
    """Load what `save`, or torch.distributed.checkpoint.save, wrote under these names; the checkpoint may have others.

    state: as for `save`. Tables get the rows of the checkpoint in place of their own. All of it is read and checked
    first: a checkpoint that is not there, is damaged or does not fit raises CheckpointError or StateDictError, and
    changes nothing. Only load checkpoints that you trust: DCP's metadata is a pickle.
    """
    require_path("dcp.load", path)
    where = f"dcp.load {path}"
    _require_state(where, state)
    _require_one_process(where)
    reader = FileSystemReader(path)
    with _said_as(where, "a checkpoint of torch.distributed.checkpoint", _UNHARMED):
        metadata = reader.read_metadata()
    saved = _Saved(where, metadata)
    parts = {name: _part(where, name, one, saved) for name, one in state.items()}
    read: dict[str, Any] = {}
    with _said_as(where, "a checkpoint that can be read", _UNHARMED), _quiet():
        read = {fqn: saved.place_for(fqn) for part in parts.values() for fqn in part.values()}
        state_dict_loader.load(read, storage_reader=reader, planner=_Planner(), no_dist=True)
    dicts = {}
    for name, part in parts.items():
        # What has been put together is not needed flat: the memory goes with it.
        dicts[name] = _nested(where, {path: read.pop(fqn) for path, fqn in part.items()}, state[name])
    for name, one in state.items():
        _require_loadable(where, name, one, dicts[name])
    _load_all(where, state, dicts)


def _require_state(where: str, state: Any) -> None:
    if not isinstance(state, Mapping) or not state:
        raise InputError(f"[{where}] state: wanted a dict such as {{'model': model}}; got {type(state).__name__}.")
    for name, one in state.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"[{where}] state: wanted names as keys; got {name!r}.")
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise InputError(
                f"[{where}] state[{name!r}]: wanted what has state_dict and load_state_dict; got {type(one).__name__}."
            )


def _require_one_process(where: str) -> None:
    # DCP keeps one rank's copy of entries that have the same name, and each rank's tables have other rows.
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise CheckpointError(
            f"[{where}] wanted one process; got {distributed.get_world_size()} ranks, whose tables differ. Use "
            f"shoal.save and shoal.load with rank= and ranks=."
        )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Without a process group DCP says so each time.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def _said_as(where: str, wanted: str, outcome: str) -> Iterator[None]:
    """What torch raises for a checkpoint, as ours. Its own exception of several ranks is no Exception."""
    try:
        yield
    except ShoalError:
        raise
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException) and error.failures:
            cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, ShoalError) or not isinstance(cause, Exception | CheckpointException):
            raise cause from None
        raise CheckpointError(
            f"[{where}] wanted {wanted}; got {type(cause).__name__}: {excerpt(str(cause))}. {outcome}"
        ) from cause


class _Planner(DefaultLoadPlanner):
    """Reads flat entries into the places that they are given."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        # As DCP does, but without its pickles of any class.
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True, map_location="cpu")


class _Saved:
    """The metadata of a checkpoint, checked as far as it is asked for: it is whatever was in the file."""

    def __init__(self, where: str, metadata: Any) -> None:
        self._where = where
        entries = getattr(metadata, "state_dict_metadata", None)
        paths = getattr(metadata, "planner_data", None)
        if not isinstance(metadata, Metadata) or not isinstance(entries, dict) or not isinstance(paths, dict):
            self._refuse("metadata with entries and their paths", excerpt(metadata))
        self._entries = entries
        self._names: dict[str, dict[tuple[str | int, ...], str]] = {}
        for fqn in entries:
            path = paths.get(fqn)
            if not isinstance(path, tuple) or not path or not all(isinstance(part, str | int) for part in path):
                self._refuse(f"a path of names for {excerpt(fqn)}", excerpt(path))
            self._names.setdefault(str(path[0]), {})[path[1:]] = fqn

    def part(self, name: str) -> dict[tuple[str | int, ...], str]:
        """The entries under a name, by the path that leads to them from there."""
        if name not in self._names:
            self._refuse(f"an entry {name!r}", excerpt(sorted(self._names)))
        if () in self._names[name]:
            self._refuse(f"a state dict under {name!r}", "a single value")
        return self._names[name]

    def shape(self, fqn: str) -> tuple[torch.dtype, tuple[int, ...]] | None:
        """Of a tensor; None of what is none."""
        entry = self._entries[fqn]
        if isinstance(entry, BytesStorageMetadata):
            return None
        if not isinstance(entry, TensorStorageMetadata):
            self._refuse(f"a tensor or bytes for {fqn!r}", excerpt(entry))
        size, dtype = _size(entry.size), getattr(entry.properties, "dtype", None)
        if size is None or not isinstance(dtype, torch.dtype):
            self._refuse(f"a shape and a type for {fqn!r}", f"{excerpt(entry.size)} of {excerpt(dtype)}")
        if not _is_whole(size, entry.chunks):
            self._refuse(f"pieces that are all of {fqn!r}, {list(size)}", excerpt(entry.chunks))
        return dtype, size

    def place_for(self, fqn: str) -> Any:
        """What an entry is read into."""
        shape = self.shape(fqn)
        # Anything that is no tensor stands for bytes.
        return BytesIO() if shape is None else torch.empty(shape[1], dtype=shape[0], device="cpu")

    def _refuse(self, wanted: str, got: str) -> NoReturn:
        raise CheckpointError(f"[{self._where}] wanted {wanted}; got {got}. {_UNHARMED}")


def _size(given: Any) -> tuple[int, ...] | None:
    good = isinstance(given, tuple | list) and all(isinstance(one, int) and one >= 0 for one in given)
    return tuple(given) if good else None


def _is_whole(size: tuple[int, ...], chunks: Any) -> bool:
    """Whether pieces are a tensor together: none reaches out of it, no two overlap, and their volumes add up to it.

    What no piece covers would be loaded as memory happens to be.
    """
    boxes = []
    for chunk in chunks if isinstance(chunks, list) else []:
        begin, extent = _size(getattr(chunk, "offsets", None)), _size(getattr(chunk, "sizes", None))
        if begin is None or extent is None or not len(begin) == len(extent) == len(size):
            return False
        end = tuple(first + many for first, many in zip(begin, extent, strict=True))
        if any(last > most for last, most in zip(end, size, strict=True)):
            return False
        if math.prod(extent):
            boxes.append((begin, end))
    for at, (begin, end) in enumerate(boxes):
        for other_begin, other_end in boxes[:at]:
            if all(max(a, b) < min(c, d) for a, b, c, d in zip(begin, other_begin, end, other_end, strict=True)):
                return False
    covered = sum(math.prod(c - a for a, c in zip(begin, end, strict=True)) for begin, end in boxes)
    return covered == math.prod(size)


def _part(where: str, name: str, one: Any, saved: _Saved) -> dict[tuple[str | int, ...], str]:
    """The entries of one of the state's objects, whose shapes fit it where that can be known ahead."""
    part = saved.part(name)
    if isinstance(one, nn.Module):
        _require_shapes(f"{where}, {name}", one, {path: saved.shape(fqn) for path, fqn in part.items()})
    return part


def _collections(module: nn.Module) -> Iterator[tuple[str, Collection]]:
    for path, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, Collection):
            yield (f"{path}." if path else ""), one


def _require_shapes(
    where: str,
    module: nn.Module,
    saved: Mapping[tuple[str | int, ...], tuple[torch.dtype, tuple[int, ...]] | None],
) -> None:
    """Raise StateDictError where a module's state dict would have other entries than the saved ones."""
    with without_rows():
        dense = module.state_dict()
    tables = [table for prefix, one in _collections(module) for table in one.state_shapes(prefix)]
    wanted = {*dense, *(name for table in tables for name in table)}
    missing, unknown = wanted - {path[0] for path in saved}, {path[0] for path in saved} - wanted
    if missing or unknown:
        raise StateDictError(
            f"[{where}] wanted every entry of the model and no other; the checkpoint lacks {excerpt(sorted(missing))} "
            f"and has the unknown {excerpt(sorted(map(str, unknown)))}. {_UNHARMED}"
        )
    for name, value in dense.items():
        if isinstance(value, Tensor) and ((given := saved.get((name,))) is None or given[1] != tuple(value.shape)):
            raise _unfit(where, name, f"a tensor of shape {list(value.shape)}", given)
    for table in tables:
        _require_table(where, table, saved)
    for prefix, one in _collections(module):
        names = [(name,) for table in one.state_shapes(prefix) for name in table]
        shapes = [shape for name in names if (shape := saved[name]) is not None]
        size = sum(dtype.itemsize * math.prod(extent) for dtype, extent in shapes)
        if size > one.state_dict_limit:
            raise StateDictError(
                f"[{where}] the rows of {one.name} take {format_size(size)}; its state_dict_limit is "
                f"{format_size(one.state_dict_limit)}. Raise `state_dict_limit` if memory holds them twice. {_UNHARMED}"
            )


def _require_table(
    where: str,
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...] | None]],
    saved: Mapping[tuple[str | int, ...], tuple[torch.dtype, tuple[int, ...]] | None],
) -> None:
    keys = next(name for name in table if name.endswith(".weight_id"))
    ids = saved.get((keys,))
    if ids is None or len(ids[1]) != 2:
        raise _unfit(where, keys, "a tensor of shape [rows, 1]", ids)
    for name, (dtype, behind) in table.items():
        shape = () if behind is None else (ids[1][0], *behind)
        if saved.get((name,)) != (dtype, shape):
            raise _unfit(where, name, f"{_named(dtype)} of shape {list(shape)}", saved.get((name,)))


def _unfit(where: str, name: str, wanted: str, given: tuple[torch.dtype, tuple[int, ...]] | None) -> StateDictError:
    got = "what is no tensor" if given is None else f"{_named(given[0])} of shape {excerpt(list(given[1]))}"
    return StateDictError(f"[{where}] {name}: wanted {wanted}; got {got}. {_UNHARMED}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nested(where: str, flat: Mapping[tuple[str | int, ...], Any], of: Any) -> dict[str, Any]:
    """A state dict from its leaves. DCP has every key as a str; those of numbers are numbers again."""
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise CheckpointError(f"[{where}] wanted entries apart; got one within another: {excerpt(path)}.")
        if path[-1] in at:
            raise CheckpointError(f"[{where}] wanted entries apart; got one within another: {excerpt(path)}.")
        at[path[-1]] = value
    if isinstance(of, nn.Module):
        return {str(name): _with_lists(value) for name, value in root.items()}
    made = _as_in(_with_lists(root), of.state_dict())
    if isinstance(of, torch.optim.Optimizer):
        # A fresh optimizer has no state whose keys would tell, and DCP leaves out what is empty.
        made["state"] = {_number(key): value for key, value in made.get("state", {}).items()}
    assert isinstance(made, dict)
    return made


def _with_lists(given: Any) -> Any:
    """Dicts with the keys 0 to n - 1 as integers were lists."""
    if not isinstance(given, dict):
        return given
    values = {key: _with_lists(value) for key, value in given.items()}
    if values and all(isinstance(key, int) for key in values):
        return [values[key] for key in sorted(values)]
    return values


def _as_in(given: Any, live: Any) -> Any:
    """With keys, and types of dicts, as a state dict of today has them."""
    if isinstance(given, list) and isinstance(live, list) and len(given) == len(live):
        return [_as_in(one, other) for one, other in zip(given, live, strict=True)]
    if not isinstance(given, dict) or not isinstance(live, Mapping):
        return given
    keys = {str(key): key for key in live}
    made = {keys.get(str(key), key): _as_in(value, live.get(keys.get(str(key)))) for key, value in given.items()}
    # What is empty has no leaves, and so is not in a checkpoint.
    made |= {key: {} for key, value in live.items() if isinstance(value, Mapping) and not value and key not in made}
    if not isinstance(live, dict):
        return made
    typed = copy.copy(live)
    typed.clear()
    typed.update(made)
    return typed


def _number(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _require_loadable(where: str, name: str, one: Any, given: dict[str, Any]) -> None:
    if isinstance(one, nn.Module):
        for prefix, collection in _collections(one):
            collection.require_loadable(given, prefix)
    if isinstance(one, torch.optim.Optimizer):
        _require_optimizer(f"{where}, {name}", one, given)


def _require_optimizer(where: str, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Raise StateDictError for other groups than the optimizer has, and for states of no parameter of theirs."""
    groups = given.get("param_groups")
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise StateDictError(f"[{where}] wanted a list of groups; got {excerpt(groups)}. {_UNHARMED}")
    listed = [one.get("params") for one in groups]
    counts = [len(one) if isinstance(one, list) else None for one in listed]
    if counts != wanted:
        raise StateDictError(f"[{where}] wanted groups of {wanted} parameters; got {counts}. {_UNHARMED}")
    unknown = given["state"].keys() - {number for one in listed for number in one}
    if unknown:
        raise StateDictError(
            f"[{where}] wanted states of the groups' parameters; got some of {excerpt(unknown)}. {_UNHARMED}"
        )


def _load_all(where: str, state: Mapping[str, Any], dicts: Mapping[str, dict[str, Any]]) -> None:
    """Optimizers and the like first, which can be put back; then modules, whose entries have all been checked."""
    modules = [name for name, one in state.items() if isinstance(one, nn.Module)]
    others = [name for name in state if name not in modules]
    undo: list[Callable[[], Any]] = []
    try:
        for name in others:
            before = copy.deepcopy(state[name].state_dict())
            undo.append(partial(state[name].load_state_dict, before))
            with _said_as(f"{where}, {name}", "a state dict that it takes", _UNHARMED):
                state[name].load_state_dict(dicts[name])
        for name in modules:
            state[name].load_state_dict(dicts[name])
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
