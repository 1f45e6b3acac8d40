"""Each function of shoal.torch_private with the torch that is installed, and no private name of torch elsewhere."""

import ast
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shoal import torch_private

ROOT = Path(__file__).resolve().parent.parent
# Private by its name, and documented.
DOCUMENTED = {"torch._check"}


@pytest.fixture(autouse=True)
def _names_what_is_missing():
    try:
        yield
    except (AttributeError, ImportError) as error:
        pytest.fail(f"torch {torch.__version__} lacks what Shoal uses: {error}")


def test_torch_jit_trace_is_seen():
    seen = []

    def traced(given):
        seen.append(torch_private.is_jit_tracing())
        return given + 1

    traced(torch.ones(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(traced, torch.ones(1), check_trace=False)
    assert seen == [False, True]


def test_torch_export_is_seen_and_torch_compile_is_no_export():
    class Tells(torch.nn.Module):
        def forward(self, given):
            return given * (2 if torch_private.is_exporting() else 3)

    one = torch.ones(1)
    assert Tells()(one).item() == 3
    assert torch.compile(Tells(), backend="eager")(one).item() == 3
    assert torch.export.export(Tells(), (one,)).module()(one).item() == 2


def test_a_symbolic_trace_is_seen():
    seen = []

    def traced(given):
        seen.append(torch_private.is_symbolically_tracing())
        return given

    traced(1)
    torch.fx.symbolic_trace(traced)
    assert seen == [False, True]


def test_what_observes_operators_is_seen():
    assert not torch_private.is_in_dispatch_mode() and not torch_private.is_being_observed()
    with FlopCounterMode(display=False):
        assert torch_private.is_in_dispatch_mode() and torch_private.is_being_observed()
    with torch.profiler.profile():
        assert torch_private.is_being_observed() and not torch_private.is_in_dispatch_mode()
    seen = []

    def transformed(given):
        seen.append((torch_private.is_being_observed(), torch_private.is_wrapped_by_transform(given)))
        return given

    transformed(torch.ones(2))
    torch.func.vmap(transformed)(torch.ones(2))
    assert seen == [(False, False), (True, True)]


def test_a_version_grows_with_each_change():
    tensor = torch.zeros(2)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) > before
    with torch.inference_mode():
        assert torch_private.version_of(torch.zeros(2)) == -1


def test_pytrees_have_leaves_and_nodes():
    assert torch_private.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
    assert dict in torch_private.SUPPORTED_NODES
    assert str(torch_private.GetAttrKey("name")) == ".name"
    assert torch_private.KeyEntry and torch_private.GetAttrKey("name").get(SimpleNamespace(name=7)) == 7
    assert callable(torch_private.register_pytree_node)


def test_a_backward_has_code_that_is_found():
    frames = []
    tensor = torch.ones(1, requires_grad=True)

    def look(_grad):
        frame = sys._getframe()
        while frame is not None:
            frames.append(frame.f_code)
            frame = frame.f_back

    tensor.register_hook(look)
    tensor.sum().backward()
    assert torch_private.backward_code() in frames


def test_a_scaler_is_asked_for_its_scale_and_told_of_gradients():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert torch_private.loss_scale(scaler) is None
    scaler.scale(torch.ones(1))
    assert torch_private.loss_scale(scaler).item() == 8.0
    found = torch_private.tell_scaler(scaler, 1)
    assert found == {}
    found[torch.device("cpu")] = torch.ones(1)
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_job_has_a_store(tmp_path):
    with pytest.raises((RuntimeError, ValueError)):
        torch_private.default_store()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        assert torch_private.default_store().compare_set("key", "", "value") == b"value"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
def test_streams_and_devices_are_those_of_the_public_calls():
    assert torch_private.current_device() == torch.cuda.current_device()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert torch_private.current_stream_handle(stream.device.index) == stream.cuda_stream


def private_names(tree):
    """Line and name of what a module takes of torch by a private name."""

    def dotted(node):
        if isinstance(node, ast.Name):
            return node.id
        inside = dotted(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{inside}.{node.attr}" if inside else ""

    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
        for name in names:
            first, *rest = name.split(".")
            is_private = any(part.startswith("_") and not part.endswith("__") for part in rest)
            if first == "torch" and is_private and name not in DOCUMENTED:
                yield node.lineno, name


@pytest.mark.parametrize("folder", ["src/shoal", "benchmarks", "examples", "tests"])
def test_private_names_of_torch_are_in_one_file(folder):
    own = {ROOT / "src/shoal/torch_private.py", ROOT / "tests/support/torch_private.py"}
    files = set((ROOT / folder).rglob("*.py")) - own
    found = {
        (str(path.relative_to(ROOT)), *one) for path in files for one in private_names(ast.parse(path.read_text()))
    }
    assert not found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import torch\ntorch._C._cuda_getDevice()", {"torch._C", "torch._C._cuda_getDevice"}),
        ("from torch.utils._pytree import tree_leaves", {"torch.utils._pytree.tree_leaves"}),
        ("from torch.fx import _symbolic_trace", {"torch.fx._symbolic_trace"}),
        ("torch._check(True); torch.__version__; self.torch._own", set()),
    ],
)
def test_a_private_name_is_found(text, names):
    assert {name for _line, name in private_names(ast.parse(text))} == names
