"""Types of numbers in rows, tensors and files, with all their names: no other file maps one name to another."""

from typing import Literal, NamedTuple

import torch

# What weights may be.
Dtype = Literal["float32", "float16", "bfloat16"]
WEIGHTS: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")


class NumberType(NamedTuple):
    """A type of numbers. `name` is ours, torch's, Triton's and the native core's."""

    name: str
    safetensors: str  # in the headers of safetensors files
    arrow: str | None = None  # the alias of the Arrow type that holds its values; for bfloat16, their bits
    torchrec: str | None = None  # TorchRec's DataType

    @property
    def torch(self) -> torch.dtype:
        """torch's type."""
        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


NUMBER_TYPES = (
    NumberType("bool", "BOOL"),
    NumberType("uint8", "U8"),
    NumberType("int8", "I8"),
    NumberType("uint16", "U16"),
    NumberType("int16", "I16"),
    NumberType("uint32", "U32"),
    NumberType("int32", "I32"),
    NumberType("uint64", "U64"),
    NumberType("int64", "I64", "int64"),
    NumberType("float8_e4m3fn", "F8_E4M3"),
    NumberType("float8_e4m3fnuz", "F8_E4M3FNUZ"),
    NumberType("float8_e5m2", "F8_E5M2"),
    NumberType("float8_e5m2fnuz", "F8_E5M2FNUZ"),
    NumberType("float8_e8m0fnu", "F8_E8M0"),
    NumberType("float16", "F16", "float16", "FP16"),
    NumberType("bfloat16", "BF16", "uint16", "BF16"),
    NumberType("float32", "F32", "float32", "FP32"),
    NumberType("float64", "F64", "float64"),
    NumberType("complex64", "C64"),
)
_BY_NAME = {one.name: one for one in NUMBER_TYPES}
_NAMES = {one.torch: one.name for one in NUMBER_TYPES}

TORCH_WEIGHTS = tuple(_BY_NAME[name].torch for name in WEIGHTS)


def number_type(name: str) -> NumberType:
    """The type with that name."""
    return _BY_NAME[name]


def torch_dtype(name: str) -> torch.dtype:
    """torch's type with that name."""
    return _BY_NAME[name].torch


def name_of(dtype: torch.dtype) -> str:
    """The name of one of torch's types."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")
