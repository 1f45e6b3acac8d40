"""torch.fx and torch.jit on models that hold collections."""

import copy

import pytest
import torch
from support.batches import kjt
from torch import nn

import shoal
from shoal.errors import ConfigError

BATCH = {"a": [[1, 2], [3]], "b": [[4], []]}


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4, features=["a", "b"])])
        self.top = nn.Linear(8, 1)

    def forward(self, batch):
        return self.top(self.bags(batch).values())


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = shoal.EmbeddingCollection([shoal.Table("t", 4, features=["a", "b"], pooling="none")])

    def forward(self, batch):
        return self.rows(batch)["a"].values() * 2


@pytest.mark.parametrize(("model", "target"), [(Pooled, "bags"), (Rows, "rows")])
def test_a_collection_is_one_call_of_the_graph(model, target):
    made = model()
    traced = torch.fx.symbolic_trace(made)
    assert target in [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert getattr(traced, target) is getattr(made, target)
    assert torch.equal(traced(kjt(BATCH)), made(kjt(BATCH)))
    before = getattr(made, target).table("t").lookup([1])
    traced(kjt(BATCH)).sum().backward()
    assert not torch.equal(getattr(made, target).table("t").lookup([1]), before)


class Regrouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4, features=["a", "b"])])

    def forward(self, one, other):
        both = shoal.KeyedJaggedTensor.concat([one, other])
        out = self.bags(both)
        (first,) = shoal.KeyedTensor.regroup([out], [["b", "a"]])
        return first, shoal.KeyedTensor.regroup_as_dict([out], [["a"]], ["x"])["x"]


def test_functions_of_batches_and_outputs_are_calls_of_the_graph():
    made = Regrouped()
    traced = torch.fx.symbolic_trace(made)
    parts = kjt({"a": BATCH["a"]}), kjt({"b": BATCH["b"]})
    assert all(torch.equal(one, other) for one, other in zip(traced(*parts), made(*parts), strict=True))


def test_a_copy_of_a_traced_model_has_tables_of_its_own():
    traced = torch.fx.symbolic_trace(Pooled())
    traced(kjt(BATCH)).sum().backward()
    other = copy.deepcopy(traced)
    assert torch.equal(other(kjt(BATCH)), traced(kjt(BATCH)))
    assert other.bags is not traced.bags


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_a_script_is_refused_and_says_what_to_do():
    for model in (Pooled(), Rows(), Pooled().bags):
        with pytest.raises(ConfigError, match=r"torch.jit.script cannot have tables.*torch.export in eval"):
            torch.jit.script(model)


class OfTensors(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, values, lengths):
        return self.model(shoal.KeyedJaggedTensor(["a", "b"], values, lengths=lengths))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("model", [Pooled, Rows])
def test_a_trace_of_torch_jit_is_refused_and_says_what_to_do(model, training):
    made = OfTensors(model()).train(training)
    given = (torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 1, 0]))
    with pytest.raises(ConfigError, match=r"torch.jit.trace cannot record a lookup.*torch.export in eval"):
        torch.jit.trace(made, given)
    made.train()(*given).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_a_lookup_is_refused_too():
    class Served(nn.Module):
        def __init__(self):
            super().__init__()
            self.bags = Pooled().bags

        def forward(self, values, lengths):
            return self.bags.lookup(shoal.KeyedJaggedTensor(["a", "b"], values, lengths=lengths)).values()

    with pytest.raises(ConfigError, match=r"torch\.jit\.trace"):
        torch.jit.trace(Served(), (torch.tensor([1, 2]), torch.tensor([1, 1])))


GIVEN = (torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 1, 0]))


@pytest.mark.parametrize("model", [Pooled, Rows])
def test_a_batch_that_a_model_makes_is_one_call_of_the_graph(model):
    made = OfTensors(model())
    traced = torch.fx.symbolic_trace(made)
    assert shoal.KeyedJaggedTensor in [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert torch.equal(traced(*GIVEN), made(*GIVEN))
    traced(*GIVEN).sum().backward()


def test_other_tensors_that_a_model_makes_are_calls_too():
    class Makes(nn.Module):
        def forward(self, values, lengths, weights):
            jagged = shoal.JaggedTensor(values, weights=weights, lengths=lengths)
            keyed = shoal.KeyedTensor(keys=["x"], length_per_key=[2], values=weights.view(-1, 2))
            batch = shoal.KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths)
            return jagged.offsets(), keyed["x"], batch.length_per_key()

    given = (*GIVEN, torch.rand(4))
    traced = torch.fx.symbolic_trace(Makes())
    for got, wanted in zip(traced(*given), Makes()(*given), strict=True):
        assert torch.equal(got, wanted) if isinstance(wanted, torch.Tensor) else got == wanted


def test_a_batch_of_tensors_is_made_at_once_also_while_a_tracer_runs():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys = None

        def forward(self, x):
            self.keys = kjt(BATCH).keys()
            return x

    model = Constant()
    torch.fx.symbolic_trace(model)
    assert model.keys == ["a", "b"]


def test_lookup_is_a_call_of_the_graph_too():
    class Served(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Pooled(), Rows()])

        def forward(self, batch):
            return self.parts[0].bags.lookup(batch).values(), self.parts[1].rows.lookup(batch)["a"].values()

    model = Served()
    traced = torch.fx.symbolic_trace(model)
    for part in model.parts:
        part(kjt(BATCH)).sum().backward()
    for got, wanted in zip(traced(kjt(BATCH)), model(kjt(BATCH)), strict=True):
        assert torch.equal(got, wanted)
        assert not got.requires_grad
    assert "call_method" in [node.op for node in traced.graph.nodes if node.target == "lookup"]


def test_a_collection_alone_is_not_traced_and_says_what_to_do():
    bags = Pooled().bags
    for given in (bags, Rows().rows, lambda batch: bags.lookup(batch)):
        with pytest.raises(ConfigError, match="Trace a module that has it as an attribute"):
            torch.fx.symbolic_trace(given)
