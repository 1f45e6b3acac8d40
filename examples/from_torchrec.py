"""A TorchRec training script, ported: its configs, batches and DLRM stay; the collection and its optimizer are Shoal's.

    python -m examples.from_torchrec            # where TorchRec is installed: see scripts/torchrec.txt

docs/from-torchrec.md goes through it line by line. Lines that differ from TorchRec's own script end in "# shoal".
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.interop.torchrec import optimizer_of

FEATURES = ("user", "item", "category")
DENSE = 13
DIM = 16


@dataclass(frozen=True)
class Report:
    """What a run came to."""

    loss_before: float
    loss_after: float
    rows: dict[str, int]
    same_after_loading: bool


def batches(count: int, size: int, ids: int, seed: int) -> Iterator[Any]:
    """Random samples, whose label depends only on their ids."""
    from torchrec import KeyedJaggedTensor
    from torchrec.datasets.utils import Batch

    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        lengths = torch.randint(1, 4, (len(FEATURES) * size,), generator=generator)
        values = torch.randint(0, ids, (int(lengths.sum()),), generator=generator)
        first = values[torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:size]]
        yield Batch(
            dense_features=torch.rand(size, DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths),
            labels=(first % 2).to(torch.int32),
        )


def make_model(ids: int, device: torch.device) -> tuple[torch.nn.Module, shoal.EmbeddingBagCollection]:
    """TorchRec's DLRM, ready to train."""
    from torchrec.models.dlrm import DLRM, DLRMTrain
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.optim import RowWiseAdagrad

    bags = shoal.EmbeddingBagCollection(  # shoal
        tables=[
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ids, feature_names=[name])
            for name in FEATURES
        ],
        device=torch.device("meta"),
        optimizer=optimizer_of(RowWiseAdagrad, {"lr": 0.1}),  # shoal: in place of apply_optimizer_in_backward
    )
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=bags,
            dense_in_features=DENSE,
            dense_arch_layer_sizes=[32, DIM],
            over_arch_layer_sizes=[32, 1],
            dense_device=device,
        )
    )
    bags.to_empty(device=device)  # shoal: in place of DistributedModelParallel
    return model, bags


def evaluate(model: torch.nn.Module, ids: int) -> float:
    """The loss on samples that training does not see. Nothing is inserted."""
    model.eval()
    with torch.no_grad():
        losses = [model(batch)[0].item() for batch in batches(4, 64, ids, seed=1)]
    model.train()
    return sum(losses) / len(losses)


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ids", type=int, default=200, help="different ids of a feature")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(0)

    from torchrec.distributed.train_pipeline import TrainPipelineBase

    model, bags = make_model(options.ids, device)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)  # the dense part: rows are updated in the backward pass
    before = evaluate(model, options.ids)
    pipeline = TrainPipelineBase(model, adam, device)
    loader = batches(options.steps, 64, options.ids, seed=0)
    while True:
        try:
            pipeline.progress(loader)
        except StopIteration:
            break
    after = evaluate(model, options.ids)
    rows = {name: len(table) for name, table in bags.tables().items()}
    print(f"loss {before:.4f} -> {after:.4f}; rows {rows}")

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save({"model": model.state_dict(), "adam": adam.state_dict()}, path)
        saved = torch.load(path)
    again, _ = make_model(options.ids, device)
    again.load_state_dict(saved["model"])
    same = evaluate(again, options.ids) == after
    print(f"the loaded model has the same loss: {same}")
    return Report(before, after, rows, same)


if __name__ == "__main__":
    main()
