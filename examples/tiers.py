"""Tables larger than memory: on a disk, and in a store of one's own.

    python -m examples.tiers

The same model is trained three times: with all rows in memory, with memory for a part of them and a disk below it, and
with a database below it that knows nothing of Shoal (SQLite here; a remote store would be the same). All three end with
the same rows, bit for bit.
"""

import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import shoal
from shoal.storage import check_storage

DIM, BATCH, STEPS, KEYS = 16, 256, 60, 20_000
MEMORY = "512KiB"


class SqliteStorage(shoal.Storage):
    """Rows in a table of SQLite: a storage is what reads, writes and erases rows by key, many at a time."""

    def __init__(self, row_bytes: int, path: Path) -> None:
        self._row_bytes = row_bytes
        self._lock = threading.Lock()  # calls come from several threads
        self._base = sqlite3.connect(path, check_same_thread=False)
        self._base.execute("CREATE TABLE IF NOT EXISTS rows (key INTEGER PRIMARY KEY, row BLOB)")

    def read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.zeros(len(keys), self._row_bytes, dtype=torch.uint8)
        found = torch.zeros(len(keys), dtype=torch.bool)
        with self._lock:
            for at, key in enumerate(keys.tolist()):
                if row := self._base.execute("SELECT row FROM rows WHERE key = ?", (key,)).fetchone():
                    rows[at] = torch.frombuffer(bytearray(row[0]), dtype=torch.uint8)
                    found[at] = True
        return rows, found

    def write(self, keys: Tensor, rows: Tensor) -> None:
        pairs = [(key, row.numpy().tobytes()) for key, row in zip(keys.tolist(), rows, strict=True)]
        with self._lock, self._base:
            self._base.executemany("REPLACE INTO rows VALUES (?, ?)", pairs)

    def erase(self, keys: Tensor) -> int:
        with self._lock, self._base:
            return self._base.executemany("DELETE FROM rows WHERE key = ?", [(k,) for k in keys.tolist()]).rowcount

    def keys(self) -> Tensor:
        with self._lock:
            return torch.tensor([key for (key,) in self._base.execute("SELECT key FROM rows")], dtype=torch.int64)

    def __len__(self) -> int:
        with self._lock:
            return int(self._base.execute("SELECT count(*) FROM rows").fetchone()[0])

    def clear(self) -> None:  # for a load: without it, the keys would be erased one by one
        with self._lock, self._base:
            self._base.execute("DELETE FROM rows")

    def flush(self) -> None:  # the calls above commit; a store that gathers what is written sends it here
        with self._lock:
            self._base.commit()

    def close(self) -> None:
        with self._lock:
            self._base.close()


def batches() -> Iterator[shoal.KeyedJaggedTensor]:
    """Bags of five ids, few of them often and many seldom."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        ids = (torch.rand(5 * BATCH, generator=generator) ** 4 * KEYS).long()
        yield shoal.KeyedJaggedTensor(["item"], ids, lengths=torch.full((BATCH,), 5))


def train(tiers: list[object]) -> shoal.EmbeddingBagCollection:
    bags = shoal.EmbeddingBagCollection([shoal.Table("item", DIM, tiers=tiers, optimizer=shoal.Adam(lr=0.05))], seed=0)
    target = torch.linspace(-1, 1, DIM)
    for batch in shoal.prefetch(batches(), bags):
        (bags(batch).values() - target).square().mean().backward()
    return bags


def main() -> None:
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        check_storage(partial(SqliteStorage, path=":memory:"), rows=200)
        console.print("SqliteStorage does what tables expect of a storage.")
        trained = {
            "memory": train([shoal.Dram()]),
            "a disk below memory": train([shoal.Dram(MEMORY), shoal.Ssd(folder, "64MiB")]),
            "SQLite below memory": train([shoal.Dram(MEMORY), partial(SqliteStorage, path=Path(folder, "rows.db"))]),
        }
        table = Table("", "rows", "rows in memory", "its bytes", "came up", "were written down")
        wanted = trained["memory"].state_dict()
        for name, bags in trained.items():
            stats = bags.stats()["item"]
            top = stats.tiers[0]
            table.add_row(name, *map(str, (stats.rows, top.rows, top.bytes, top.promotions, top.demotions)))
            assert all(torch.equal(value, wanted[key]) for key, value in bags.state_dict().items())
        console.print(table)
        console.print("All three have the same rows, bit for bit.")
        trained.clear()


if __name__ == "__main__":
    main()
