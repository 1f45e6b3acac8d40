"""Tables as safetensors files, which every framework reads: the entries of a table in a state dict (docs/formats.md,
section 5) without what stands before their names.

    weight           [n, dim], in the table's type
    weight_id        int64 [n, 1]: the keys, in any order
    state.<column>   float32 [n, width], one for each column of the optimizer
    score            float64 [n]
    step             int64 []

The header's metadata has shoal.layout and shoal.version. A file without it is imported, too.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from shoal import _native
from shoal.checkpoint.progress import progress_bar
from shoal.errors import InputError, StorageError
from shoal.interop.export_rows import STEP, Outgoing, checked_score, regrouped, rows_each
from shoal.interop.files import Source, replacing
from shoal.interop.import_rows import Shape, log_rows, put_rows
from shoal.log.retry import while_it_changes
from shoal.records import Rows
from shoal.records.excerpt import excerpt
from shoal.records.tensors import Entry, decode_header, encode_header, header_bytes
from shoal.table import TableHandle

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_STATE = "state."
_LENGTH_BYTES = 8


def export_safetensors(
    path: str | Path,
    to: str | Path,
    *,
    table: str,
    version: int | None = None,
    min_score: float | None = None,
    progress: bool | None = None,
) -> int:
    """Write the rows of a table in a checkpoint or a log to a safetensors file; returns how many.

    path: a log, or a checkpoint of `shoal.save`.
    to: the file, which is in its place once it is complete.
    table: the table's name.
    version: of the log; None is the newest.
    min_score: only rows with that score or a higher one.
    progress: whether to show a bar; None is where standard error is a terminal.
    """
    return while_it_changes(path, lambda: _export(path, to, table, version, min_score, progress))


def _export(
    path: str | Path,
    to: str | Path,
    table: str,
    version: int | None,
    min_score: float | None,
    progress: bool | None,
) -> int:
    source = Outgoing(path, table, version)
    least = checked_score(source.where, min_score)
    rows = source.rows if least is None else sum(len(piece) for piece in source.pieces(least))
    with (
        replacing(Path(to)) as temporary,
        progress_bar("exporting", rows, progress) as bar,
        _native.File.create_new(temporary) as file,
    ):
        writer = _Writer(file, source, rows)
        for piece in regrouped(source.pieces(least), rows_each(source.layout)):
            writer.put(piece)
            bar(len(piece))
        writer.finish()
    return rows


def import_safetensors(path: str | Path, into: TableHandle, *, state: bool = True, progress: bool | None = None) -> int:
    """Put the rows of a safetensors file in a live table, in place of those that their keys had; returns how many.

    `into` is `bags.table("item")`. Weights are rounded to the table's type. What the file does not have is as at birth:
    state, and the score, which is the table's step. state: False leaves the file's state out. The table's own step
    stays. A file that is wrong in any row, or has more of them than the table has room for, is refused before anything
    changes. Lookups see none of the rows or all of them. Where a disk fails on the way, or batches at work hold memory
    that rows need, some of the rows are in the table, and a note of the error says how many.
    """
    with _SafetensorsRows(Path(path)) as file:
        return put_rows(file, into, state, progress)


def safetensors_to_log(
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
    """Commit the rows of a safetensors file to a log as a table, which `shoal.load` reads; returns the version.

    The log is made if it is not there; if it has the table already, its rows are replaced. What is not given is as the
    file says, if it was exported by Shoal; else dtype is that of `weight`, buckets 4096 and seed 0. State columns are
    kept under their names, whichever optimizer they are of. No table is made in memory. trust: as `ChangeLog` takes it.
    """
    with _SafetensorsRows(Path(path)) as file:
        dtype = file.dtype if dtype is None else dtype
        return log_rows(
            file, to, table, dim=dim, dtype=dtype, buckets=buckets, seed=seed, progress=progress, trust=trust
        )


class _Writer:
    """Writes rows to a file of tensors, each after those before it in its own tensor."""

    def __init__(self, file: _native.File, source: Outgoing, rows: int) -> None:
        self._file = file
        self._where = source.where
        self._rows = rows
        self._done = 0
        layout = source.layout
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        shapes |= {"weight": (layout.torch_dtype, (rows, layout.dim)), "weight_id": (torch.int64, (rows, 1))}
        shapes |= {_STATE + column.name: (torch.float32, (rows, column.width)) for column in layout.columns}
        shapes |= {"score": (torch.float64, (rows,)), "step": (torch.int64, ())}
        told = {name: text for name, text in source.told().items() if name != STEP}
        header, self._at = encode_header(shapes, told)
        file.write(0, header)
        self._put("step", torch.tensor(source.step, dtype=torch.int64, device="cpu").reshape(1))

    def _put(self, name: str, values: Tensor) -> None:
        if values.nbytes:
            values = values.contiguous()
            self._file.write(self._at[name], values.reshape(-1).view(torch.uint8))
            self._at[name] += values.nbytes

    def put(self, rows: Rows) -> None:
        """Some more rows."""
        self._done += len(rows)
        if self._done > self._rows:
            raise self._miscounted()
        assert rows.scores is not None
        self._put("weight", rows.weights)
        self._put("weight_id", rows.keys)
        for name, values in rows.state.items():
            self._put(_STATE + name, values)
        self._put("score", rows.scores)

    def finish(self) -> None:
        """All of it is on the disk."""
        if self._done != self._rows:
            raise self._miscounted()
        self._file.sync()

    def _miscounted(self) -> StorageError:
        return StorageError(
            f"[{self._where}] its commit says {self._rows} rows; got {self._done}. `shoal verify` says whether "
            f"it is damaged."
        )


class _SafetensorsRows:
    """A safetensors file with rows of a table."""

    def __init__(self, path: Path) -> None:
        self.where = f"file {path}"
        self._source = Source(path)
        try:
            size = self._source.size
            header = header_bytes(self._source.read_at(0, _LENGTH_BYTES), size, self.where)
            self._entries, told = decode_header(self._source.read_at(0, header), size, self.where)
            self.shape = self._shape(told)
        except BaseException:
            self._source.close()
            raise

    def __enter__(self) -> "_SafetensorsRows":
        return self

    def __exit__(self, *_: object) -> None:
        self._source.close()

    @property
    def dtype(self) -> str:
        """That of a table with the same weights."""
        dtype = self._entries["weight"].dtype
        return "float32" if dtype == torch.float64 else str(dtype).removeprefix("torch.")

    def _shape(self, told: dict[str, str]) -> Shape:
        for name in ("weight", "weight_id"):
            if name not in self._entries:
                raise InputError(f"[{self.where}] wanted a tensor {name!r}; got {excerpt(list(self._entries))}.")
        for name in self._entries:
            known = name in ("weight", "weight_id", "score", "step")
            if not known and not (name.startswith(_STATE) and len(name) > len(_STATE)):
                raise InputError(
                    f"[{self.where}] wanted the tensors weight, weight_id, state.<column>, score and step; got "
                    f"{excerpt(name)}. Leave it out."
                )
        rows = self._entries["weight_id"].shape[0] if self._entries["weight_id"].shape else 0
        self._require("weight_id", (torch.int64,), [[rows, 1], [rows]])
        widths = {}
        for name, entry in self._entries.items():
            if name == "weight" or name.startswith(_STATE):
                widths[name] = entry.shape[1] if len(entry.shape) == 2 else 0
                self._require(name, _FLOATS, [[rows, max(widths[name], 1)]])
        if "score" in self._entries:
            self._require("score", _FLOATS, [[rows]])
        if "step" in self._entries:
            self._require("step", (torch.int64,), [[], [1]])
            told = told | {STEP: str(int(self._read("step", 0, 1)))}
        state = {name.removeprefix(_STATE): width for name, width in widths.items() if name != "weight"}
        return Shape(rows, widths["weight"], state, "score" in self._entries, told)

    def _require(self, name: str, dtypes: tuple[torch.dtype, ...], shapes: list[list[int]]) -> None:
        entry = self._entries[name]
        if entry.dtype not in dtypes or entry.shape not in shapes:
            kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InputError(
                f"[{self.where}] {name}: wanted {kinds} of shape {' or '.join(map(str, shapes))}; got "
                f"{str(entry.dtype).removeprefix('torch.')} of {excerpt(entry.shape)}."
            )

    def _read(self, name: str, first: int, count: int) -> Tensor:
        """Some numbers of a tensor. REQUIRES: it has them."""
        entry: Entry = self._entries[name]
        data = self._source.read_at(entry.first + first * entry.dtype.itemsize, count * entry.dtype.itemsize)
        if not data:
            return torch.empty(0, dtype=entry.dtype, device="cpu")
        return torch.frombuffer(data, dtype=entry.dtype)

    def pieces(self, each: int) -> Iterator[Rows]:
        """The rows, as the file has them."""
        shape = self.shape
        dim = shape.dim or 0
        for begin in range(0, shape.rows, each):
            count = min(each, shape.rows - begin)
            yield Rows(
                self._read("weight_id", begin, count),
                self._read("weight", begin * dim, count * dim).view(count, dim),
                {
                    name: self._read(_STATE + name, begin * width, count * width).view(count, width)
                    for name, width in shape.state.items()
                },
                self._read("score", begin, count) if shape.has_scores else None,
            )
