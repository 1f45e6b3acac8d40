"""What is known of a tensor now: a compiler knows sizes and contents later."""

import torch
from torch import Tensor

from shoal import torch_private


def certainly(condition: bool) -> bool:
    """Whether it holds, as far as is known now.

    The compiler may know a size only when the graph runs. Then no shape is refused here, and the lookup decides.
    """
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(condition)
    return condition


def can_be_read(given: Tensor) -> bool:
    """Whether looking at the contents waits for no device, and is possible: a traced or vmapped tensor has none."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch_private.is_in_dispatch_mode()
        and type(given) is Tensor
        and given.device.type == "cpu"
        and not torch_private.is_wrapped_by_transform(given)
    )
