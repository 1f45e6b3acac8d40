"""torch.compile of tables in device memory gives the rows that eager gives."""

import pytest
import torch
from support.batches import kjt, random_kjt
from support.device_tables import DEVICE, on_device

import shoal
from shoal import Table

# Warnings that torch's own compiler gives.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_same(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def make():
    return on_device(
        Table("x", 4, features=["a", "c"], optimizer=shoal.Adam(lr=0.1), dtype="bfloat16"),
        Table("y", 3, features=["b"], pooling="mean"),
    )


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_training_and_evaluation_are_the_same_bit_for_bit(weighted):
    plain, bags = make(), make()
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    for step in range(3):
        batch = random_kjt(["a", "b", "c"], bags=3 + step, seed=step, weighted=weighted).to(DEVICE)
        outs = [function(batch).values() for function in (plain, compiled)]
        assert torch.equal(*outs)
        for out in outs:
            (out * 0.5).sum().backward()
    assert_same(plain, bags)
    plain.eval(), bags.eval()
    batch = random_kjt(["a", "b", "c"], keys=60, seed=9, weighted=weighted).to(DEVICE)
    assert torch.equal(plain(batch).values(), compiled(batch).values())
    assert_same(plain, bags)


def test_sequences_are_compiled_too():
    tables = [Table("a", 4, pooling="none"), Table("b", 3, pooling="none")]
    plain, module = (on_device(*tables, kind=shoal.EmbeddingCollection) for _ in range(2))
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for step in range(2):
        batch = random_kjt(["b", "a"], bags=3 + step, seed=step).to(DEVICE)
        for function in (plain, compiled):
            out = function(batch)
            (out["a"].values().sum() + 2 * out["b"].values().sum()).backward()
    assert_same(plain, module)


def test_weights_get_their_gradient():
    plain, bags = (on_device(Table("a", 4, init=shoal.Normal(0, 1))) for _ in range(2))
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (plain, compiled):
        batch = random_kjt(["a"], weighted=True).to(DEVICE)
        weights = batch.weights().requires_grad_()
        function(batch).values().sum().backward()
        gradients.append(weights.grad)
    assert torch.equal(*gradients)


def test_errors_come_through():
    bags = on_device(Table("a", 4))
    compiled = torch.compile(bags, backend="aot_eager", fullgraph=True)
    out = compiled(kjt({"a": [[1, 2], [3]]}).to(DEVICE)).values()
    out.backward(torch.full_like(out, torch.nan))
    with pytest.raises(shoal.errors.NonFiniteError, match="'a'"):
        bags.check()
