"""torch.export of a model in eval: the program finds its tables by name when it runs, and holds no rows."""

import gc
import subprocess
import sys
import textwrap

import pytest
import torch
from support.batches import random_kjt, train_step
from torch import nn
from torch.export import Dim

import shoal
from shoal.errors import InputError, NotFoundError

pytestmark = [
    # Warnings that torch's own exporter gives.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.timeout(600),
]

STRICT = pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
TABLES = [shoal.Table("a", 4), shoal.Table("b", 3, pooling="mean")]


class Pooled(nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.bags = shoal.EmbeddingBagCollection(TABLES, name=name)
        self.top = nn.Linear(7, 2)

    def forward(self, batch):
        return self.top(self.bags(batch).values())


class FromTensors(Pooled):
    def forward(self, values, lengths):
        return super().forward(shoal.KeyedJaggedTensor(["a", "b"], values, lengths=lengths))


class Sequences(nn.Module):
    def __init__(self, name=None):
        super().__init__()
        self.bags = shoal.EmbeddingCollection(
            [shoal.Table("a", 4, pooling="none"), shoal.Table("b", 3, pooling="none")], name=name
        )

    def forward(self, batch):
        rows = self.bags(batch)
        return rows["a"].to_padded_dense(5), rows["b"].values()


def arguments(model, seed, bags):
    batch = random_kjt(["a", "b"], bags=bags, keys=40, seed=seed)
    return (batch.values(), batch.lengths()) if isinstance(model, FromTensors) else (batch,)


def trained(kind, name=None):
    model = kind(name)
    train_step(model.bags, random_kjt(["a", "b"], bags=6, seed=1))
    return model.eval()


def export(model, strict):
    free = {0: Dim.AUTO}
    shapes = (free, free) if isinstance(model, FromTensors) else ([free, None, free, None],)
    return torch.export.export(model, arguments(model, 0, 4), dynamic_shapes=shapes, strict=strict)


def flat(result):
    return torch.cat([part.flatten() for part in result]) if isinstance(result, tuple) else result.flatten()


@STRICT
@pytest.mark.parametrize("kind", [Pooled, FromTensors, Sequences])
def test_a_program_gives_what_the_model_gives_and_survives_a_file(kind, strict, tmp_path):
    model = trained(kind)
    program = export(model, strict)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    before = model.state_dict()
    for run in (program.module(), loaded.module()):
        for seed, bags in ((0, 4), (2, 3), (3, 9)):
            given = arguments(model, seed, bags)
            assert torch.equal(flat(run(*given)), flat(model(*given)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_program_sees_rows_as_they_are_when_it_runs():
    model = trained(Pooled)
    run = export(model, strict=False).module()
    given = arguments(model, 0, 4)
    first = run(*given)
    model.train()
    train_step(model.bags, *given)
    model.eval()
    assert not torch.equal(run(*given), first)
    assert torch.equal(run(*given), model(*given))


def test_a_program_holds_no_rows(tmp_path):
    sizes = []
    for keys in (10, 100_000):
        model = Pooled()
        batch = shoal.KeyedJaggedTensor(["a", "b"], torch.arange(2 * keys), lengths=torch.tensor([keys, keys]))
        train_step(model.bags, batch)
        torch.export.save(export(model.eval(), strict=False), tmp_path / "program.pt2")
        sizes.append((tmp_path / "program.pt2").stat().st_size)
    assert abs(sizes[1] - sizes[0]) < 1000


@pytest.mark.parametrize("kind", [Pooled, Sequences])
def test_a_program_can_be_lowered(kind):
    model = trained(kind)
    lowered = export(model, strict=False).run_decompositions().module()
    given = arguments(model, 5, 6)
    torch.testing.assert_close(flat(lowered(*given)), flat(model(*given)))


@STRICT
def test_a_model_that_trains_is_refused(strict):
    with pytest.raises(Exception, match=r"Call eval\(\) first"):
        export(trained(Pooled).train(), strict)


def test_bad_input_is_refused_by_a_program_too():
    model = trained(FromTensors)
    run = export(model, strict=False).module()
    with pytest.raises(InputError, match="lengths must sum"):
        run(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([1, 1, 1, 1]))


def test_without_its_tables_a_program_says_what_to_do(tmp_path):
    model = trained(Pooled, name="gone")
    torch.export.save(export(model, strict=False), tmp_path / "program.pt2")
    given = arguments(model, 0, 4)
    del model
    gc.collect()
    run = torch.export.load(tmp_path / "program.pt2").module()
    with pytest.raises(NotFoundError, match=r"the collection 'gone'.*make the collection, with the same name="):
        run(*given)


OTHER_PROCESS = """
    import sys
    import torch
    import shoal

    folder = sys.argv[1]
    saved = torch.load(f"{folder}/saved.pt", weights_only=True)
    run = torch.export.load(f"{folder}/program.pt2").module()
    given = shoal.KeyedJaggedTensor(["a", "b"], saved["values"], lengths=saved["lengths"])
    try:
        run(given)
        raise SystemExit("it ran without its tables")
    except shoal.errors.NotFoundError as error:
        assert "'served'" in str(error), error
    tables = [shoal.Table("a", 4), shoal.Table("b", 3, pooling="mean")]
    bags = shoal.EmbeddingBagCollection(tables, name="served")
    bags.load_state_dict(saved["bags"])
    assert torch.equal(run(given), saved["out"])
"""


def test_a_program_runs_in_a_process_that_made_the_collection_with_its_name(tmp_path):
    model = trained(Pooled, name="served")
    torch.export.save(export(model, strict=False), tmp_path / "program.pt2")
    (batch,) = arguments(model, 7, 5)
    saved = {
        "bags": model.bags.state_dict(),
        "values": batch.values(),
        "lengths": batch.lengths(),
        "out": model(batch).detach(),
    }
    torch.save(saved, tmp_path / "saved.pt")
    subprocess.run([sys.executable, "-c", textwrap.dedent(OTHER_PROCESS), str(tmp_path)], check=True, timeout=500)
