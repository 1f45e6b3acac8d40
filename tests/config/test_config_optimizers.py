"""Optimizers' settings and the state columns they ask for."""

import dataclasses
import math

import numpy as np
import pytest

from shoal.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Clip,
    Column,
    Ftrl,
    Optimizer,
    PartialRowwiseAdam,
    RowwiseAdagrad,
)
from shoal.errors import ConfigError

WITH_LR = [SGD, Adagrad, RowwiseAdagrad, Adam, AdamW, PartialRowwiseAdam, Ftrl]
ADAMS = [Adam, AdamW, PartialRowwiseAdam]
NOT_NUMBERS = [math.nan, math.inf, True, "0.1", None, 1e39]


@pytest.mark.parametrize("kind", WITH_LR)
def test_learning_rate_may_be_positional_and_has_a_default(kind):
    assert kind().lr == 0.01
    assert kind(0.5) == kind(lr=0.5)
    with pytest.raises(ConfigError, match="too many positional"):
        kind(0.5, 0.9)


@pytest.mark.parametrize("kind", WITH_LR)
@pytest.mark.parametrize("lr", [*NOT_NUMBERS, -0.1])
def test_impossible_learning_rate_is_refused(kind, lr):
    with pytest.raises(ConfigError, match=rf"\[{kind.__name__}\] lr: wanted"):
        kind(lr)


def test_zero_learning_rate_is_fine_except_where_the_formula_divides_by_it():
    for kind in WITH_LR:
        if kind is not Ftrl:
            assert kind(0).lr == 0.0
    with pytest.raises(ConfigError, match=r"number >= 1e-06 .*; got 0"):
        Ftrl(0)


@pytest.mark.parametrize(
    ("optimizer", "columns"),
    [
        (SGD(), []),
        (SGD(momentum=0.9), [("momentum", 5, 0.0)]),
        (Adagrad(), [("sum", 5, 0.0)]),
        (Adagrad(initial=0.5), [("sum", 5, 0.5)]),
        (RowwiseAdagrad(initial=0.5), [("sum", 1, 0.5)]),
        (Adam(), [("exp_avg", 5, 0.0), ("exp_avg_sq", 5, 0.0), ("count", 1, 0.0)]),
        (Adam(bias_correction="global"), [("exp_avg", 5, 0.0), ("exp_avg_sq", 5, 0.0)]),
        (AdamW(), [("exp_avg", 5, 0.0), ("exp_avg_sq", 5, 0.0), ("count", 1, 0.0)]),
        (PartialRowwiseAdam(), [("exp_avg", 5, 0.0), ("exp_avg_sq", 1, 0.0), ("count", 1, 0.0)]),
        (PartialRowwiseAdam(bias_correction="global"), [("exp_avg", 5, 0.0), ("exp_avg_sq", 1, 0.0)]),
        (Ftrl(), [("z", 5, 0.0), ("n", 5, 0.1)]),
        (Assign(), []),
    ],
)
def test_state_columns(optimizer, columns):
    made = optimizer.columns(5)
    assert [(column.name, column.width, column.initial) for column in made] == columns
    assert [column.name for column in made if column.signed] == [
        name for name, *_ in columns if name in ("momentum", "exp_avg", "z")
    ]


@pytest.mark.parametrize(
    ("optimizer", "names"),
    [
        (SGD(), ["lr", "weight_decay", "decoupled_weight_decay"]),
        (SGD(momentum=0.9), ["lr", "weight_decay", "decoupled_weight_decay", "momentum"]),
        (Adagrad(), ["lr", "eps", "weight_decay", "decoupled_weight_decay"]),
        (RowwiseAdagrad(), ["lr", "eps", "weight_decay", "decoupled_weight_decay"]),
        (Adam(), ["lr", "betas", "eps", "weight_decay"]),
        (AdamW(), ["lr", "betas", "eps", "weight_decay"]),
        (PartialRowwiseAdam(), ["lr", "betas", "eps", "weight_decay", "decoupled_weight_decay"]),
        (Ftrl(), ["lr", "l1", "l2", "beta"]),
        (Assign(), []),
    ],
)
def test_settings_that_may_change_are_fields_and_can_be_replaced(optimizer, names):
    assert list(optimizer.hyper()) == names
    assert optimizer.hyper() == {name: getattr(optimizer, name) for name in names}
    assert dataclasses.replace(optimizer, **optimizer.hyper()) == optimizer
    if names:
        with pytest.raises(ConfigError, match="lr"):
            dataclasses.replace(optimizer, lr=-1.0)


def test_weight_decay_defaults():
    assert AdamW().weight_decay == 0.01
    assert all(kind().weight_decay == 0.0 for kind in WITH_LR if kind not in (AdamW, Ftrl))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, "weight_decay") for kind in WITH_LR if kind is not Ftrl]
    + [(kind, "decoupled_weight_decay") for kind in (SGD, Adagrad, RowwiseAdagrad, PartialRowwiseAdam)]
    + [(kind, "eps") for kind in (Adagrad, RowwiseAdagrad, *ADAMS)]
    + [(kind, "initial") for kind in (Adagrad, RowwiseAdagrad, Ftrl)]
    + [(Ftrl, "l1"), (Ftrl, "l2"), (Ftrl, "beta"), (SGD, "momentum")],
)
def test_settings_that_cannot_be_negative(kind, setting):
    for bad in (-1e-9, *NOT_NUMBERS):
        with pytest.raises(ConfigError, match=rf"\[{kind.__name__}\] {setting}: wanted .* >= (0|1e-15)"):
            kind(**{setting: bad})
    assert getattr(kind(**{setting: np.float32(0.5)}), setting) == 0.5


