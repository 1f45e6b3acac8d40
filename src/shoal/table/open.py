"""Which kind of group serves a collection."""

import os
from collections.abc import Sequence

import torch

from shoal.config import Hbm, Table
from shoal.errors import ConfigError, DeviceError
from shoal.table.group import Group
from shoal.table.host.group import HostGroup
from shoal.table.meta_group import MetaGroup


def open_group(name: str, configs: Sequence[Table], seed: int, device: torch.device) -> Group:
    """A new group for these tables: in host memory for cpu, in device memory for cuda, and nowhere for meta."""
    if device.type == "meta":
        return MetaGroup(name, configs, seed)
    on_device = device.type == "cuda" or (_is_interpreted() and any(config.tier(Hbm) for config in configs))
    if not on_device and device.type != "cpu":
        raise DeviceError(f"[{name}] tables live on cpu or cuda; got {device}. Use one of these, or meta for none yet.")
    for config in configs:
        if not on_device and config.tier(Hbm) is not None:
            raise ConfigError(
                f"[{name}] table {config.name!r} must have tiers=[Dram(...)] on {device}, with or without a tier below "
                f"it; got {list(config.tiers or ())!r}."
            )
    if not on_device:
        return HostGroup(name, configs, seed)
    if device.type == "cuda":
        device = _present(name, device)
    try:
        from shoal.table.device.group import DeviceGroup
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise DeviceError(
            f"[{name}] tables on {device} need Triton, which is not installed. Run: pip install triton"
        ) from error
    return DeviceGroup(name, configs, seed, device)


def _is_interpreted() -> bool:
    """Whether Triton's kernels run on the CPU, for tests: then tables with tiers=[Hbm()] can be tried there."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _present(name: str, device: torch.device) -> torch.device:
    if not torch.cuda.is_available():
        raise DeviceError(
            f"[{name}] wanted a GPU for {device}; torch {torch.__version__} sees none. Install a CUDA build of torch "
            f"and NVIDIA's driver, or use device='cpu'."
        )
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise DeviceError(f"[{name}] wanted {device}; there are {torch.cuda.device_count()} GPUs, from cuda:0.")
    return torch.device("cuda", number)
