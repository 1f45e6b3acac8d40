"""The commands. Each declares its options, calls the library, and prints the result."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from shoal.cli.printing import print_report, print_summary, report_json, summary_json
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.log.files import FilePath, Files

Found = TypeVar("Found")


class Commands(TyperGroup):
    """Commands whose ShoalErrors are printed as they are: the text says where, what and what to do."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except ShoalError as error:
            console = Console(stderr=True, soft_wrap=True, highlight=False)
            console.print(Text("\n".join([str(error), *getattr(error, "__notes__", [])]), style="red"))
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=Commands, help="Look at, check, compact, export and import tables that Shoal saved.",
    no_args_is_help=True, pretty_exceptions_enable=False,
)  # fmt: skip

LogPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A log, or a checkpoint of shoal.save.", show_default=False)
]
TableName = Annotated[str, typer.Option("--table", help="The table's name.", show_default=False)]
Trust = Annotated[bool, typer.Option("--trust", help="Write though another user owns the log, or files in it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _start() -> None:
    """Look at, check, compact, export and import tables that Shoal saved."""


@app.command()
def export(
    path: LogPath,
    table: TableName,
    to: Annotated[Path, typer.Option(help="The file: x.parquet or x.safetensors.", show_default=False)],
    min_score: Annotated[float | None, typer.Option(help="Only rows with this score or a higher one.")] = None,
    since: Annotated[int | None, typer.Option(metavar="VERSION", help="Changes after this version, not rows.")] = None,
    version: Annotated[int | None, typer.Option(help="Of this version, not of the newest.")] = None,
) -> None:
    """Write a table's rows, or its changes after a version, to a Parquet or safetensors file."""
    if min_score is not None and since is not None:
        raise typer.BadParameter("give --min-score or --since, not both: a delete has no score.")
    if _format(to, "--to") == ".parquet":
        from shoal.interop.parquet import export_parquet

        rows = export_parquet(path, to, table=table, version=version, min_score=min_score, since=since)
    else:
        from shoal.interop.safetensors import export_safetensors

        if since is not None:
            raise typer.BadParameter("changes are exported to Parquet: a safetensors file has no place for deletes.")
        rows = export_safetensors(path, to, table=table, version=version, min_score=min_score)
    what = "rows" if since is None else "changes"
    _say(f"{to}: {rows:,} {what} of table {table!r}")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="x.parquet or x.safetensors.", show_default=False)],
    table: TableName,
    to: Annotated[Path, typer.Option(help="The log to commit to; made if it is not there.", show_default=False)],
    dim: Annotated[int | None, typer.Option(help="Weights a row; by default as the file has them.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, float16 or bfloat16; by default as exported.")] = None,
    buckets: Annotated[int | None, typer.Option(help="As Table(buckets=); by default as exported, or 4096.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the collection; by default as exported, or 0.")] = None,
    trust: Trust = False,
) -> None:
    """Commit the rows of a Parquet or safetensors file to a log, as a table that shoal.load reads."""
    if _format(file, "FILE") == ".parquet":
        from shoal.interop.parquet import parquet_to_log as commit
    else:
        from shoal.interop.safetensors import safetensors_to_log as commit
    version = commit(file, to, table=table, dim=dim, dtype=dtype, buckets=buckets, seed=seed, trust=trust)
    _say(f"{to}: version {version} has table {table!r} from {file}")


@app.command()
def inspect(
    path: LogPath,
    commits: Annotated[int, typer.Option(min=0, help="How many of the last commits to show.")] = 10,
    scores: Annotated[bool, typer.Option(help="Read all rows for histograms of their scores.")] = True,
    as_json: AsJson = False,
) -> None:
    """Tables, snapshots, segments, the last commits, and histograms of scores. Exits with 1 where a segment is damaged,
    and says where, and what comes before the damage."""
    from shoal.log.summary import summarize

    found = _each_part(path, "reading", lambda files, bar: summarize(files, commits, scores, bar))
    _show(found, as_json, summary_json, print_summary)
    if any(one.damage is not None for one in found.values()):
        raise typer.Exit(1)


