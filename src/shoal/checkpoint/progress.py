"""A bar for work on many rows, where somebody looks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(what: str, rows: int | None, shown: bool | None) -> Iterator[Callable[[int], None]]:
    """Gives what hears of rows that are done. rows: None where nobody knows. shown: None is where standard error is a
    terminal."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda _rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:  # elsewhere it is shown once, done
        task = bar.add_task(what, total=rows)
        yield lambda done: bar.advance(task, done)
