"""Real data for the demo: Criteo's clicks and MovieLens' ratings."""

import math
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

import shoal
from examples.dlrm import Batch
from examples.fields import ReadError, category, click, count, integer, lines, parse, rating

HEADER = "userId,movieId,rating,timestamp"
DAY, WEEK = 86_400, 7 * 86_400


class Criteo:
    """Criteo's display advertising tsv: a click or none, 13 counts, 26 hashed categories; the last two may be empty."""

    categories = tuple(f"C{i}" for i in range(1, 27))
    tables: ClassVar = {name: [name] for name in categories}
    dense = 13
    time_unit = "thousand impressions"

    def __init__(self, path: Path, max_steps: int, batch: int = 1024) -> None:
        self.path, self.batch, self.title = path, batch, f"Criteo, {path.name}"
        self.impressions = sum(1 for _ in islice(lines(path), max_steps * batch))
        if self.impressions == 0:
            raise ReadError(f"{path}: wanted impressions, a line each; got an empty file")
        self.steps = math.ceil(self.impressions / batch)
        self.forget_after = max(1, self.steps // 4)

    def __iter__(self) -> Iterator[Batch]:
        unread = islice(lines(self.path), self.impressions)
        for step in range(self.steps):
            impressions = [self._parse(where, line) for where, line in islice(unread, self.batch)]
            clicks, counts, categories = zip(*impressions, strict=True)
            by_category = [id for ids in zip(*categories, strict=True) for id in ids]
            yield Batch(
                labels=torch.tensor(clicks, dtype=torch.float32),
                dense=torch.tensor(counts, dtype=torch.float32).clamp(min=0).log1p(),
                ids=shoal.KeyedJaggedTensor(
                    keys=self.categories,
                    values=torch.tensor([id for id in by_category if id is not None], dtype=torch.int64),
                    lengths=torch.tensor([id is not None for id in by_category], dtype=torch.int64),
                ),
                time=step * self.batch / 1000,
            )

    def _parse(self, where: str, line: str) -> tuple[int, list[int], list[int | None]]:
        fields = line.split("\t")
        if len(fields) != 40:
            raise ReadError(
                f"{where}: wanted 40 fields separated by tabs (label, 13 counts, 26 categories); got {len(fields)}"
            )
        return (
            parse(where, "the label", fields[0], click),
            [parse(where, f"count I{i}", text, count) for i, text in enumerate(fields[1:14], start=1)],
            [parse(where, f"category C{i}", text, category) for i, text in enumerate(fields[14:], start=1)],
        )


class MovieLens:
    """MovieLens' ratings as they were given: ratings.csv, u.data (tabs) or ratings.dat (`::`). A like is 4 or more."""

    tables: ClassVar = {"user": ["user"], "movie": ["movie"]}
    dense = 4
    time_unit = "days"

    def __init__(self, path: Path, max_steps: int, batch: int = 256) -> None:
        self.batch, self.title = batch, f"MovieLens, {path.name}"
        ratings = np.fromiter(
            self._read(path), dtype=[("user", "i8"), ("movie", "i8"), ("rating", "f4"), ("time", "i8")]
        )
        self.ratings = ratings[np.argsort(ratings["time"], kind="stable")[: max_steps * batch]]
        self.steps = math.ceil(len(self.ratings) / batch)
        self.forget_after = max(1, self.steps // 4)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, len(self.ratings), self.batch):
            part = self.ratings[start : start + self.batch]
            phases = [2 * np.pi * (part["time"] % period) / period for period in (DAY, WEEK)]
            dense = np.stack([wave(phase) for phase in phases for wave in (np.sin, np.cos)], axis=1)
            yield Batch(
                labels=torch.from_numpy((part["rating"] >= 4).astype(np.float32)),
                dense=torch.from_numpy(dense.astype(np.float32)),
                ids=shoal.KeyedJaggedTensor(
                    keys=["user", "movie"],
                    values=torch.from_numpy(np.concatenate([part["user"], part["movie"]])),
                    lengths=torch.ones(2 * len(part), dtype=torch.int64),
                ),
                time=float(part["time"][0] - self.ratings["time"][0]) / DAY,
            )

    @staticmethod
    def _read(path: Path) -> Iterator[tuple[int, int, float, int]]:
        unread = lines(path)
        place, first = next(unread, (str(path), ""))
        separator = "," if first == HEADER else next((s for s in ("::", "\t") if s in first), None)
        if separator is None:
            raise ReadError(
                f"{place}: wanted a csv with the header '{HEADER}', or these fields separated by tabs or '::'; "
                f"got {first[:60]!r}"
            )
        found = 0
        for where, line in unread if first == HEADER else chain([(place, first)], unread):
            fields = line.split(separator)
            if len(fields) != 4:
                raise ReadError(f"{where}: wanted 4 fields separated by {separator!r} ({HEADER}); got {len(fields)}")
            found += 1
            yield (
                parse(where, "userId", fields[0], integer),
                parse(where, "movieId", fields[1], integer),
                parse(where, "rating", fields[2], rating),
                parse(where, "timestamp", fields[3], integer),
            )
        if not found:
            raise ReadError(f"{path}: wanted ratings below the header; got none")
