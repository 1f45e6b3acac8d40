"""How many threads the CPU kernels use."""

import torch

from shoal.config.checked import integer

_threads: int | None = None


def set_num_threads(threads: int | None) -> None:
    """Use that many threads for lookups and updates; None follows `torch.get_num_threads()`, which is the default."""
    global _threads
    _threads = None if threads is None else integer("set_num_threads", "threads", threads, low=1, high=1024)


def get_num_threads() -> int:
    """The number of threads that lookups and updates use."""
    return torch.get_num_threads() if _threads is None else _threads
