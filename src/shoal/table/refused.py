"""Memory that was refused."""

import torch


def is_refused_memory(error: BaseException | None) -> bool:
    """Whether memory was refused, by whomever."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch has no class for it on CPU.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
