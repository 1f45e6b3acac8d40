"""Warns of habits of training loops that are right for parameters and wrong for tables, each once."""

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shoal.errors import ModeWarning, OptimizerWarning, RanksWarning, WeightsWarning
from shoal.modules.groups import Groups
from shoal.modules.scaling import is_scaled_backward, scalers_in_use
from shoal.modules.warned import warn
from shoal.table import Group, registry

# Has the process group; there is none where torch was built without.
_member: Any = getattr(torch.distributed, "GroupMember", None)
# Steps of an optimizer, one after the other and each with a lookup in eval() before it, that are fine-tuning: after one
# evaluation another model may be trained.
_STEPS_OF_FINE_TUNING = 2
# After so many backwards that a GradScaler of the process did not scale, this loop is taken to have none.
_UNSCALED_BACKWARDS = 1000


class Habits:
    """Watches one collection's lookups and backwards, and warns. Operators report those of compiled programs.

    kind: the collection's class. without_optimizer: names of the tables whose optimizer the user did not name.
    """

    def __init__(self, kind: str, name: str, group: Group | Groups, without_optimizer: Sequence[str]) -> None:
        self._kind = kind
        self._name = name
        self._group = weakref.ref(group)
        self._without_optimizer = tuple(without_optimizer)
        self._trains = any(
            table.config.optimizer is not None and any(feature.mode != "read" for feature in table.config.features)
            for table in group.tables
        )
        self._ranks: Any = None  # the process group that was looked at
        self._may_mix_unseen = True  # state dicts of several ranks
        self._may_ignore_weights_unseen = True
        self._may_bear_unseen = True
        self._lookups_without_gradients = 0
        self._may_freeze_unseen = self._trains
        self._is_frozen_lookup = False  # the last one, since the last step
        self._steps_while_frozen = 0
        self._stepper: int | None = None
        self._backwards_to_look_at = _UNSCALED_BACKWARDS if self._trains else 0

    # ---- lookups

    def before_lookup(self, training: bool, with_gradients: bool) -> None:
        """Before every lookup. with_gradients: whether a backward may follow, or could in train()."""
        if not training:
            if with_gradients and self._may_freeze_unseen:
                self._is_frozen_lookup = True
                _await_step(self)
            return
        if self._steps_while_frozen or self._is_frozen_lookup:
            self._forget_steps()
        if not with_gradients:
            return
        if _member is not None and _member.WORLD is not self._ranks:
            self._ranks = _member.WORLD
            self._warn_of_ranks()
        if self._without_optimizer:
            without, self._without_optimizer = self._without_optimizer, ()
            self._warn_of_optimizer(without)

    def births_before(self, training: bool, with_gradients: bool) -> int | None:
        """Births before a training lookup without gradients; None where they need no warning."""
        if not training or with_gradients or not self._may_bear_unseen or torch.compiler.is_compiling():
            return None
        self._lookups_without_gradients += 1
        group = self._group()
        if group is not None and group.device.type == "cuda":
            # Counting waits for the device: the first lookup does, the second, the fourth, and so on.
            count = self._lookups_without_gradients
            if count & (count - 1) or torch.cuda.is_current_stream_capturing():
                return None
        return self._births()

    def after_lookup(self, before: int | None) -> None:
        """Warn where rows were born in a lookup that no backward can follow. before: what `births_before` returned."""
        if before is None or self._births() <= before or _is_checkpointed():
            return
        self._may_bear_unseen = False
        warn(
            ModeWarning,
            f"[{self._name}] a lookup in train() gave unseen keys a row although gradients are off: ids of a "
            f"validation set stay in the tables. Call bags.eval() first, and bags.train() after it; or use "
            f"{self._kind}.lookup().",
        )

    def _births(self) -> int:
        group = self._group()
        return 0 if group is None else group.births()

    def _warn_of_ranks(self) -> None:
        if not self._trains or self._ranks is None or torch.distributed.get_world_size() == 1:
            return
        warn(
            RanksWarning,
            f"[{self._name}] trains on one of {torch.distributed.get_world_size()} ranks: each rank has tables of its "
            f"own, which are neither sharded nor synchronised, and come to differ. Train tables in one process.",
        )

    def _warn_of_optimizer(self, names: Sequence[str]) -> None:
        group = self._group()
        tables = [] if group is None else group.tables
        used = [table for table in tables if table.config.name in names]
        shown = dict.fromkeys(f"{type(one.config.optimizer).__name__}(lr={one.optimizer_hyper['lr']})" for one in used)
        warn(
            OptimizerWarning,
            f"[{self._name}] no optimizer was named for the TorchRec configs {', '.join(map(repr, names))}; their rows "
            f"are trained with {', '.join(shown)}. Name one: optimizer= of the collection, table_of(config, "
            f"optimizer=...) or apply_optimizer_in_backward of shoal.interop.torchrec. TorchRec's own function walks "
            f"parameters(), where rows are not.",
        )

    def on_weights(self) -> None:
        """Where a batch has weights that are ignored, and the user did not say so."""
        if not self._may_ignore_weights_unseen:
            return
        self._may_ignore_weights_unseen = False
        warn(
            WeightsWarning,
            f"[{self._name}] a batch has per-sample weights, and is_weighted= was not given: they are ignored, as by "
            f"TorchRec's default for TorchRec configs. Give is_weighted=True to use them, or False to ignore them.",
        )

    # ---- state dicts

    def before_state_dict(self) -> None:
        """Before rows are copied into a state dict."""
        if not self._may_mix_unseen or getattr(_member, "WORLD", None) is None:
            return
        if torch.distributed.get_world_size() == 1:
            return
        self._may_mix_unseen = False
        warn(
            RanksWarning,
            f"[{self._name}] this state dict has the rows of one of {torch.distributed.get_world_size()} ranks. "
            f"torch.distributed.checkpoint takes the ranks' entries of one name for copies of each other, and would "
            f"save keys of one rank with rows of another. Write a file for each rank, or call shoal.save(path, "
            f"model, step=..., rank=..., ranks=...).",
        )

    # ---- steps of torch's optimizers

    def after_step(self, stepper: int) -> bool:
        """After a step of an optimizer, known by its id. Whether to tell of the next one."""
        if self._stepper is None:
            self._stepper = stepper
        if self._stepper != stepper:
            return True
        if not self._is_frozen_lookup:
            self._forget_steps()
            return False
        self._is_frozen_lookup = False
        self._steps_while_frozen += 1
        if self._steps_while_frozen < _STEPS_OF_FINE_TUNING:
            return True
        self._may_freeze_unseen = False
        self._forget_steps()
        warn(
            ModeWarning,
            f"[{self._name}] an optimizer makes steps after lookups in eval(), where rows stay as they are. If they "
            f"are to stay, use {self._kind}.lookup(), or look up under torch.no_grad(): their output needs no "
            f"gradient. Call bags.train() to train them too.",
        )
        return False

    def _forget_steps(self) -> None:
        self._steps_while_frozen, self._is_frozen_lookup, self._stepper = 0, False, None

    # ---- backwards

    def before_backward(self) -> None:
        """Before the update of a backward, while all rows are as they were."""
        group = self._group()
        if not self._backwards_to_look_at or group is None or group.loss_scale is not None:
            return
        scalers = scalers_in_use()
        if not scalers:
            return
        self._backwards_to_look_at -= 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        scale = max(one.get_scale() for one in scalers)
        if scale == 1.0 or not is_scaled_backward(scale):
            return
        self._backwards_to_look_at = 0
        warn(
            OptimizerWarning,
            f"[{self._name}] the loss of this backward was scaled, as it seems by a GradScaler, whose scale is "
            f"{scale:g}, and `scaler` of the collection is not set: rows take steps that are too large by that. Set "
            f"bags.scaler = scaler before the first backward. Where no scaler scales this loss, ignore this.",
        )


def weights_are_ignored(name: str) -> bool:
    """Tell the habits of the collection of that name of a batch whose weights are ignored."""
    habits = registry.group_named(name).habits
    if habits is not None:
        habits.on_weights()
    return True


# A compiled program is told while it is made. torch.compiler.assume_constant_result does no more than this, but imports
# the compiler: a second for each program that imports shoal.
weights_are_ignored._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Of collections that looked up in eval() with gradients on.
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
        habits = awaited()
        if habits is None or not habits.after_step(id(optimizer)):
            _awaiting.pop(key, None)


def _is_checkpointed() -> bool:
    """Whether activation checkpointing calls: it runs a forward without gradients, and once more with them."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
