"""Embedding tables for PyTorch that grow with the ids they see."""

import importlib as _importlib
import typing as _typing

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
from shoal.ops.hash_ids import hash_ids
from shoal.prefetch import prefetch
from shoal.storage import Storage

if _typing.TYPE_CHECKING:
    from shoal.checkpoint import load, recover, save
    from shoal.log import ChangeLog, open_log

__version__ = "0.1.0"

# What stands on Arrow is imported when it is asked for: who trains in memory alone does not wait for it.
_LAZY = {
    "ChangeLog": "log",
    "load": "checkpoint",
    "open_log": "log",
    "recover": "checkpoint",
    "save": "checkpoint",
}

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "ChangeLog",
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
    "hash_ids",
    "load",
    "open_log",
    "prefetch",
    "recover",
    "save",
    "set_num_threads",
]


def __getattr__(name: str) -> _typing.Any:
    if name == "interop":  # errors and warnings name it in full
        return _importlib.import_module("shoal.interop")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_importlib.import_module(f"shoal.{_LAZY[name]}"), name)
    return value
