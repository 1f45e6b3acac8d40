"""Checks that contenders compute the same before they are timed."""

from collections.abc import Sequence

import torch

from benchmarks.peers import Bags
from benchmarks.work import TABLES, Batch

# Sums of 20 float32 in another order, and one optimizer step on top.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class Mismatch(Exception):
    """Raised where ours and a peer compute different results, so that a time would mean nothing."""


def same_forward(ours: Bags, peers: Sequence[Bags], batches: Sequence[Batch]) -> None:
    for batch in batches:
        wanted = ours.forward(batch)
        for peer in peers:
            _compare(f"forward of {ours.name} and {peer.name}", wanted, peer.forward(batch))


def same_step(ours: Bags, peers: Sequence[Bags], batch: Batch, gradient: torch.Tensor) -> None:
    """Checks that one step from equal rows leaves equal rows. Changes the rows of all contenders."""
    for bags in (ours, *peers):
        bags.step(batch, gradient)
    for table in range(TABLES):
        ids = batch.of_table(table).unique()
        updated = ours.rows(table, ids)
        for peer in peers:
            _compare(
                f"rows of table {table} after a step, {ours.name} and {peer.name},", updated, peer.rows(table, ids)
            )


def same_rows(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    if not torch.equal(found.to(wanted.dtype), wanted):
        wrong = int((found.to(wanted.dtype) != wanted).sum())
        raise Mismatch(f"{what}: {wrong} of {len(wanted)} keys have another row")


def _compare(what: str, ours: torch.Tensor, peer: torch.Tensor) -> None:
    try:
        torch.testing.assert_close(ours.detach(), peer.detach(), **TOLERANCE)
    except AssertionError as error:
        raise Mismatch(f"{what} differ: {error}") from None
