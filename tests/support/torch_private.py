"""What tests use of torch that it does not promise to keep."""

import torch
from torch._dynamo import config as dynamo_config
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

__all__ = ["FakeTensorMode", "dynamo_config", "keep_gpu_busy", "pytree"]


def keep_gpu_busy(cycles):
    """Has the current stream wait for so many cycles of the GPU's clock."""
    torch.cuda._sleep(cycles)
