"""Host memory that a device reaches: pinned, and mapped into its addresses."""

import mmap
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from shoal.config import format_size
from shoal.errors import OutOfMemoryError

_PORTABLE_AND_MAPPED = 3


class _Pages(mmap.mmap):
    """Pages that are unpinned before they go, once no kernel uses them."""

    unpin: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:
            self.unpin()


def pinned_bytes(n: int, device: torch.device) -> Tensor:
    """So many bytes of host memory, not a page more, for kernels on that device. Slow: the driver looks at every page.

    torch's own pinned memory would not do: it rounds up to powers of two, and keeps what is freed.
    """
    if device.type != "cuda":
        return torch.empty(n, dtype=torch.uint8)
    try:
        pages = _Pages(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise OutOfMemoryError(f"the operating system refused {format_size(n)} of host memory: {error}.") from error
    with suppress(OSError):  # a kernel without large pages: rows are read at random, and each access is translated
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    result = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), n, _PORTABLE_AND_MAPPED))
    if result:
        raise OutOfMemoryError(
            f"the driver refused to pin {format_size(n)} of host memory (CUDA error {result}). Free memory, or lower "
            f"Dram(...) in Table(tiers=)."
        )
    pages.unpin = partial(_unpin, memory.data_ptr(), device)
    return memory


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)
