"""The three as torch takes them: copies, pytrees, compiled and exported programs."""

import copy
import io
import pickle

import pytest
import torch
from support.jagged_lists import FOUR, VALUES, keyed, lists
from support.torch_private import FakeTensorMode, dynamo_config, pytree
from torch import Tensor
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

from shoal.modules.jagged import KeyedJaggedTensor, KeyedTensor


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_are_equal_and_apart(kjt, again):
    other = again(kjt.sync())
    other.values()[0] = 9
    assert kjt.values()[0] == 1
    assert other.keys() == kjt.keys()
    assert other.length_per_key_or_none() == [3, 1]
    assert torch.equal(other.lengths(), kjt.lengths())


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_pytree_has_the_same_leaves_whatever_was_asked_before(by):
    one = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2, by=by)
    leaves, spec = pytree.tree_flatten(one)
    one.lengths(), one.offsets(), one.sync()
    again, same = pytree.tree_flatten(one)
    assert spec == same
    assert [leaf is None for leaf in leaves] == [leaf is None for leaf in again]


def test_pytree_comes_back_and_maps(kjt):
    jt, kt = kjt["a"], KeyedTensor(["x", "y"], [1, 2], torch.ones(2, 3))
    none = KeyedJaggedTensor([], VALUES[:0], lengths=FOUR[:0], stride=7)
    leaves, spec = pytree.tree_flatten({"kjt": kjt, "jt": jt, "kt": kt, "none": none})
    back = pytree.tree_unflatten(leaves, spec)
    assert repr(back) == repr({"kjt": kjt, "jt": jt, "kt": kt, "none": none})
    doubled = pytree.tree_map_only(Tensor, lambda leaf: leaf * 2, kt)
    assert isinstance(doubled, KeyedTensor)
    assert doubled["y"].tolist() == [[2.0, 2.0]] * 2
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_pytree_leaves_have_paths(kjt):
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": kjt})[0]]
    assert paths == ["['x']._values", "['x']._weights", "['x']._lengths", "['x']._offsets"]
    assert [
        pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(KeyedTensor(["a"], [1], torch.ones(1, 1)))[0]
    ] == ["._values"]


@pytest.fixture
def compiled():
    """torch.compile without code generation: what is tested is the tracing. Counts the graphs."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_(function, dynamic=None):
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend), graphs

    yield compile_
    torch.compiler.reset()


def test_building_and_reading_inside_a_compiled_graph(compiled):
    def f(values, lengths, weights):
        one = KeyedJaggedTensor(["a", "b"], values, weights, lengths)
        return one.offsets(), one.lengths() * one.stride(), one.weights() * one.values()

    g, graphs = compiled(f, dynamic=True)
    for lengths in ([2, 1, 1, 1], [5, 0], [1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 5, 0]):
        arguments = (torch.tensor([1, 2, 3, 4, 5]), torch.tensor(lengths, dtype=torch.int32), torch.ones(5))
        for expected, got in zip(f(*arguments), g(*arguments), strict=True):
            assert torch.equal(expected, got)
            assert expected.dtype == got.dtype
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_with_code_generation():
    def f(values, lengths):
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths).offsets()

    torch.compiler.reset()
    g = torch.compile(f, fullgraph=True)
    arguments = (torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 0, 1]))
    assert torch.equal(f(*arguments), g(*arguments))
    torch.compiler.reset()


def test_as_argument_of_a_compiled_function_it_is_not_changed_and_not_recompiled(compiled):
    g, graphs = compiled(lambda one: one.offsets() + one.stride() + len(one))
    one = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2)
    for _ in range(3):
        assert g(one).tolist() == [4, 6, 7, 7, 8]
    assert one.offsets_or_none() is None
    assert len(graphs) == 1


def test_as_result_of_a_compiled_function(compiled):
    def f(values, lengths):
        one = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
        columns = KeyedTensor(["x", "y"], [1, 2], torch.ones(one.stride(), 3) * 2)
        return one, columns, KeyedTensor.regroup_as_dict([columns], [["y", "x"]], ["z"]), columns.to_dict()

    one, columns, grouped, split = compiled(f)[0](torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 0, 1]))
    assert lists(one["a"]) == [[1, 2], [3]]
    assert columns["y"].tolist() == [[2.0, 2.0]] * 2
    assert grouped["z"].shape == (2, 3)
    assert list(split) == ["x", "y"]


def test_sizes_known_only_when_the_graph_runs_can_be_traced(compiled):
    def f(values, weights):
        kept = values > 1
        one = KeyedJaggedTensor(["a"], values[kept], weights[kept], lengths=kept.sum().view(1))
        return one.offsets(), one.values() * one.weights()

    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        offsets, products = compiled(f)[0](torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 4.0]))
    assert offsets.tolist() == [0, 2]
    assert products.tolist() == [4.0, 12.0]


def test_shapes_are_checked_inside_a_compiled_graph_too(compiled):
    g, _ = compiled(lambda values, lengths: KeyedJaggedTensor(["a", "b"], values, lengths=lengths).offsets())
    with pytest.raises(Exception, match="a multiple of the 2 keys; got 3"):
        g(VALUES, torch.tensor([1, 1, 1]))


def test_lengths_and_offsets_are_not_compared_where_their_contents_are_not_there(compiled):
    def f(values, lengths, offsets):
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, offsets=offsets).offsets() * 2

    arguments = (VALUES, FOUR, torch.tensor([0, 1, 2, 2, 3]))
    wanted = f(*arguments)
    assert torch.equal(compiled(f)[0](*arguments), wanted)
    assert torch.equal(torch.vmap(f)(*(one[None] for one in arguments))[0], wanted)
    for mode in ("real", "fake", "symbolic"):
        assert torch.equal(make_fx(f, tracing_mode=mode)(*arguments)(*arguments), wanted)
    assert f(*(one.to("meta") for one in arguments)).shape == (5,)
    with FakeTensorMode() as fake:
        traced = [fake.from_tensor(one) for one in arguments]
    assert f(*traced).shape == (5,)


class Offsets(torch.nn.Module):
    def forward(self, one: KeyedJaggedTensor) -> KeyedTensor:
        bags = one.lengths().view(len(one.keys()), one.stride()).t().float()
        return KeyedTensor(one.keys(), [1] * len(one.keys()), bags)


@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_and_gives_them_with_a_dynamic_batch_and_survives_a_file(strict):
    example = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2)
    free = [{0: Dim.AUTO}, None, {0: Dim.AUTO}, None]  # values, weights, lengths, offsets
    program = torch.export.export(Offsets(), (example,), dynamic_shapes=(free,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file)):
        out = exported.module()(keyed({"a": [[1], [], [2, 3]], "b": [[4], [5], []]}, 3))
        assert isinstance(out, KeyedTensor)
        assert out.keys() == ["a", "b"]
        assert out["a"].tolist() == [[1.0], [0.0], [2.0]]
        assert out["b"].tolist() == [[1.0], [1.0], [0.0]]
