"""State dicts of dense modules and of optimizers: what a commit takes of them, and how they are loaded again.

They are one dict with the entries `MODEL` and `OPTIMIZER`, as far as they were given.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import CheckpointError, InputError, ShoalError
from shoal.records.excerpt import excerpt, sentence
from shoal.table import without_rows

MODEL, OPTIMIZER = "model", "optimizer"


def require_states(where: str, dense: Any, optimizer: Any) -> None:
    """Raises InputError where `dense` is no module, or `optimizer` has no state dict."""
    if dense is not None and not isinstance(dense, nn.Module):
        raise InputError(f"[{where}] dense: wanted a torch.nn.Module; got {type(dense).__name__}.")
    if optimizer is not None:
        _each(where, optimizer, lambda _one: None)


def states_of(where: str, dense: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the state dicts of what is given."""
    states: dict[str, Any] = {}
    require_states(where, dense, optimizer)
    if dense is not None:
        with without_rows():
            states[MODEL] = dense.state_dict()
    if optimizer is not None:
        states[OPTIMIZER] = _each(where, optimizer, lambda one: one.state_dict())
    return states


def _each(where: str, optimizer: Any, call: Any) -> Any:
    """Returns what a call returns for an optimizer, or for each of several by name. Schedulers and scalers may be among
    them."""
    several = isinstance(optimizer, Mapping)
    for one in optimizer.values() if several else [optimizer]:
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise InputError(
                f"[{where}] optimizer: wanted an object with state_dict and load_state_dict, or a dict of such; got "
                f"{type(one).__name__}."
            )
    return {name: call(one) for name, one in optimizer.items()} if several else call(optimizer)


def check_dense(where: str, states: Mapping[str, Any], dense: Any, optimizer: Any) -> None:
    """Raises CheckpointError where state dicts are not those of a model and its optimizers. Nothing changes."""
    if dense is not None:
        if MODEL not in states:
            raise CheckpointError(f"[{where}] dense: the version has no dense weights. Leave dense= out.")
        with without_rows():
            _check_model(where, dense, states[MODEL])
    if optimizer is not None:
        if OPTIMIZER not in states:
            raise CheckpointError(f"[{where}] optimizer: the version has no optimizer's state. Leave optimizer= out.")
        held = states[OPTIMIZER]
        _each(where, optimizer, lambda _one: None)
        if isinstance(optimizer, Mapping) and (not isinstance(held, dict) or set(held) != set(optimizer)):
            raise CheckpointError(
                f"[{where}] optimizer: wanted {_committed(held)}; got {excerpt(list(optimizer))}. Give what was "
                f"committed, or leave optimizer= out."
            )
        for name, one in optimizer.items() if isinstance(optimizer, Mapping) else [("", optimizer)]:
            _check_optimizer(where, one, held[name] if isinstance(optimizer, Mapping) else held)


def _check_model(where: str, dense: Any, held: Any) -> None:
    if not isinstance(dense, nn.Module) or not isinstance(held, Mapping):
        return  # only its own load_state_dict can tell
    wanted = {name: value for name, value in dense.state_dict().items() if isinstance(value, Tensor)}
    if absent := sorted(set(wanted) ^ {name for name, value in held.items() if isinstance(value, Tensor)}):
        raise CheckpointError(
            f"[{where}] dense: the model and the version differ in {', '.join(map(repr, absent[:3]))}. Make the model "
            f"as it was committed, or leave dense= out."
        )
    for name, value in wanted.items():
        if not nn.parameter.is_lazy(value) and value.shape != held[name].shape:
            raise CheckpointError(
                f"[{where}] dense: {name!r} has the shape {list(value.shape)}; the version's has "
                f"{list(held[name].shape)}. Make the model as it was committed, or leave dense= out."
            )


def _committed(held: Any) -> str:
    """Returns what was committed, for an error: several optimizers under their names, or one."""
    if isinstance(held, Mapping) and "state" not in held and all(isinstance(one, Mapping) for one in held.values()):
        return f"a dict of {excerpt(list(held))}"
    return "the one that was committed"


def require_initialised(where: str, optimizer: Any, held: Mapping[str, Any]) -> None:
    """Raises CheckpointError for an optimizer that must make its states before it can load any, as TorchRec's must."""
    if held.get("state") and hasattr(optimizer, "init_state") and not optimizer.state:
        raise CheckpointError(
            f"[{where}] optimizer: wanted a {type(optimizer).__name__} that has states, which it copies into; got one "
            f"without. Call its init_state() first."
        )


def _check_optimizer(where: str, optimizer: Any, held: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(held, Mapping):
        return  # only its own load_state_dict can tell
    # Not `optimizer.param_groups`: TorchRec's keyed optimizers leave them out of their state dicts.
    mine, theirs = _group_sizes(optimizer.state_dict()), _group_sizes(held)
    if mine != theirs:
        got = f"it has groups of {mine} parameters; the version's had {theirs}"
        if theirs is None or mine is None:
            got = f"wanted {_committed(held)}; got {type(optimizer).__name__} with other entries in its state dict"
        raise CheckpointError(f"[{where}] optimizer: {got}. Make it as it was committed, or leave optimizer= out.")
    require_initialised(where, optimizer, held)


def _group_sizes(state: Mapping[str, Any]) -> list[int | None] | None:
    groups = state.get("param_groups")
    return [_parameters_of(group) for group in groups] if isinstance(groups, list) else None


def _parameters_of(group: Any) -> int | None:
    """Returns how many parameters a group of a file has; None where it is no group."""
    params = group.get("params", []) if isinstance(group, dict) else None
    return len(params) if isinstance(params, list) else None


@dataclass
class Done:
    """Whether a body has done its work: a later failure, as by an interrupt, undoes nothing."""

    is_done: bool = False


@contextmanager
def restored_dense(
    where: str, states: Mapping[str, Any], dense: Any, optimizer: Any, done: Done | None = None
) -> Iterator[None]:
    """Loads state dicts into a model and its optimizers. Where these do not take them, or the body fails before it is
    done, they get back the states that they had."""
    check_dense(where, states, dense, optimizer)
    before = _copied(states_of(where, dense, optimizer))
    try:
        try:
            _load(states, dense, optimizer)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ShoalError):
                raise
            raise CheckpointError(
                f"[{where}] dense, optimizer: one does not take what was committed: {sentence(str(error))} Make it as "
                f"it was, or leave it out."
            ) from error
        yield
    except BaseException as error:
        if done is not None and done.is_done:
            raise
        try:
            _load(before, dense, optimizer)
        except Exception as again:
            error.add_note(f"Dense weights or their optimizer are not as they were before: {again!r:.300}.")
        raise


def _copied(value: Any) -> Any:
    """Returns a copy of state dicts on the host: a device may not have room for two models."""
    if isinstance(value, Tensor):
        return value if nn.parameter.is_lazy(value) else value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value


def _load(states: Mapping[str, Any], dense: Any, optimizer: Any) -> None:
    if dense is not None:
        with without_rows():
            dense.load_state_dict(states[MODEL])
    if optimizer is not None:
        held = states[OPTIMIZER]
        if isinstance(optimizer, Mapping):
            for name, one in optimizer.items():
                one.load_state_dict(held[name])
        else:
            optimizer.load_state_dict(held)