@app.command()
def verify(path: LogPath, as_json: AsJson = False) -> None:
    """Read every byte and compare it with its checksum. Exits with 1 where something is wrong."""
    from shoal.log.verify import verify as verify_log

    found = _each_part(path, "verifying", verify_log)
    _show(found, as_json, report_json, print_report)
    if not all(one.is_sound for one in found.values()):
        raise typer.Exit(1)


@app.command()
def compact(
    path: LogPath,
    retain: Annotated[int, typer.Option(min=1, help="How many snapshots to keep.")] = 2,
    trust: Trust = False,
) -> None:
    """Make a snapshot of the newest version, and remove what is older. The log may be written at the same time."""
    from shoal.checkpoint.progress import progress_bar
    from shoal.log.compact import compact as compact_log
    from shoal.log.compact import compacting
    from shoal.log.files import Files
    from shoal.log.trust import require_own_files

    for part in _parts(path):
        files = Files(part)
        require_own_files(files, f"log {part}", trust)
        with progress_bar("compacting", None, None) as bar:
            version = compact_log(files, retain, bar)
        if version is not None:
            _say(f"{part}: snapshot of version {version}")
            continue
        with compacting(files) as lock:
            _say(f"{part}: there is nothing to compact" if lock else f"{part}: another process is compacting it now")


@app.command()
def repair(path: LogPath, trust: Trust = False) -> None:
    """Set what is damaged aside, so that the log goes on from the highest version that is whole. No byte is deleted.
    Exits with 1 where there is damage that this does not mend."""
    import warnings

    from shoal.log import ChangeLog, RepairWarning

    is_sound = True
    for part in _parts(path):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RepairWarning)  # it is printed
            log = ChangeLog(part, repair=True, trust=trust)
        with log:
            for one in log.repairs:
                _say(f"{part}: {one}")
            if not log.repairs:
                _say(f"{part}: no segment or snapshot is damaged; the newest version is {log.version}")
            report = log.verify()
        if not report.is_sound:
            print_report(Console(), part, report)
            is_sound = False
    if not is_sound:
        raise typer.Exit(1)


def _parts(path: Path) -> "list[FilePath]":
    """Returns the parts of a log or a checkpoint, one for each rank that saved it."""
    from shoal.checkpoint.ranks import parts_of
    from shoal.log.files import require_folder

    require_folder(f"checkpoint {path}", path)
    return parts_of(path)


def _each_part(
    path: Path, what: str, call: "Callable[[Files, Callable[[int], None]], Found]"
) -> "dict[FilePath, Found]":
    """Returns what a call returns for each part, while a bar shows how many rows it has read."""
    from shoal.checkpoint.progress import progress_bar
    from shoal.log.files import Files

    found = {}
    for part in _parts(path):
        with progress_bar(what, None, None) as bar:
            found[part] = call(Files(part), bar)
    return found


def _show(
    found: "dict[FilePath, Found]",
    as_json: bool,
    to_json: "Callable[[Found], dict[str, Any]]",
    show: "Callable[[Console, FilePath, Found], None]",
) -> None:
    """Prints what was found of each part, as JSON or for people."""
    if as_json:
        _say(json.dumps({"logs": [{"path": str(part), **to_json(one)} for part, one in found.items()]}, indent=1))
        return
    for part, one in found.items():
        show(Console(), part, one)


def _format(path: Path, option: str) -> str:
    if path.suffix not in (".parquet", ".safetensors"):
        raise typer.BadParameter(f"{option}: wanted a name that ends in .parquet or .safetensors; got {str(path)!r}.")
    return path.suffix


def _say(text: str) -> None:
    # Not by rich, which would take a path for markup, and wrap JSON.
    sys.stdout.write(f"{text}\n")
