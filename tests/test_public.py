"""What `import shoal` gives is what `__all__` says, and it brings in nothing heavy."""

import json
import subprocess
import sys
from types import ModuleType

import pytest

import shoal

PUBLIC = [
    "Adagrad",
    "Adam",
    "AdamW",
    "Assign",
    "ChangeLog",
    "Clip",
    "Constant",
    "Dram",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Feature",
    "Ftrl",
    "Hbm",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Normal",
    "PartialRowwiseAdam",
    "RowwiseAdagrad",
    "SGD",
    "Ssd",
    "Storage",
    "Table",
    "Uniform",
    "Zeros",
    "debug",
    "errors",
    "get_num_threads",
    "hash_ids",
    "load",
    "open_log",
    "prefetch",
    "recover",
    "save",
    "set_num_threads",
]


def test_all_is_what_we_publish() -> None:
    assert sorted(shoal.__all__) == PUBLIC


def test_all_has_no_name_twice() -> None:
    assert len(shoal.__all__) == len(set(shoal.__all__))


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(shoal, name).__name__.removeprefix("shoal.") == name


def test_nothing_else_is_reachable() -> None:
    """Python puts every imported submodule into its package; apart from those, the front shows what `__all__` names."""
    submodules = {
        name
        for name, value in vars(shoal).items()
        if isinstance(value, ModuleType) and value.__name__ == f"shoal.{name}"
    }
    shown = {name for name in vars(shoal) if not name.startswith("_")}
    assert shown - submodules - set(shoal.__all__) == set()


@pytest.mark.parametrize(
    "name", ["dcp.load", "parquet.export_parquet", "safetensors.import_safetensors", "torchrec.table_of"]
)
def test_interop_is_there_by_its_full_name_and_imported_when_it_is_asked_for(name: str) -> None:
    before = modules_after("import shoal")
    after = modules_after(f"import shoal\nshoal.interop.{name}")
    assert f"shoal.interop.{name.partition('.')[0]}" in after - before


def test_what_interop_does_not_have_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match=r"module 'shoal\.interop' has no attribute 'nothing'"):
        shoal.interop.nothing  # noqa: B018


def modules_after(statement: str) -> set[str]:
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_import_brings_in_nothing_heavy() -> None:
    brought = modules_after("import torch, shoal") - modules_after("import torch")
    foreign = {name.split(".")[0] for name in brought} - set(sys.stdlib_module_names) - {"shoal", "torch"}
    # nanobind's module and torch are all we stand on; even numpy comes only by way of torch.
    assert foreign == set()
    assert not {name for name in brought if name.startswith(("torch._dynamo", "torch._inductor"))}
