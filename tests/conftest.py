import os

import pytest
import torch
from hypothesis import settings

from shoal import _native

# Without a GPU, tables in device memory are tried on the CPU: Triton runs its kernels there, slowly.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A run that means another build than the installed one must not pass by it.
if not _native.__file__.startswith(wanted := os.environ.get("SHOAL_MODULE_IN", "")):
    raise pytest.UsageError(f"the native module must be of {wanted}, not {_native.__file__}")

# The same examples on every machine: a run that fails can be repeated. No deadline: two test processes share the cores.
settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("thorough", settings.get_profile("default"), derandomize=False, max_examples=1000)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test alone and the same test among others draw the same numbers."""
    torch.manual_seed(0)


@pytest.fixture(params=_native.isas())
def isa(request):
    """Once with each instruction set of this build and machine."""
    before = _native.isa()
    assert _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
