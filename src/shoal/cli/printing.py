"""What the commands print, for people and as JSON."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.config import format_size
from shoal.log.commit import Commit, shown_time
from shoal.log.files import FilePath
from shoal.log.scores import Bar
from shoal.log.summary import Summary, TableSummary
from shoal.log.verify import Report

_BAR_CELLS = 40


def summary_json(summary: Summary) -> dict[str, Any]:
    """Returns the summary of a log for JSON."""
    return {
        "id": summary.identity,
        "oldest": summary.oldest,
        "newest": summary.newest,
        "tables": [_table_json(one) for one in summary.tables],
        "snapshots": [
            {"version": one.version, "time": one.time, "rows": one.rows, "bytes": one.bytes}
            for one in summary.snapshots
        ],
        "segments": [{"first": one.first, "last": one.last, "bytes": one.bytes} for one in summary.segments],
        "commits": [_commit_json(one) for one in summary.commits],
        "dense_bytes": summary.dense_bytes,
        "damage": summary.damage,
        "unfinished_bytes": summary.unfinished,
    }


def _table_json(table: TableSummary) -> dict[str, Any]:
    bars = None
    if table.scores is not None:
        bars = [{"low": bar.low, "high": bar.high, "rows": bar.rows} for bar in table.scores]
    return {
        **table.layout.to_json(),
        "rows": table.rows,
        "bytes": table.bytes,
        "step": table.step,
        "scores": bars,
    }


def _commit_json(commit: Commit) -> dict[str, Any]:
    return {
        "version": commit.version,
        "time": commit.time,
        "step": commit.step,
        "event_time": commit.event_time,
        "tables": {
            name: {"rows": one.rows, "puts": one.puts, "deletes": one.deletes, "replaces": one.replaces}
            for name, one in commit.tables.items()
        },
        "metadata": dict(commit.metadata),
    }


def report_json(report: Report) -> dict[str, Any]:
    """Returns what `verify` found for JSON."""
    return {
        "sound": report.is_sound,
        "snapshots": report.snapshots,
        "commits": report.commits,
        "rows": report.rows,
        "dense": report.dense,
        "unfinished_bytes": report.unfinished,
        "not_finite": report.not_finite,
        "problems": report.problems,
    }


def print_report(console: Console, path: FilePath, report: Report) -> None:
    """Prints what `verify` found."""
    counted = (
        f"{report.snapshots} snapshots, {report.commits} commits, {report.rows:,} rows, {report.dense} dense files"
    )
    console.print(Text(f"{path}: {counted}"), soft_wrap=True)
    for problem in report.problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    _print_unfinished(console, report.unfinished)
    if report.not_finite:
        console.print(Text(f"{report.not_finite:,} rows have NaN or infinity"), soft_wrap=True)
    if report.is_sound:
        console.print(Text("all of it is as it was written", style="green"))


def _print_unfinished(console: Console, size: int) -> None:
    if size:
        text = f"{size:,} bytes after the last whole commit: a writer is writing them, or died"
        console.print(Text(text), soft_wrap=True)


def print_summary(console: Console, path: FilePath, summary: Summary) -> None:
    """Prints the summary of a log as tables."""
    versions = "nothing was committed yet"
    if summary.newest is not None:
        versions = f"versions {summary.oldest} to {summary.newest}"
    dense = f", {format_size(summary.dense_bytes)} of dense weights" if summary.dense_bytes else ""
    console.print(Text(f"{path}: {versions}{dense}", style="bold"), soft_wrap=True)
    if summary.damage is not None:
        console.print(Text(f"damaged: {summary.damage}", style="red"), soft_wrap=True)
    _print_unfinished(console, summary.unfinished)
    tables = _grid("tables", "name", "dim", "dtype", "state", "rows", "bytes", "step")
    for table in summary.tables:
        layout = table.layout
        state = ", ".join(f"{column.name}[{column.width}]" for column in layout.columns)
        size = format_size(table.bytes)
        _row(tables, layout.name, layout.dim, layout.dtype, state, f"{table.rows:,}", size, table.step)
    kept = _grid("files", "kind", "versions", "rows", "bytes")
    for snapshot in summary.snapshots:
        _row(kept, "snapshot", snapshot.version, f"{snapshot.rows:,}", format_size(snapshot.bytes))
    for segment in summary.segments:
        held = f"{segment.first} to {segment.last}" if segment.last >= segment.first else f"from {segment.first} on"
        _row(kept, "segment", held, "", format_size(segment.bytes))
    commits = _grid("last commits", "version", "time (UTC)", "step", "puts", "deletes", "event time", "metadata")
    for commit in summary.commits:
        _row(commits, *_commit_cells(commit))
    for grid in (tables, kept, commits):
        if grid.row_count:
            console.print(grid)
    for table in summary.tables:
        if table.scores:
            _print_scores(console, table, table.scores)


def _grid(title: str, *columns: str) -> Table:
    grid = Table(title=title, title_justify="left")
    for column in columns:
        grid.add_column(column, overflow="fold")
    return grid


def _row(grid: Table, *cells: object) -> None:
    # As Text, since what a log holds is no markup.
    grid.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))


def _commit_cells(commit: Commit) -> tuple[object, ...]:
    tables = commit.tables.values()
    return (
        commit.version,
        shown_time(commit.time),
        commit.step,
        f"{sum(one.puts for one in tables):,}",
        f"{sum(one.deletes for one in tables):,}",
        commit.event_time,
        json.dumps(dict(commit.metadata), ensure_ascii=True) if commit.metadata else "",
    )


def _print_scores(console: Console, table: TableSummary, bars: tuple[Bar, ...]) -> None:
    most = max(bar.rows for bar in bars)
    grid = Table.grid(padding=(0, 1))
    for bar in bars:
        cells = round(bar.rows / most * _BAR_CELLS)
        # A bar with few rows is visible, too.
        length = max(cells, 1) if bar.rows else 0
        _row(grid, f"{bar.low:g} to {bar.high:g}", "█" * length, f"{bar.rows:,}")
    console.print(Text(f"scores of {table.layout.name}", style="italic"))
    console.print(grid)
