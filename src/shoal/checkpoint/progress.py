"""A progress bar for work on many rows, shown on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, rows: int | None, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with numbers of rows that are done. rows: how many there are; None where that is not
    known. shown: whether to show a bar; None means if standard error is a terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda _rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task(what, total=rows)
        yield lambda done: bar.advance(task, done)
