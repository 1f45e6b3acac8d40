"""The numbers of a step: what tables hand to kernels without a look at the optimizer's settings."""

import math
from dataclasses import replace

import pytest

import shoal
from shoal import Adagrad, Adam, AdamW, Assign, Clip, Ftrl, PartialRowwiseAdam, RowwiseAdagrad, optim
from shoal.ops.update.apply import HYPER_COLUMNS

BETAS = (0.9, 0.999)
ROW = (*BETAS, 1e-8, 0.0, 0.0)  # of Adam's kernels: betas, eps, and no corrections of the whole table
FIRST = (*BETAS, 1e-8, 1.0 - 0.9, 1.0 - 0.999)
LOGS = (math.log(0.9), math.log(0.999))
# (optimizer, weight decay, factor of decoupled decay, settings, what only devices take)
STEPS = [
    (shoal.SGD(0.5, weight_decay=0.25), 0.25, 1.0, (0.0, 0.0), ()),
    (shoal.SGD(0.5, momentum=0.75, nesterov=True), 0.0, 1.0, (0.75, 1.0), ()),
    (Adagrad(0.5, eps=0.125, decoupled_weight_decay=0.5), 0.0, 0.75, (0.125,), ()),
    (RowwiseAdagrad(0.5, eps=0.125), 0.0, 1.0, (0.125,), ()),
    (Adam(0.5, weight_decay=0.25), 0.25, 1.0, ROW, LOGS),
    (Adam(0.5, bias_correction="global"), 0.0, 1.0, FIRST, LOGS),
    (Adam(0.5, betas=(0.0, 0.5)), 0.0, 1.0, (0.0, 0.5, 1e-8, 0.0, 0.0), (-1e4, math.log(0.5))),
    (AdamW(0.5, weight_decay=0.5), 0.0, 0.75, ROW, LOGS),
    (PartialRowwiseAdam(0.5, weight_decay=0.25, decoupled_weight_decay=0.5), 0.25, 0.75, ROW, LOGS),
    (Ftrl(0.5, l1=0.25, l2=0.125, beta=2.0), 0.0, 1.0, (0.25, 0.125, 2.0), ()),
]
LIMITS = [
    ({}, (0.0, 0.0, 0.0)),
    ({"clip": Clip(value=0.3, norm=1.7)}, (0.3, 1.7, 0.0)),
    ({"clip": Clip(norm=0.7, nonfinite="skip"), "max_norm": 2.5}, (0.0, 0.7, 2.5)),
]


@pytest.mark.parametrize(("limits", "numbers"), LIMITS, ids=["no limits", "clip", "clip and max_norm"])
@pytest.mark.parametrize(("optimizer", "decay", "shrink", "settings", "more"), STEPS, ids=repr)
def test_a_step_has_its_settings_and_limits_as_kernels_take_them(
    optimizer, decay, shrink, settings, more, limits, numbers
) -> None:
    optimizer = replace(optimizer, **limits)
    step = optim.step(optimizer, optimizer.hyper(), 1)
    assert step.settings == settings
    assert step.device_numbers == (0.5, decay, shrink, *numbers, *settings, *more)
    assert len(step.device_numbers) <= HYPER_COLUMNS.value
    assert step.is_plain == (not any(numbers) and decay == 0.0 and shrink == 1.0)


class _Core:
    """What the core hears of a table's step."""

    def set(self, *heard) -> None:
        self.heard = heard


def test_the_core_hears_all_of_a_step() -> None:
    optimizer = Adagrad(0.5, eps=0.125, weight_decay=0.25, clip=Clip(value=0.3, norm=1.7), max_norm=2.5)
    core = _Core()
    optim.step(optimizer, optimizer.hyper(), 1).tell(core)
    assert core.heard[2:] == (0.5, (0.125,), 0.25, 1.0, 0.3, 1.7, 2.5)


@pytest.mark.parametrize("kind", [Adam, AdamW, PartialRowwiseAdam])
def test_only_corrections_of_the_whole_table_make_a_step_one_backward_s(kind) -> None:
    for correction, passes in [("row", False), ("global", True)]:
        optimizer = kind(bias_correction=correction)
        assert optim.step(optimizer, optimizer.hyper(), 1).is_of_one_backward == passes


def test_optimizers_that_differ_in_numbers_only_share_a_launch() -> None:
    assert optim.kernel_of(Adam(0.1)) == optim.kernel_of(Adam(0.2, clip=Clip(norm=1.0), max_norm=2.0))
    assert optim.kernel_of(Assign()) == optim.kernel_of(Assign(duplicates="last"))
    assert optim.kernel_of(None) is None
    kinds = [shoal.SGD(), shoal.SGD(momentum=0.5), Adam(), AdamW(), Assign(), Assign(duplicates="first"), None]
    assert len({optim.kernel_of(kind) for kind in kinds}) == len(kinds)


def test_gradients_that_are_not_finite_raise_where_the_optimizer_says_so() -> None:
    assert optim.raises_nonfinite(Adam())
    assert not optim.raises_nonfinite(Adam(clip=Clip(nonfinite="skip")))
    assert not optim.raises_nonfinite(None)
