"""The tables' optimizers as torch sees them: settings that schedulers may change, and steps that happen in backward."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, ValuesView
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from shoal.config import Optimizer
from shoal.errors import ConfigError, StateDictError
from shoal.modules.groups import Groups
from shoal.table import Group


class _Settings(MutableMapping[str, Any]):
    """A param group as its table reads it in a backward: a setting that was changed since the last one is checked."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._checked: dict[str, Any] = dict(optimizer.hyper())
        first = next(iter(self._checked))
        self._given = itemgetter(first, *self._checked)  # the first twice: a tuple also of one setting
        self._seen: tuple[Any, ...] | None = None

    def __getitem__(self, name: str) -> Any:
        given = self._group[name]
        if isinstance(given, Tensor):
            given = given.item()
        elif isinstance(given, list):
            given = tuple(given)
        if given != self._checked[name]:
            replace(self._optimizer, **{name: given})  # raises ConfigError
            self._checked[name] = given
        return given

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(self._group[name], Tensor):
            self._group[name].fill_(value)
        else:
            self._group[name] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"[bags.optimizer] a setting can be changed, not removed; got {name!r}.")

    def values(self) -> ValuesView[Any]:
        # Read for every table in every backward, so at first without a look at each.
        given = self._given(self._group)
        if given != self._seen:
            for name in self._checked:
                self[name]
            # A tensor or a list may be changed in place.
            self._seen = None if any(isinstance(one, Tensor | list) for one in given) else given
        return self._checked.values()

    def __iter__(self) -> Iterator[str]:
        return iter(self._checked)

    def __len__(self) -> int:
        return len(self._checked)


class TableOptimizer(torch.optim.Optimizer):
    """One param group for each table that has settings to change while training, with the table's name.

    Rows are updated in the backward pass, so `step` and `zero_grad` have nothing to do; they are here so that
    schedulers and training loops find what they expect.
    """

    # Schedulers warn where no `step` came before theirs, but the backward pass is ours.
    _opt_called = True

    def __init__(self, group: Group | Groups) -> None:
        self._tables = [table for table in group.tables if table.optimizer_hyper]
        groups = [
            # torch wants a parameter in every group; the rows are not one.
            {
                "params": [torch.nn.Parameter(torch.empty(0, device="cpu"))],
                "name": table.config.name,
                **table.optimizer_hyper,
            }
            for table in self._tables
        ]
        # Some schedulers ask the defaults whether there are betas or a momentum to change.
        shared = set.intersection(*(set(table.optimizer_hyper) for table in self._tables))
        super().__init__(groups, {name: groups[0][name] for name in shared})
        self._share()

    def _share(self) -> None:
        for table, group in zip(self._tables, self.param_groups, strict=True):
            assert table.config.optimizer is not None
            table.optimizer_hyper = _Settings(table.config.optimizer, group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the groups are the tables, and rows are updated in the backward pass."""
        if len(self.param_groups) == len(self.__dict__.get("_tables", self.param_groups)):  # a copy has no tables
            raise ConfigError(
                "[bags.optimizer] wanted no other param group: it has one for each table, and its step() updates "
                "nothing. Give parameters to an optimizer of their own."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take settings over, as of `state_dict()`; rows and their state are the module's."""
        given = {group.get("name"): set(group) for group in state_dict["param_groups"]}
        wanted = {table.config.name: set(table.optimizer_hyper) for table in self._tables}
        if list(given) != list(wanted) or any(not wanted[name] <= given[name] for name in wanted):
            raise StateDictError(
                f"[bags.optimizer] wanted settings of the tables {_shown(wanted)}, in this order; got {_shown(given)}."
            )
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Nothing: rows are updated in the backward pass."""
        return None if closure is None else closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: rows keep no gradient."""


def _shown(groups: Mapping[Any, set[str]]) -> str:
    return ", ".join(f"{name!r} ({', '.join(sorted(names - {'params', 'name'}))})" for name, names in groups.items())
