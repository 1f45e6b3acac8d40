"""Whether saved state dicts fit the objects that are to load them: checked before any of them changes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config import format_size
from shoal.errors import StateDictError
from shoal.interop.dcp_files import UNHARMED, Names, Saved, Shape
from shoal.log.states import require_initialised
from shoal.modules.collection import Collection
from shoal.modules.state import trained_otherwise
from shoal.records.excerpt import excerpt
from shoal.table import without_rows


def collections_in(module: nn.Module) -> Iterator[tuple[str, Collection]]:
    """Yields the collections of a module, each with the prefix of its names in the module's state dict."""
    for path, one in module.named_modules(remove_duplicate=False):
        if isinstance(one, Collection):
            yield (f"{path}." if path else ""), one


def require_shapes(where: str, module: nn.Module, saved: Mapping[Names, Shape | None], checkpoint: Saved) -> None:
    """Raise StateDictError where a module's state dict would have other entries than the saved ones."""
    with without_rows():
        dense = module.state_dict()
    tables = [table for prefix, one in collections_in(module) for table in one.state_shapes(prefix)]
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
    for prefix, one in collections_in(module):
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
    for prefix, one in collections_in(module):
        for table, entries in zip(one.tables().values(), one.state_shapes(prefix), strict=True):
            group, number = table.place
            config = group.tables[number].config
            begin = next(name for name in entries if name.endswith(".weight_id")).removesuffix("weight_id")
            shapes = {str(path[0]): None if shape is None else shape[1] for path, shape in saved.items()}
            if otherwise := trained_otherwise(config, begin, shapes):
                raise StateDictError(f"[{where}] {otherwise} {UNHARMED} Make the table's optimizer as it was.")


def require_alike(where: str, one: Any, given: set[str], live: Mapping[Any, Any], checkpoint: Saved) -> None:
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


def require_loadable(where: str, one: Any, given: dict[str, Any]) -> None:
    """Raise StateDictError if a module's tables or an optimizer would not take a state dict."""
    if isinstance(one, nn.Module):
        for prefix, collection in collections_in(one):
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
