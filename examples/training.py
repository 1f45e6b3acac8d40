"""One pass over a source: predict a batch, train on it; and the forgetting of ids that are gone."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import shoal
from examples.dlrm import Batch, Dlrm, Source

WINDOWS = 48  # parts of a pass, each with an AUC of its own


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The chance that a click was scored above a non-click; ties count half. NaN where one of the two is absent."""
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    clicks, others = (labels == 1).sum(), (labels == 0).sum()
    if clicks == 0 or others == 0:
        return float("nan")
    return float((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def train(source: Source, bags: nn.Module, dim: int, seed: int) -> Iterator[tuple[Batch, float | None]]:
    """Gives each batch after training on it, and at the end of a window the AUC of the predictions made in it."""
    torch.manual_seed(seed)  # the dense part starts the same whatever the tables are
    model = Dlrm(bags, features=sum(map(len, source.tables.values())), dense=source.dense, dim=dim)
    adam = torch.optim.Adam(model.dense_parameters())
    windows = min(WINDOWS, source.steps)
    scores, labels = [], []
    for step, batch in enumerate(source):
        logits = model(batch)
        scores.append(logits.detach().numpy())
        labels.append(batch.labels.numpy())
        adam.zero_grad()
        binary_cross_entropy_with_logits(logits, batch.labels).backward()  # the rows are updated here
        adam.step()
        if (step + 1) * windows // source.steps == step * windows // source.steps:
            yield batch, None
        else:
            yield batch, auc(np.concatenate(scores), np.concatenate(labels))
            scores, labels = [], []


class Forgetting:
    """Erases ids that were not seen for a while; by itself a table keeps every id it has seen."""

    def __init__(self, bags: shoal.EmbeddingBagCollection, source: Source) -> None:
        self.bags, self.source = bags, source
        self.last_seen: dict[str, dict[int, int]] = {table: {} for table in source.tables}
        self.ever_seen: dict[str, set[int]] = {table: set() for table in source.tables}
        self.peak_bytes = dict.fromkeys(source.tables, 0)

    def saw(self, ids: shoal.KeyedJaggedTensor, step: int) -> None:
        for table, features in self.source.tables.items():
            for feature in features:
                self.last_seen[table].update(dict.fromkeys(ids[feature].values().tolist(), step))

    def forget(self, step: int) -> None:
        for name, last_seen in self.last_seen.items():
            table = self.bags.table(name)
            self.peak_bytes[name] = max(self.peak_bytes[name], table.stats().bytes)
            self.ever_seen[name] |= last_seen.keys()
            gone = [id for id, seen in last_seen.items() if seen <= step - self.source.forget_after]
            table.erase(gone)
            for id in gone:
                del last_seen[id]

    def rows_alive(self) -> int:
        return sum(len(self.bags.table(name)) for name in self.last_seen)

    def ids_seen(self) -> int:
        return sum(map(len, self.ever_seen.values()))
