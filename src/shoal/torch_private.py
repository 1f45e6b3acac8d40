"""What Shoal uses of torch that torch does not promise to keep: all of it is here, one function for each need.

Each docstring ends with what to do once a release of torch has it no more. `tests/test_torch_private.py` runs every one
with the torch that is installed, names the one that is missing, and fails where another file uses a private name.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.fx import _symbolic_trace
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Nodes of pytrees, which torch.export and torch.func take as arguments: torch documents them under these names.
from torch.utils._pytree import SUPPORTED_NODES as SUPPORTED_NODES
from torch.utils._pytree import GetAttrKey as GetAttrKey
from torch.utils._pytree import KeyEntry as KeyEntry
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_leaves as tree_leaves

# ---- who runs the program


def is_jit_tracing() -> bool:
    """Returns whether torch.jit.trace records. Without it: torch.jit.is_tracing(), which takes twice the time."""
    return torch._C._get_tracing_state() is not None


def is_exporting() -> bool:
    """Returns whether torch.export traces.

    torch.compiler.is_exporting() of torch 2.11 is true in torch.compile too (pytorch #176347). Without it: that
    function, once 2.11 is not supported.
    """
    return torch.compiler._is_exporting_flag


def is_symbolically_tracing() -> bool:
    """Returns whether a torch.fx tracer runs. Without it: True, and every call looks for proxies in its arguments."""
    return _symbolic_trace._is_fx_tracing_flag


def is_in_dispatch_mode() -> bool:
    """Returns whether a mode sees each operator, whose tensors may have no contents. Without it: True, and the contents
    of offsets are not checked before the lookup."""
    return is_in_torch_dispatch_mode()


def is_being_observed() -> bool:
    """Returns whether a mode, a function transform or a profiler sees each operator. Without it: True, and a lookup
    takes 50 microseconds longer, in the dispatcher."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


# ---- tensors


def is_wrapped_by_transform(tensor: Tensor) -> bool:
    """Returns whether a tensor stands for a batch of them in torch.func.vmap, say, and has no contents of its own.
    Without it: True, and the contents of offsets are not checked before the lookup."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def version_of(tensor: Tensor) -> int:
    """Returns a number that grows with each change in place; -1 for a tensor of inference mode, which counts none.
    Without it: no batch may be staged, as one that changed afterwards would not be noticed."""
    return -1 if tensor.is_inference() else tensor._version


# ---- CUDA: calls of the public functions take a microsecond or two each, at every launch


def current_stream_handle(device: int) -> int:
    """Returns the current stream of a device, as a cudaStream_t. Without it: current_stream().cuda_stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """Returns the number of the current device. Without it: torch.cuda.current_device()."""
    return torch._C._cuda_getDevice()


# ---- backwards and their scale


def backward_code() -> Any:
    """Returns the code that runs a backward, by which its frame is found; None where this torch has it no more, and the
    warning of a scaler that was not told of a collection is not given."""
    return getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)


def loss_scale(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Returns a GradScaler's scale, on its device; None before its first loss. Without it: its get_scale(), which waits
    for the device."""
    return scaler._scale


def tell_scaler(scaler: torch.amp.GradScaler, optimizer: int) -> dict[torch.device, Tensor]:
    """Returns where a GradScaler is told, by device, whether an optimizer's gradients were not finite, and says that
    they are unscaled. Without it: an optimizer of torch with a gradient that is not finite, for its unscale_()."""
    record = scaler._per_optimizer_states[optimizer]
    record["stage"] = OptState.UNSCALED
    return cast("dict[torch.device, Tensor]", record["found_inf_per_device"])


# ---- ranks


def default_store() -> Any:
    """Returns the store of the job's process group; raises where it has none. Without it: a store that the user gives,
    as ranks of different jobs could not be told apart."""
    return torch.distributed.distributed_c10d._get_default_store()
