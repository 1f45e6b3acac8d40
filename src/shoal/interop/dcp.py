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
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from shoal.checkpoint.loading import require_path
from shoal.config import format_size
from shoal.errors import CheckpointError, InputError, ShoalError, StateDictError
from shoal.interop.dcp_files import UNHARMED, Names, Planner, Reader, Saved, Shape
from shoal.log.states import require_initialised
from shoal.modules.collection import Collection
from shoal.modules.state import trained_otherwise
from shoal.records.excerpt import excerpt
from shoal.table import without_rows

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
        dicts[name] = _nested(_place(where, name), flat, objects[name], saved)
    for name, one in objects.items():
        _require_loadable(_place(where, name), one, dicts[name])
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
        _require_shapes(_place(where, name), one, {path: saved.shape(fqn) for path, fqn in part.items()}, saved)
    return part


def _is_empty(one: Any) -> bool:
    """Whether a state dict is empty: DCP stores nothing of it."""
    if isinstance(one, nn.Module) and any(_collections(one)):
        return False
    return not one.state_dict()


def _collections(module: nn.Module) -> Iterator[tuple[str, Collection]]:
    for path, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, Collection):
            yield (f"{path}." if path else ""), one


def _require_shapes(where: str, module: nn.Module, saved: Mapping[Names, Shape | None], checkpoint: Saved) -> None:
    """Raise StateDictError where a module's state dict would have other entries than the saved ones."""
    with without_rows():
        dense = module.state_dict()
    tables = [table for prefix, one in _collections(module) for table in one.state_shapes(prefix)]
    wanted = {*dense, *(name for table in tables for name in table)}
    names = {path[0] for path in saved}
    missing, unknown = wanted - names, names - wanted
    if missing or unknown:
        _require_unwrapped(where, wanted, {str(name) for name in names})
        _require_same_optimizers(where, module, saved)
        if not wanted & names:
            _refuse_other_names(where, wanted, checkpoint)
        # As TorchRec saves them: of each table its weight alone.
        has_keys = not tables or any(len(names.intersection(table)) != 1 for table in tables)
        hint = " Load it into TorchRec's model, and that one's state dict into this one: it has rows without keys."
        raise StateDictError(
            f"[{where}] wanted every entry of the model and no other; the checkpoint lacks {excerpt(sorted(missing))} "
            f"and has the unknown {excerpt(sorted(map(str, unknown)))}. {UNHARMED}{'' if has_keys else hint}"
        )
    for name, value in dense.items():
        if isinstance(value, Tensor) and ((given := saved.get((name,))) is None or given[1] != tuple(value.shape)):
            raise _unfit(where, name, f"a tensor of shape {list(value.shape)}", given)
    _require_same_optimizers(where, module, saved)  # the names of their columns may be the same
    for table in tables:
        _require_table(where, table, saved)
    for prefix, one in _collections(module):
        paths = [(name,) for table in one.state_shapes(prefix) for name in table]
        shapes = [shape for path in paths if (shape := saved[path]) is not None]
        size = sum(dtype.itemsize * math.prod(extent) for dtype, extent in shapes)
        if size > one.state_dict_limit:
            raise StateDictError(
                f"[{where}] the rows of {one.name} take {format_size(size)}; its state_dict_limit is "
                f"{format_size(one.state_dict_limit)}. Raise `state_dict_limit` if memory holds them twice. {UNHARMED}"
            )


_WRAPPERS = {"module": "torch.nn.parallel.DistributedDataParallel", "_orig_mod": "torch.compile"}


def _require_unwrapped(where: str, wanted: set[str], given: set[str]) -> None:
    """Raise StateDictError where names differ by the prefixes of wrappers of modules, and by no more."""
    wanted_path, given_path = _wrapper_path(wanted), _wrapper_path(given)
    inside_wanted, inside_given = _without_wrappers(wanted), _without_wrappers(given)
    if inside_wanted != inside_given or wanted == given:
        return
    names = [name for name in _WRAPPERS if any(name in one.split(".") for one in wanted ^ given)]
    text = f"[{where}] wanted names such as {min(wanted)!r}; got names such as {min(given)!r}, which differ by "
    text += " and ".join(f"{name + '.'!r} of {_WRAPPERS[name]}" for name in names)
    if wanted_path and not given_path:
        advice = f"Load into the model inside: model.{'.'.join(wanted_path)}."
    elif given_path and not wanted_path:
        model = "model"
        for name in reversed(given_path):
            model = f"torch.nn.ModuleDict({{{name!r}: {model}}})"
        advice = f"Load into {model}, and save the model inside, model.{'.'.join(given_path)}."
    else:
        advice = "Wrap the model as it was when it was saved."
    raise StateDictError(f"{text}. {UNHARMED} {advice}")


def _wrapper_path(names: set[str]) -> list[str]:
    """The names of wrappers that all names begin with."""
    path = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1 or parts[0] not in _WRAPPERS:
            break
        path.append(parts[0])
    return path


