"""Settings as frozen values that are checked when they are made.

A wrong value, an unknown keyword or a missing one is a ConfigError.
"""

from shoal.config.debug import debug, debugging
from shoal.config.init import Constant, Init, Normal, Uniform, Zeros
from shoal.config.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Clip,
    Ftrl,
    Optimizer,
    PartialRowwiseAdam,
    RowwiseAdagrad,
)
from shoal.config.rows import Column, RowFormat
from shoal.config.size import format_size, parse_size
from shoal.config.table import Feature, Table
from shoal.config.threads import get_num_threads, set_num_threads
from shoal.config.tiers import Dram, Hbm, MakeStorage, Ssd, Tier

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "Clip",
    "Column",
    "Constant",
    "Dram",
    "Feature",
    "Ftrl",
    "Hbm",
    "Init",
    "MakeStorage",
    "Normal",
    "Optimizer",
    "PartialRowwiseAdam",
    "RowFormat",
    "RowwiseAdagrad",
    "Ssd",
    "Table",
    "Tier",
    "Uniform",
    "Zeros",
    "debug",
    "debugging",
    "format_size",
    "get_num_threads",
    "parse_size",
    "set_num_threads",
]
