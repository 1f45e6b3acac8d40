"""Tables as Parquet files, which DuckDB, pandas, Polars and Spark read.

    key              int64
    row              list of dim float, all of one length; of float16 and bfloat16 tables too, exactly
    state.<column>   list of width float, one for each column of the optimizer
    score            double
    op               string, in files of changes alone: "put" or "delete"; all but key and op is null for deletes

The schema's metadata describes the table: shoal.layout, shoal.step, shoal.version. A file without it
is imported, too.
"""

from pathlib import Path

from shoal.checkpoint.progress import progress_bar
from shoal.errors import InputError
from shoal.interop.export_rows import Outgoing, checked_score, rows_each
from shoal.interop.files import replacing
from shoal.interop.import_rows import log_rows, put_rows
from shoal.interop.parquet_batches import ParquetWriter, changes, rows, schema_of
from shoal.interop.parquet_rows import ParquetRows
from shoal.log.retry import while_it_changes
from shoal.table import TableHandle


def export_parquet(
    path: str | Path,
    to: str | Path,
    *,
    table: str,
    version: int | None = None,
    min_score: float | None = None,
    since: int | None = None,
    progress: bool | None = None,
) -> int:
    """Write the rows of a table in a checkpoint or a log to a Parquet file; returns how many.

    path: a log, or a checkpoint of `shoal.save`.
    to: the file, which is in its place once it is complete.
    table: the table's name.
    version: of the log; None is the newest.
    min_score: only rows with that score or a higher one.
    since: the changes after that version in place of the rows: the last one of each key, with a column `op`.
    progress: whether to show a bar; None is where standard error is a terminal.
    """
    return while_it_changes(path, lambda: _export(path, to, table, version, min_score, since, progress))


def _export(
    path: str | Path,
    to: str | Path,
    table: str,
    version: int | None,
    min_score: float | None,
    since: int | None,
    progress: bool | None,
) -> int:
    source = Outgoing(path, table, version)
    least = checked_score(source.where, min_score)
    if since is not None and least is not None:
        raise InputError(f"[{source.where}] wanted min_score or since; got both. A delete has no score.")
    schema = schema_of(source, since)
    each = rows_each(source.layout)
    batches = rows(source, schema, each, least) if since is None else changes(source, schema, each, since)
    written = 0
    with (
        replacing(Path(to)) as temporary,
        progress_bar("exporting", source.rows, progress) as bar,
        ParquetWriter(temporary, schema) as writer,
    ):
        for batch in batches:
            writer.write(batch)
            written += batch.num_rows
            bar(batch.num_rows)
    return written


def import_parquet(path: str | Path, into: TableHandle, *, state: bool = True, progress: bool | None = None) -> int:
    """Put the rows of a Parquet file in a live table, in place of those that their keys had; returns how many.

    `into` is `bags.table("item")`. Weights are rounded to the table's type. What the file does not have is as at birth:
    state, and the score, which is the table's step. state: False leaves the file's state out. A file that is wrong in
    any row, or has more of them than the table has room for, is refused before anything changes. Lookups see none of
    the rows or all of them. Where a disk fails on the way, or batches at work hold memory that rows need, some of the
    rows are in the table, and a note of the error says how many.
    """
    with ParquetRows(Path(path)) as file:
        return put_rows(file, into, state, progress)


def parquet_to_log(
    path: str | Path,
    to: str | Path,
    *,
    table: str,
    dim: int | None = None,
    dtype: str | None = None,
    buckets: int | None = None,
    seed: int | None = None,
    progress: bool | None = None,
    trust: bool = False,
) -> int:
    """Commit the rows of a Parquet file to a log as a table, which `shoal.load` reads; returns the version.

    The log is made if it is not there; if it has the table already, its rows are replaced. What is not given is as the
    file says, if it was exported by Shoal; else dtype is float32, buckets 4096 and seed 0. State columns are kept under
    their names, whichever optimizer they are of. No table is made: the rows pass by. trust: as `ChangeLog` takes it.
    """
    with ParquetRows(Path(path)) as file:
        return log_rows(
            file, to, table, dim=dim, dtype=dtype, buckets=buckets, seed=seed, progress=progress, trust=trust
        )
