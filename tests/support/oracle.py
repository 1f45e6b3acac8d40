"""A collection in plain Python: dicts of rows, the reference operators, one key at a time. Slow and obvious."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import shoal
from shoal import optim
from shoal.ops.birth import reference as birth
from shoal.ops.pool import reference as pooling
from shoal.ops.update import reference as updating


@dataclass
class Row:
    weights: Tensor
    state: dict[str, Tensor]
    score: float


@dataclass
class OracleTable:
    config: shoal.Table
    seed: int
    rows: dict[int, Row] = field(default_factory=dict)
    step: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.config.dtype)

    def first(self, key: int) -> Tensor:
        keys = torch.tensor([key])
        row = birth.first_rows(self.config.init, self.seed, self.config.name, keys, self.config.dim)[0]
        return row.to(self.dtype).float()

    def insert(self, key: int) -> None:
        if key not in self.rows:
            state = {c.name: torch.full((c.width,), c.initial) for c in self.config.columns}
            self.rows[key] = Row(self.first(key), state, float(self.step))

    def read(self, key: int) -> Tensor:
        if key in self.rows:
            return self.rows[key].weights
        return self.first(key) if self.config.missing == "init" else torch.zeros(self.config.dim)

    def gather(self, keys: Tensor) -> Tensor:
        rows = [self.read(key) for key in keys.tolist()]
        return torch.stack(rows) if rows else torch.zeros(0, self.config.dim)


class Oracle:
    """Forward and backward of one collection."""

    def __init__(self, configs: list[shoal.Table], seed: int) -> None:
        self.tables = [OracleTable(config, seed) for config in configs]

    def forward(self, features: dict[str, tuple[Tensor, Tensor, Tensor | None]], training: bool) -> list[Tensor]:
        """`features` by name: keys, offsets, weights. One output for each feature of each table, in order."""
        parts = [(t, f) for t in self.tables for f in t.config.features]
        if training:
            for table, feature in parts:
                if feature.mode != "read" and table.config.optimizer is not None:
                    for key in features[feature.name][0].tolist():
                        table.insert(key)
        outputs = []
        for table, feature in parts:
            keys, offsets, weights = features[feature.name]
            out = pooling.pool(table.gather(keys), offsets, table.config.pooling, weights)
            outputs.append(torch.zeros_like(out) if feature.mode == "write" else out)
        self._last = {table.config.name: float(table.step) for table in self.tables}
        return outputs

    def backward(
        self, features: dict[str, tuple[Tensor, Tensor, Tensor | None]], grads: list[Tensor]
    ) -> dict[str, Tensor]:
        """Updates rows; returns the gradients of the per-sample weights by feature."""
        weight_grads: dict[str, Tensor] = {}
        gradients: dict[int, dict[int, list[Tensor]]] = {}
        grad = iter(grads)
        for number, table in enumerate(self.tables):
            for feature in table.config.features:
                keys, offsets, weights = features[feature.name]
                each, to_weights = updating.position_gradients(
                    next(grad), offsets, table.config.pooling, table.gather(keys), weights
                )
                if feature.mode != "write":
                    weight_grads[feature.name] = weight_grads.get(feature.name, 0) + to_weights
                if feature.mode != "read":
                    for key, one in zip(keys.tolist(), each, strict=True):
                        gradients.setdefault(number, {}).setdefault(key, []).append(one)
        for number, table in enumerate(self.tables):
            trains = any(f.mode != "read" for f in table.config.features) and table.config.optimizer is not None
            if not trains:
                continue
            for key, ones in gradients.get(number, {}).items():
                self._update(table, key, torch.stack(ones))
            table.step += 1
        return weight_grads

    def _update(self, table: OracleTable, key: int, gradients: Tensor) -> None:
        optimizer = table.config.optimizer
        row = table.rows[key]
        hyper = optimizer.hyper()
        decoupled = hyper.get("decoupled_weight_decay", 0.0)
        decay = hyper.get("weight_decay", 0.0)
        if isinstance(optimizer, shoal.AdamW):
            decay, decoupled = 0.0, decay

        def step(weights: Tensor, gradient: Tensor) -> Tensor:
            return optim.reference_step(optimizer, hyper, table.step + 1, weights, gradient, row.state)

        gradient = updating.reduce(gradients, getattr(optimizer, "duplicates", "sum"))
        if gradient is None:
            return
        new = updating.update_row(
            row.weights,
            gradient,
            step,
            clip=optimizer.clip,
            weight_decay=decay,
            shrink=1 - hyper.get("lr", 0.0) * decoupled,
            max_norm=optimizer.max_norm,
        )
        if table.dtype != torch.float32:
            stream = birth.rounding_stream(table.seed, table.config.name)
            words = birth.words(stream, torch.tensor([key]), table.config.dim, table.step)[0]
            new = updating.stochastic_round(new, words, table.dtype).float()
        row.weights = new
        row.score = max(row.score, self._last[table.config.name])
