"""Embedding tables for PyTorch that grow with the ids they see."""

from shoal import errors
from shoal.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Assign,
    Clip,
    Constant,
    Dram,
    Feature,
    Ftrl,
    Hbm,
    Normal,
    PartialRowwiseAdam,
    RowwiseAdagrad,
    Ssd,
    Table,
    Uniform,
    Zeros,
    debug,
    get_num_threads,
    set_num_threads,
)
from shoal.modules import EmbeddingBagCollection, EmbeddingCollection, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shoal.prefetch import prefetch
from shoal.storage import Storage

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "Clip",
    "Constant",
    "Dram",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Feature",
    "Ftrl",
    "Hbm",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Normal",
    "PartialRowwiseAdam",
    "RowwiseAdagrad",
    "Ssd",
    "Storage",
    "Table",
    "Uniform",
    "Zeros",
    "debug",
    "errors",
    "get_num_threads",
    "prefetch",
    "set_num_threads",
]
