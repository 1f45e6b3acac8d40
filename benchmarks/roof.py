"""roof.c from Python: compiled when first needed, in our process, so that it alternates with ours."""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import weakref

import torch
from torch import Tensor

from benchmarks.peers import Peer
from benchmarks.work import BAG, TABLES, Batch

SOURCE = pathlib.Path(__file__).with_name("roof.c")
BUILD = pathlib.Path(__file__).parent.parent / "build" / "benchmarks"
FLAGS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
THREADS = 2


@functools.cache
def _compiler() -> str | None:
    """Returns a C compiler with OpenMP, which Shoal itself is not built with."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o", f"{folder}/empty.so"]
        done = subprocess.run(command, input=b"", capture_output=True)
    return compiler if done.returncode == 0 else None


PLAIN_C = Peer(
    "a C compiler with OpenMP",
    ("plain C", "plain C, known rows", "plain C, hash in front", "rows read once"),
    _compiler,
)


@functools.cache
def library() -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise FileNotFoundError(f"benchmarks.roof: {SOURCE.name} wants {PLAIN_C.name}; set CC to one")
    digest = hashlib.sha256(SOURCE.read_bytes() + compiler.encode() + "".join(FLAGS).encode()).hexdigest()[:16]
    built = BUILD / f"roof-{digest}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = built.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(unfinished)], check=True)
        unfinished.rename(built)
    lib = ctypes.CDLL(str(built))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.roof_new.restype, lib.roof_new.argtypes = pointer, [number]
    lib.roof_free.restype, lib.roof_free.argtypes = None, [pointer]
    lib.roof_insert.restype, lib.roof_insert.argtypes = None, [pointer, pointer, number, number]
    lib.roof_find.restype, lib.roof_find.argtypes = None, [pointer, pointer, number, pointer, ctypes.c_int]
    lib.roof_pages.restype = pointer
    lib.roof_pages.argtypes = [ctypes.c_size_t, ctypes.POINTER(pointer), ctypes.POINTER(ctypes.c_size_t)]
    lib.roof_unmap.restype, lib.roof_unmap.argtypes = None, [pointer, ctypes.c_size_t]
    lib.roof_transfer.restype, lib.roof_transfer.argtypes = ctypes.c_double, [number]
    lib.roof_read.restype, lib.roof_read.argtypes = ctypes.c_double, [pointer, pointer, number, number, ctypes.c_int]
    lib.roof_bags.restype = ctypes.c_int
    lib.roof_bags.argtypes = [pointer, pointer, number, number, number, number, pointer, pointer, ctypes.c_int]
    return lib


def transfer_ns() -> float | None:
    """Returns the nanoseconds that a line takes from one core to another in this minute; None if there is one core."""
    if len(os.sched_getaffinity(0)) < 2:
        return None
    taken = min(library().roof_transfer(5000) for _ in range(5))  # time that other processes take of a core is left out
    return taken if taken >= 0 else None


def read_rate(rows: int, width: int, names: Tensor, threads: int) -> float:
    """Returns the bytes a second of reading rows in that order, from a table of so many rows."""
    table = torch.zeros(rows * width)
    return max(library().roof_read(table.data_ptr(), names.data_ptr(), len(names), width, threads) for _ in range(3))


class RoofMap:
    name = "plain C"

    def __init__(self, keys: Tensor) -> None:
        self._handle = library().roof_new(len(keys))
        if not self._handle:
            raise MemoryError(f"benchmarks.roof: no memory for a map of {len(keys)} keys")
        weakref.finalize(self, library().roof_free, self._handle)
        library().roof_insert(self._handle, keys.data_ptr(), len(keys), 0)

    def find(self, keys: Tensor, out: Tensor) -> Tensor:
        library().roof_find(self._handle, keys.data_ptr(), len(keys), out.data_ptr(), THREADS)
        return out


class RoofBags:
    """The eval forward in C: rows in 2 MiB pages, found by number, or with a hash in front."""

    name = "plain C"

    def __init__(self, live_rows: int, dim: int, bags: int) -> None:
        self.dim = dim
        self.maps: list[RoofMap] = []
        self._rows = [self._pages(live_rows * dim).view(live_rows, dim) for _ in range(TABLES)]
        self._row_pointers = (ctypes.c_void_p * TABLES)(*(rows.data_ptr() for rows in self._rows))
        self._out = torch.empty(bags, TABLES * dim)

    def _pages(self, floats: int) -> Tensor:
        mapping, mapped = ctypes.c_void_p(), ctypes.c_size_t()
        start = library().roof_pages(floats * 4, ctypes.byref(mapping), ctypes.byref(mapped))
        if not start:
            raise MemoryError(f"benchmarks.roof: no memory for {floats * 4} bytes of rows")
        weakref.finalize(self, library().roof_unmap, mapping, mapped)
        return torch.frombuffer((ctypes.c_float * floats).from_address(start), dtype=torch.float32)

    def load(self, table: int, rows: Tensor) -> None:
        self._rows[table].copy_(rows)

    def add_hash(self, keys: list[Tensor]) -> None:
        """Sets the keys of the rows, table by table."""
        self.maps = [RoofMap(one) for one in keys]
        self._map_pointers = (ctypes.c_void_p * TABLES)(*(one._handle for one in self.maps))

    def forward(self, batch: Batch) -> Tensor:
        return self._forward(None, batch.ids)

    def forward_hashed(self, batch: Batch) -> Tensor:
        return self._forward(self._map_pointers, batch.keys)

    def _forward(self, maps: object, names: Tensor) -> Tensor:
        status = library().roof_bags(
            maps, self._row_pointers, TABLES, len(self._out), BAG, self.dim, names.data_ptr(), self._out.data_ptr(),
            THREADS,
        )  # fmt: skip
        if status:
            raise ValueError(f"benchmarks.roof: dim must be 32, 64 or 128; got {self.dim}")
        return self._out
