"""Settings reach the core and the device once, and again when they changed."""

import torch

from shoal import SGD, Adam, Table
from shoal.ops.update.apply import LR
from shoal.table.device.rows import DeviceRows
from shoal.table.device.settings import Settings as DeviceSettings
from shoal.table.host.settings import Settings as HostSettings


class _Core:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.rates = []
        self.settings = []

    def set(self, kind, reduce, rate, settings, *others) -> None:
        self.rates.append(rate)
        self.settings.append(settings)


def test_the_core_hears_settings_again_when_they_changed() -> None:
    optimizer, core = SGD(0.5), _Core()
    settings, hyper = HostSettings(optimizer, core), optimizer.hyper()
    for number, rate in enumerate([0.5, 0.5, 0.25, 0.25, 0.5], 1):
        settings.refresh({**hyper, "lr": rate}, number)
    assert core.rates == [0.5, 0.25, 0.5]


def test_the_core_hears_corrections_of_the_whole_table_before_every_backward() -> None:
    optimizer, core = Adam(0.5, betas=(0.5, 0.25), bias_correction="global"), _Core()
    settings = HostSettings(optimizer, core)
    for number in (1, 2, 3):
        settings.refresh(optimizer.hyper(), number)
    assert [each[3:] for each in core.settings] == [(0.5, 0.75), (0.75, 0.9375), (0.875, 0.984375)]


def test_a_device_has_the_settings_as_they_are_now() -> None:
    tables = [Table("a", 4, optimizer=SGD(0.5)), Table("none", 4, optimizer=None), Table("b", 4, optimizer=SGD(0.25))]
    hypers = [{} if table.optimizer is None else table.optimizer.hyper() for table in tables]
    settings = DeviceSettings(DeviceRows(tables, 0, torch.device("cpu")), hypers)
    rates = settings.device[:, LR.value]
    assert rates.tolist() == [0.5, 0.0, 0.25]
    hypers[2]["lr"] = 0.125
    settings.refresh(hypers)
    assert rates.tolist() == [0.5, 0.0, 0.125]
