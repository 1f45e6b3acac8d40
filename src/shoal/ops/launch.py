"""Launches of Triton kernels that take little of the host's time.

A step has a dozen launches, and in each Triton looks at every argument. Here a kernel is compiled once for each kind of
arguments that its caller tells apart, and then called directly.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor

from shoal.errors import DeviceError

INTERPRETED = bool(triton.knobs.runtime.interpret)


def require(device: torch.device) -> None:
    """Raise DeviceError where kernels cannot run on this device."""
    if device.type != "cuda" and not INTERPRETED:
        raise DeviceError(
            f"[device] Triton kernels run on a GPU; got {device}. Set TRITON_INTERPRET=1 before the import to try them "
            f"on cpu, slowly."
        )


class Launcher:
    """A kernel with its constants and options."""

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: Any) -> None:
        self._kernel = kernel
        self._constants = constants
        self._options = options
        self._compiled: dict[Hashable, Any] = {}
        names = [] if INTERPRETED else [name for name in kernel.arg_names if name in constants]
        self._values = tuple(constants[name] for name in names)

    def __call__(self, kind: Hashable, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch. `kind` tells apart arguments of other types or of an alignment below 16 bytes.

        REQUIRES: constants are the kernel's last parameters, and its numbers are not specialised on.
        """
        ready = self._compiled.get(kind)
        if ready is None:
            made = self._kernel[grid](*arguments, **self._constants, **self._options)
            if not INTERPRETED:
                self._compiled[kind] = made
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        ready.run(
            x, y, z, stream, ready.function, ready.packed_metadata, None, None, None,
            *[given.data_ptr() if isinstance(given, Tensor) else given for given in arguments], *self._values,
        )  # fmt: skip


class Launches:
    """The launchers of one owner, made when they are first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Launcher] = {}

    def of(self, key: Hashable, make: Callable[[], Launcher]) -> Launcher:
        """The launcher of that key."""
        launcher = self._made.get(key)
        if launcher is None:
            launcher = self._made[key] = make()
        return launcher


class Scratch:
    """Memory for what lives no longer than a call, kept from one to the next. For one caller at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, n: int, dtype: torch.dtype) -> Tensor:
        """A tensor of at least n elements, with whatever is in it."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < n:
            kept = self._kept[name] = torch.empty(n + n // 4, dtype=dtype, device=self._device)
        return kept


# Triton has both as functions of its language, which cost a few microseconds a call.
def blocks(n: int, size: int) -> int:
    """How many blocks of that size cover n."""
    return -(-n // size)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def kind_of(*tensors: Tensor | None) -> Hashable:
    """What tells apart tensors that come from elsewhere."""
    return tuple(None if one is None else (one.dtype, one.data_ptr() % 16 == 0) for one in tensors)
