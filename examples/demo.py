"""Trains a small DLRM on a stream of clicks, on Shoal's tables and on hashed tables of the same memory.

    python -m examples.demo [--steps N] [--seed N] [--out DIR] [--criteo FILE | --movielens FILE]

Equal: the batches and their order, the dense model, its first weights and its Adam, the rule and learning rate of the
rows, the range of their first values, and the bytes of every table: the hashed one gets as many as Shoal's held at its
peak, index included. Different: in Shoal's every id has a row of its own, which the demo erases when the id has not
been seen for a while. Every batch is predicted before it is trained on; the AUC is that of these predictions.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TimeRemainingColumn

import shoal
from examples.click_stream import ClickStream
from examples.dlrm import Source
from examples.fields import ReadError
from examples.hashed_bags import HashedBags
from examples.readers import Criteo, MovieLens
from examples.report import Report, Window, draw, show
from examples.training import Forgetting, train

DIM = 16
LR = 0.2  # of 0.05, 0.1, 0.2 and 0.5 the best for the hashed tables; Shoal gets 0.805 to 0.807 with each
INIT = 0.01


def grow(source: Source, seed: int, progress: Callable[[float | None], None]) -> tuple[list[Window], dict[str, int]]:
    """Trains on Shoal's tables; returns what happened, and the most bytes each table held."""
    tables = [
        shoal.Table(
            name,
            dim=DIM,
            features=features,
            pooling="mean",
            optimizer=shoal.RowwiseAdagrad(lr=LR),
            init=shoal.Uniform(-INIT, INIT),
        )
        for name, features in source.tables.items()
    ]
    bags = shoal.EmbeddingBagCollection(tables, device="cpu", seed=seed)
    forgetting = Forgetting(bags, source)
    windows = []
    for step, (batch, auc) in enumerate(train(source, bags, DIM, seed)):
        forgetting.saw(batch.ids, step)
        if auc is not None:
            forgetting.forget(step)
            windows.append(Window(batch.time, auc, forgetting.rows_alive(), forgetting.ids_seen()))
        progress(auc)
    return windows, forgetting.peak_bytes


def compare(source: Source, seed: int, console: Console) -> Report:
    columns = ("{task.description:<6}", "{task.completed:>4}/{task.total} batches", "AUC {task.fields[auc]}")
    with Progress(*columns, BarColumn(), TimeRemainingColumn(compact=True), console=console) as bars:
        shoals, hasheds = (bars.add_task(name, total=source.steps, auc="     -") for name in ("Shoal", "hashed"))

        def advance(bar: TaskID, auc: float | None) -> None:
            bars.update(bar, advance=1, **({} if auc is None else {"auc": f"{auc:.4f}"}))

        windows, peak_bytes = grow(source, seed, partial(advance, shoals))
        rows = {name: size // HashedBags.row_bytes(DIM) for name, size in peak_bytes.items()}
        bags = HashedBags(rows, source.tables, dim=DIM, lr=LR, init=INIT, seed=seed)
        hashed = []
        for _, auc in train(source, bags, DIM, seed):
            if auc is not None:
                hashed.append(auc)
            advance(hasheds, auc)
    return Report(
        title=source.title,
        time_unit=source.time_unit,
        windows=windows,
        hashed_auc=hashed,
        bytes=sum(peak_bytes.values()),
        hashed_rows=sum(rows.values()),
    )


def whole_number(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"wanted a whole number, {least} or more; got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="demo", description="Compares growing tables with hashed ones of the same memory."
    )
    steps, seed = partial(whole_number, least=1), partial(whole_number, least=0)
    parser.add_argument("--steps", type=steps, default=2400, help="batches to train on at most (%(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of clicks, rows and dense weights (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.png (%(default)s/)")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--criteo", type=Path, metavar="FILE", help="Criteo tsv, plain or gzipped")
    files.add_argument("--movielens", type=Path, metavar="FILE", help="ratings.csv, u.data or ratings.dat")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so small a model gains nothing from a second, which would only wait
    console = Console()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        source: Source
        if options.criteo:
            source = Criteo(options.criteo, options.steps)
        elif options.movielens:
            source = MovieLens(options.movielens, options.steps)
        else:
            source = ClickStream(options.steps, options.seed)
        report = compare(source, options.seed, console)
    except (ReadError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    show(report, console)
    console.print(f"Drawn in {draw(report, options.out)}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