def _without_wrappers(names: set[str]) -> set[str]:
    return {".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}


def _require_same_optimizers(where: str, module: nn.Module, saved: Mapping[Names, Shape | None]) -> None:
    """Raise StateDictError for a table whose saved columns are those of other optimizers than its own."""
    for prefix, one in _collections(module):
        for table, entries in zip(one.tables().values(), one.state_shapes(prefix), strict=True):
            group, number = table.place
            config = group.tables[number].config
            begin = next(name for name in entries if name.endswith(".weight_id")).removesuffix("weight_id")
            shapes = {str(path[0]): None if shape is None else shape[1] for path, shape in saved.items()}
            if otherwise := trained_otherwise(config, begin, shapes):
                raise StateDictError(f"[{where}] {otherwise} {UNHARMED} Make the table's optimizer as it was.")


def _require_alike(where: str, one: Any, given: set[str], live: Mapping[Any, Any], checkpoint: Saved) -> None:
    """Raise StateDictError where a state dict is, by its keys, one of another kind of object."""
    wanted = {str(key) for key in live}
    if not wanted or not given:
        return
    # DCP does not store what is empty.
    filled = {str(key) for key, value in live.items() if value or not isinstance(value, Mapping | list)}
    missing, unknown = filled - given, given - wanted
    if not wanted & given:
        _refuse_other_names(where, wanted, checkpoint)
    elif not (isinstance(one, torch.optim.lr_scheduler.LRScheduler) and missing and unknown):
        return
    raise StateDictError(
        f"[{where}] wanted the state dict of a {type(one).__name__}, with {excerpt(sorted(missing))}; got one with "
        f"{excerpt(sorted(unknown))} instead. {UNHARMED} Is it saved under another name?"
    )


def _refuse_other_names(where: str, wanted: set[str], checkpoint: Saved) -> None:
    """Raise StateDictError where wanted names stand under another name of the checkpoint, and say which."""
    found = list(checkpoint.names_over(wanted))
    if found:
        raise StateDictError(
            f"[{where}] wanted names such as {min(wanted)!r}; got such names under {excerpt(found)} only. {UNHARMED} "
            f"Call shoal.interop.dcp.load({{{found[0]!r}: ...}}, path)."
        )


def _require_table(
    where: str,
    table: Mapping[str, tuple[torch.dtype, tuple[int, ...] | None]],
    saved: Mapping[Names, Shape | None],
) -> None:
    keys = next(name for name in table if name.endswith(".weight_id"))
    ids = saved.get((keys,))
    if ids is None or len(ids[1]) != 2:
        raise _unfit(where, keys, "a tensor of shape [rows, 1]", ids)
    for name, (dtype, row_shape) in table.items():
        shape = () if row_shape is None else (ids[1][0], *row_shape)
        if saved.get((name,)) != (dtype, shape):
            raise _unfit(where, name, f"{_named(dtype)} of shape {list(shape)}", saved.get((name,)))


def _unfit(where: str, name: str, wanted: str, given: Shape | None) -> StateDictError:
    got = "another kind of value" if given is None else f"{_named(given[0])} of shape {excerpt(list(given[1]))}"
    return StateDictError(f"[{where}] {name}: wanted {wanted}; got {got}. {UNHARMED}")


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _nested(where: str, flat: Mapping[Names, Any], of: Any, checkpoint: Saved) -> dict[str, Any]:
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
    live = of.state_dict()
    _require_alike(where, of, {str(name) for name in root}, live, checkpoint)
    made = _as_in(_with_lists(root), live)
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


def _require_loadable(where: str, one: Any, given: dict[str, Any]) -> None:
    if isinstance(one, nn.Module):
        for prefix, collection in _collections(one):
            collection.require_loadable(given, prefix)
    if isinstance(one, torch.optim.Optimizer):
        _require_optimizer(where, one, given)


def _require_optimizer(where: str, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Raise StateDictError for other groups than the optimizer has, and for states of no parameter of theirs."""
    require_initialised(where, optimizer, given)
    if "param_groups" not in optimizer.state_dict():  # TorchRec's keyed optimizers: they compare names themselves
        return
    groups = given.get("param_groups")
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(groups, list) or not all(isinstance(one, dict) for one in groups):
        raise StateDictError(f"[{where}] wanted a list of groups; got {excerpt(groups)}. {UNHARMED}")
    listed = [one.get("params") for one in groups]
    counts = [len(one) if isinstance(one, list) else None for one in listed]
    if counts != wanted:
        raise StateDictError(f"[{where}] wanted groups of {wanted} parameters; got {counts}. {UNHARMED}")
    unknown = given["state"].keys() - {number for one in listed for number in one}
    if unknown:
        raise StateDictError(
            f"[{where}] wanted states of the groups' parameters; got some of {excerpt(unknown)}. {UNHARMED}"
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
            with _said_as(_place(where, name), "a state dict that it takes", UNHARMED):
                state[name].load_state_dict(dicts[name])
        for name in modules:
            state[name].load_state_dict(dicts[name])
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise
