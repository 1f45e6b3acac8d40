"""Tables in the formats of other systems: one file each, which `import shoal` does not import."""

import importlib as _importlib
import typing as _typing

_LAZY = ("dcp", "parquet", "safetensors", "torchrec")


def __getattr__(name: str) -> _typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _importlib.import_module(f"{__name__}.{name}")