@pytest.mark.parametrize("kind", ADAMS)
@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (0.9,), (0.9, 0.9, 0.9), 0.9, None, "ab"])
def test_impossible_betas_are_refused(kind, betas):
    with pytest.raises(ConfigError, match="betas"):
        kind(betas=betas)


def test_betas_become_a_tuple_of_floats():
    assert Adam(betas=[0, np.float64(0.5)]).betas == (0.0, 0.5)
    assert hash(Adam(betas=[0, 0.5])) == hash(Adam(betas=(0.0, 0.5)))


def test_momentum_below_one_and_nesterov_with_momentum():
    with pytest.raises(ConfigError, match="momentum: wanted a finite float32 number >= 0 and < 1"):
        SGD(momentum=1.0)
    with pytest.raises(ConfigError, match="nesterov: wanted momentum > 0"):
        SGD(nesterov=True)
    with pytest.raises(ConfigError, match="nesterov: wanted True or False; got 1"):
        SGD(nesterov=1, momentum=0.9)
    assert SGD(nesterov=True, momentum=0.9).nesterov


def test_choices_are_checked_with_a_suggestion():
    with pytest.raises(
        ConfigError, match=r"bias_correction: wanted one of 'row', 'global'; got 'rows'\. Did you mean 'row'\?"
    ):
        Adam(bias_correction="rows")
    with pytest.raises(
        ConfigError, match=r"duplicates: wanted one of 'last', 'first', 'mean'; got 'LAST'\. Did you mean"
    ):
        Assign(duplicates="LAST")
    with pytest.raises(ConfigError, match=r"nonfinite: wanted one of 'raise', 'skip'; got None\.$"):
        Clip(nonfinite=None)


def test_assign_takes_the_last_duplicate_and_no_learning_rate():
    assert Assign().duplicates == "last"
    with pytest.raises(ConfigError, match="the unknown 'lr'"):
        Assign(lr=0.1)


@pytest.mark.parametrize("setting", ["value", "norm"])
@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_clip_limits_are_positive(setting, bad):
    with pytest.raises(ConfigError, match=rf"\[Clip\] {setting}: wanted a finite float32 number > 0"):
        Clip(**{setting: bad})


def test_clip_defaults_to_no_limit_and_raising():
    assert Clip() == Clip(value=None, norm=None, nonfinite="raise")
    assert Clip(value=1, norm=2) == Clip(1.0, 2.0)


@pytest.mark.parametrize("kind", [*WITH_LR, Assign])
def test_every_optimizer_takes_clip_and_max_norm_by_keyword(kind):
    optimizer = kind(clip=Clip(norm=1.0, nonfinite="skip"), max_norm=3)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.clip.norm == 1.0
    assert optimizer.max_norm == 3.0
    assert kind().clip == Clip()
    assert kind().max_norm is None
    with pytest.raises(ConfigError, match=r"clip: wanted a Clip; got 1\.0"):
        kind(clip=1.0)
    for bad in (0.0, -1.0, math.nan, True):
        with pytest.raises(ConfigError, match=r"max_norm: wanted .* > 0"):
            kind(max_norm=bad)


def test_column_is_checked():
    assert Column("sum", np.int32(3)) == Column("sum", 3, 0.0)
    for bad in (("", 1), (3, 1), ("sum", 0), ("sum", 1.0), ("sum", 1, math.nan)):
        with pytest.raises(ConfigError, match=r"\[Column\]"):
            Column(*bad)


def test_base_class_cannot_be_constructed():
    with pytest.raises(TypeError, match="abstract"):
        Optimizer()


def test_settings_under_which_rows_would_not_stay_finite_are_refused():
    for kind in WITH_LR:
        with pytest.raises(ConfigError, match=r"lr: wanted .* < 1e.06"):
            kind(1e6)
    for kind in (Adagrad, RowwiseAdagrad, Adam, AdamW, PartialRowwiseAdam):
        with pytest.raises(ConfigError, match=r"eps: wanted .* >= 1e-15"):
            kind(eps=0.0)
    for optimizer in (SGD, Adagrad, RowwiseAdagrad, PartialRowwiseAdam):
        with pytest.raises(ConfigError, match="decoupled_weight_decay: wanted at most 2 / lr"):
            optimizer(lr=3.0, decoupled_weight_decay=1.0)
    with pytest.raises(ConfigError, match="weight_decay: wanted at most 2 / lr"):
        AdamW(lr=3.0, weight_decay=1.0)
    with pytest.raises(ConfigError, match="initial: wanted it, beta or l2"):
        Ftrl(initial=0.0)
    assert Ftrl(initial=0.0, beta=1.0).initial == 0.0
