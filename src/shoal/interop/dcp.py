"""Checkpoints of torch.distributed.checkpoint (DCP), of one process: docs/log.md says how to use them.

`torch.distributed.checkpoint.save({"model": model, "optimizer": adam}, checkpoint_id=path)` writes a model that holds
tables as any other, and so does `save` here. `torch.distributed.checkpoint.load` reads into tensors of the saved
shapes, which a table with other rows does not have. `load` here takes the shapes from the checkpoint, and checks all of
it before anything changes.

The optimizer state of rows is among the model's entries, so training goes on from a load bit for bit. A load holds what
it reads in memory, besides what the tables have before and after it.

Tensors and other values are compared with their checksums. DCP's metadata, which holds their names and shapes, has no
checksum: it is compared with itself, with the values and with the model. A value that an extension of DCP compressed,
or that was saved after `torch.serialization.set_crc32_options(False)`, has no checksum that could be compared.

DCP keeps its metadata as a pickle, which can run any code: load only checkpoints that you trust. `shoal.save` and
`shoal.load` use no pickle.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint.loading import require_path
from shoal.errors import CheckpointError, InputError, ShoalError
from shoal.interop.dcp_files import UNHARMED, Names, Planner, Reader, Saved
from shoal.interop.dcp_fit import collections_in, require_loadable, require_shapes
from shoal.interop.dcp_nested import nested
from shoal.records.excerpt import excerpt

_METADATA = ".metadata"  # DCP writes it last
_ROOT = ""  # the name of an object that is saved alone


def save(state: Any, path: str | Path) -> None:
    """Write state dicts to a new folder, as torch.distributed.checkpoint.save does.

    state: modules, optimizers and schedulers by name, for instance {"model": model, "optimizer": adam}. Collections
        count as modules, `bags.optimizer` as an optimizer. Or one of these objects alone: then the checkpoint has the
        names of its state dict, as after torch.distributed.checkpoint.save(model.state_dict()).

    Tables above their collection's `state_dict_limit` are refused.
    """
    require_path("dcp.save", path)
    where = f"dcp.save {path}"
    objects = _objects(where, state)
    _require_one_process(where)
    if (Path(path) / _METADATA).exists():
        raise CheckpointError(
            f"[{where}] wanted a new folder; got one with a checkpoint, which DCP would overwrite in place. Save to "
            f"another, and remove this one afterwards."
        )
    with _said_as(where, "a folder that can be written", "Nothing there is complete."), _quiet():
        dicts = {name: one.state_dict() for name, one in objects.items()}
        state_dict_saver.save(dicts.get(_ROOT, dicts), checkpoint_id=path, no_dist=True)


def load(state: Any, path: str | Path) -> None:
    """Load what `save`, or torch.distributed.checkpoint.save, wrote under these names; the checkpoint may have others.

    state: as for `save`. One object alone takes the whole checkpoint as its state dict.

    Tables get the rows of the checkpoint in place of their own. All of it is read and checked first: a checkpoint that
    is not there, is damaged or does not fit raises CheckpointError or StateDictError, and changes nothing. Values are
    compared with their checksums; DCP's metadata has none, so damage there may pass unseen where the names and shapes
    still fit. Only load checkpoints that you trust: DCP's metadata is a pickle.
    """
    require_path("dcp.load", path)
    where = f"dcp.load {path}"
    objects = _objects(where, state)
    _require_one_process(where)
    reader = Reader(where, path)
    with _said_as(where, "a checkpoint of torch.distributed.checkpoint", UNHARMED):
        metadata = reader.read_metadata()
    saved = Saved(where, metadata)
    parts = {name: _part(where, name, one, saved) for name, one in objects.items()}
    read: dict[str, Any] = {}
    with _said_as(where, "a checkpoint that can be read", UNHARMED), _quiet():
        read = {fqn: saved.place_for(fqn) for part in parts.values() for fqn in part.values()}
        state_dict_loader.load(read, storage_reader=reader, planner=Planner(), no_dist=True)
    dicts = {}
    for name, part in parts.items():
        # Entries that were put together are not needed flat: their memory goes.
        flat = {path: read.pop(fqn) for path, fqn in part.items()}
        dicts[name] = nested(_place(where, name), flat, objects[name], saved)
    for name, one in objects.items():
        require_loadable(_place(where, name), one, dicts[name])
    _load_all(where, objects, dicts)


def _objects(where: str, state: Any) -> dict[str, Any]:
    """What is saved or loaded, by name."""
    if _has_state(state):
        return {_ROOT: state}
    if not isinstance(state, Mapping) or not state:
        raise InputError(
            f"[{where}] state: wanted a dict such as {{'model': model}}, or a model; got {type(state).__name__}."
        )
    for name, one in state.items():
        if not isinstance(name, str) or not name:
            raise InputError(f"[{where}] state: wanted names as keys; got {name!r}.")
        if not _has_state(one):
            hint = " Give the model itself, not its state dict." if isinstance(one, Tensor | Mapping) else ""
            raise InputError(
                f"[{where}] state[{name!r}]: wanted an object with state_dict and load_state_dict; got "
                f"{type(one).__name__}.{hint}"
            )
    return dict(state)


def _has_state(one: Any) -> bool:
    return not isinstance(one, type) and hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _place(where: str, name: str) -> str:
    return where if name == _ROOT else f"{where}, {name}"


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


def _part(where: str, name: str, one: Any, saved: Saved) -> dict[Names, str]:
    """The entries of one of the objects, whose shapes fit it where that can be known ahead."""
    part = saved.within(() if name == _ROOT else (name,))
    if not part and name != _ROOT and not _is_empty(one):
        raise CheckpointError(
            f"[{where}] wanted an entry {name!r}; got {excerpt(saved.names())}. {UNHARMED} If the checkpoint was saved "
            f"from one object's state dict, call shoal.interop.dcp.load(model, path)."
        )
    if () in part:
        raise CheckpointError(f"[{where}] wanted a state dict under {name!r}; got a single value. {UNHARMED}")
    if isinstance(one, nn.Module):
        require_shapes(_place(where, name), one, {path: saved.shape(fqn) for path, fqn in part.items()}, saved)
    return part


def _is_empty(one: Any) -> bool:
    """Whether a state dict is empty: DCP stores nothing of it."""
    if isinstance(one, nn.Module) and any(collections_in(one)):
        return False
    return not one.state_dict()


def _load_all(where: str, state: Mapping[str, Any], dicts: Mapping[str, dict[str, Any]]) -> None:
    """Optimizers and the like first, which can be put back; then modules, whose entries have all been checked."""
    modules = [name for name, one in state.items() if isinstance(one, nn.Module)]
    others = [name for name in state if name not in modules]
    undo: list[Callable[[], Any]] = []
    try:
        for name in others:
            before = copy.deepcopy(state[name].state_dict())
            undo.append(partial(state[name].load_state_dict, before))
            with _said_as(_place(where, name), "a state dict that it takes", UNHARMED):
                state[name].load_state_dict(dicts[name])
        for name in modules:
            state[name].load_state_dict(dicts[name])
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
