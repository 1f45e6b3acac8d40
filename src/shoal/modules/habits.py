"""Habits of training loops that do something else with tables than with parameters; each is warned of once."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.errors import ModeWarning, OptimizerWarning, RanksWarning
from shoal.modules.scaling import scaler_in_use
from shoal.modules.warned import warn
from shoal.table import Group

# Steps of a torch optimizer, each after lookups in eval() alone, that are fine-tuning: one may belong to another model.
_STEPS_OF_FINE_TUNING = 2


class Habits:
    """What one collection's loop was warned of. The collection tells of its lookups and backwards.

    kind: the collection's class. without_optimizer: names of the tables whose optimizer the user did not name.
    """

    def __init__(self, kind: str, name: str, group: Group, without_optimizer: Sequence[str]) -> None:
        self._kind = kind
        self._name = name
        self._group = group
        self._without_optimizer = tuple(without_optimizer)
        self._trains = any(
            table.config.optimizer is not None and any(feature.mode != "read" for feature in table.config.features)
            for table in group.tables
        )
        self._has_looked_up = False  # in train()
        self._may_bear_unseen = True
        self._lookups_without_gradients = 0
        self._may_freeze_unseen = True
        self._steps_while_frozen = 0
        self._may_scale_unseen = self._trains

    # ---- lookups

    def before_lookup(self, training: bool) -> None:
        """Before every lookup that no compiler traces."""
        if not training:
            if self._may_freeze_unseen and self._trains and torch.is_grad_enabled():
                _await_step(self)
            return
        if self._steps_while_frozen or id(self) in _awaiting:
            self._steps_while_frozen = 0
            _awaiting.pop(id(self), None)
        if not self._has_looked_up:
            self._has_looked_up = True
            self._warn_of_ranks()
        if self._without_optimizer and torch.is_grad_enabled():
            without, self._without_optimizer = self._without_optimizer, ()
            self._warn_of_optimizer(without)

    def rows_before(self, training: bool) -> int | None:
        """How many rows there are before a training lookup without gradients; None where its births need no warning."""
        if not training or torch.is_grad_enabled() or torch.compiler.is_compiling() or not self._may_bear_unseen:
            return None
        self._lookups_without_gradients += 1
        if self._group.device.type == "cuda":
            # Counting waits for the device: the first lookup does, the second, the fourth, and so on.
            count = self._lookups_without_gradients
            if count & (count - 1) or torch.cuda.is_current_stream_capturing():
                return None
        return self._rows()

    def after_lookup(self, before: int | None) -> None:
        """Warn where rows were born in a lookup that no backward can follow. before: what `rows_before` returned."""
        if before is None or self._rows() <= before or _is_checkpointed():
            return
        self._may_bear_unseen = False
        warn(
            ModeWarning,
            f"[{self._name}] a lookup in train() gave unseen keys a row although gradients are off: ids of a "
            f"validation set stay in the tables. Call bags.eval() first, and bags.train() after it; or use "
            f"{self._kind}.lookup().",
        )

    def _rows(self) -> int:
        with self._group.reading():
            return sum(len(table) for table in self._group.tables)

    def _warn_of_ranks(self) -> None:
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            warn(
                RanksWarning,
                f"[{self._name}] trains on one of {distributed.get_world_size()} ranks: each rank has tables of its "
                f"own, which are neither sharded nor synchronised, and come to differ. Train tables in one process.",
            )

    def _warn_of_optimizer(self, names: Sequence[str]) -> None:
        tables = ", ".join(map(repr, names))
        used = [table.config.optimizer for table in self._group.tables if table.config.name in names]
        shown = dict.fromkeys(f"{type(one).__name__}(lr={one.hyper().get('lr')})" for one in used if one is not None)
        warn(
            OptimizerWarning,
            f"[{self._name}] no optimizer was named for the TorchRec configs {tables}; their rows are trained with "
            f"{', '.join(shown)}. Name one: optimizer= of the collection, table_of(config, optimizer=...) or "
            f"apply_optimizer_in_backward of shoal.interop.torchrec. TorchRec's own function walks parameters(), where "
            f"rows are not.",
        )

    # ---- steps and backwards

    def after_step(self) -> None:
        """After a step of any torch optimizer that follows a lookup in eval() with gradients on."""
        self._steps_while_frozen += 1
        if self._steps_while_frozen < _STEPS_OF_FINE_TUNING or not self._may_freeze_unseen:
            return
        self._may_freeze_unseen = False
        warn(
            ModeWarning,
            f"[{self._name}] an optimizer makes steps after lookups in eval(), where rows stay as they are. Call "
            f"bags.train() to train them too. If they are to stay, use {self._kind}.lookup(), or look up under "
            f"torch.no_grad(): their output needs no gradient.",
        )

    def before_backward(self) -> None:
        """Before the update of a backward, while all rows are as they were."""
        if not self._may_scale_unseen or self._group.loss_scale is not None:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        scaler = scaler_in_use()
        if scaler is None:
            return
        self._may_scale_unseen = False
        warn(
            OptimizerWarning,
            f"[{self._name}] a GradScaler scales losses by {scaler.get_scale():g}, and `scaler` of the collection is "
            f"not set. If this loss is one of them, rows take steps that are too large by that. Set bags.scaler = "
            f"scaler before the first backward.",
        )


# Of collections that looked up in eval() with gradients on, since the last step of an optimizer.
_awaiting: dict[int, "weakref.ref[Habits]"] = {}
_is_hooked = False


def _await_step(habits: Habits) -> None:
    global _is_hooked
    if not _is_hooked:
        _is_hooked = True
        register_optimizer_step_post_hook(_after_step)
    if id(habits) not in _awaiting:
        _awaiting[id(habits)] = weakref.ref(habits)


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _awaiting or torch.compiler.is_compiling():
        return
    for key, awaited in list(_awaiting.items()):  # a copy, made at once: other threads look up
        _awaiting.pop(key, None)
        habits = awaited()
        if habits is not None:
            habits.after_step()


def _is_checkpointed() -> bool:
    """Whether activation checkpointing calls: it runs a forward without gradients, and once more with them."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
