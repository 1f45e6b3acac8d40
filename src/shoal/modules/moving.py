"""Batches of the host on their way to the tables' device."""

from typing import Any

import torch


def move_in_place(features: Any, device: torch.device) -> None:
    """Move a KeyedJaggedTensor, ours or TorchRec's, to a device, behind what the current stream does: its holder need
    not know. It goes by page-locked memory, and nobody waits."""
    features.length_per_key()  # known here, it need not be asked of the device
    features.offsets()
    there = features.pin_memory().to(device, non_blocking=True)
    vars(features).update(vars(there))
