"""
Shoal's native core: pointers in, pointers out. Internal; use the shoal package.
"""

from collections.abc import Callable, Sequence
import enum
import os
from typing import Annotated, overload

import torch
from typing_extensions import Buffer


def isas() -> list[str]:
    """Instruction sets this build and machine have, lowest first"""

def isa() -> str:
    """The instruction set in use"""

def set_isa(name: str) -> bool:
    """Use another one; false if it is not there"""

def name_hash(name: str) -> int: ...

def birth_stream(seed: int, name_hash: int) -> int: ...

def rounding_stream(seed: int, name_hash: int) -> int: ...

def mapped_rows(n: int, bytes: int) -> Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None))]:
    """
    Memory for packed rows, which goes back to the system as soon as nothing refers to it
    """

def buffer(bytes: int) -> Annotated[memoryview, dict(dtype='uint8', shape=(None,))]:
    """Memory that holds anything, and is used again for others later"""

def buckets(keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], buckets: int, out: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')]) -> None: ...

def normal_table() -> Annotated[torch.Tensor, dict(dtype='float32', shape=(None,))]:
    """The knots of the inverse normal CDF"""

class Dtype(enum.Enum):
    float32 = 0

    float16 = 1

    bfloat16 = 2

class Rows:
    """Where a table's rows lie; belongs to its store"""

def output(rows: int, columns: int, dtype: Dtype) -> object: ...

class Guard:
    """A lock for `with`, which no interrupt leaves held"""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object | None, error: object | None, trace: object | None) -> None: ...

class Held:
    """
    A Guard and what its owner does around it: `begin`, `entered`, `settle`, `leave(error)`
    """

    def __init__(self, guard: Guard, owner: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object | None, error: object | None, trace: object | None) -> None: ...

class RwLock:
    """Shared/exclusive lock that prefers writers"""

    def __init__(self) -> None: ...

    def shared(self) -> Guard:
        """Takes the shared lock: other threads may hold it too"""

    def exclusive(self) -> Guard: ...

class EndedNumbers:
    """Numbers whose tensors went"""

    def __init__(self) -> None: ...

    def hold(self, number: int, others: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """
        A tensor of one number; its memory keeps other tensors for as long as it lives
        """

    @property
    def any(self) -> bool: ...

    def take(self, into: list[int]) -> None:
        """
        Append those since the last call, all in one call that no interrupt divides
        """

class FileOwner(enum.Enum):
    """Whose file it is: errors say what to do about it"""

    ssd = 0

    log = 1

class FilePath:
    """
    What the user named, in which links lead on, and what is below it, in which none does
    """

    @overload
    def __init__(self, path: FilePath) -> None: ...

    @overload
    def __init__(self, root: str | os.PathLike[str]) -> None: ...

    @property
    def root(self) -> str: ...

    @property
    def below(self) -> str:
        """Names with slashes between them"""

    @property
    def name(self) -> str: ...

    @property
    def parent(self) -> FilePath: ...

    def absolute(self) -> FilePath:
        """The same when the process changes its folder"""

    def with_name(self, name: str | os.PathLike[str]) -> FilePath: ...

    def __truediv__(self, name: str | os.PathLike[str]) -> FilePath:
        """
        The path of that name, or of several with slashes between them, below this one
        """

    def __str__(self) -> str: ...

    def __fspath__(self) -> str: ...

    def __repr__(self) -> str: ...

    def __hash__(self) -> int: ...

    def __eq__(self, other: object, /) -> bool: ...

class FileKind(enum.Enum):
    """Other: a pipe, a socket or a device"""

    file = 0

    folder = 1

    link = 2

    other = 3

class FileEntry:
    @property
    def kind(self) -> FileKind: ...

    @property
    def owner(self) -> int:
        """The user's number"""

    @property
    def disk_bytes(self) -> int:
        """That it has there: holes have none"""

class File:
    """Reads and writes at offsets, through the page cache"""

    @staticmethod
    def open_to_read(path: FilePath, owner: FileOwner = FileOwner.log) -> File: ...

    @staticmethod
    def open_to_write(path: FilePath, owner: FileOwner = FileOwner.log) -> File:
        """As it is, made if there is none"""

    @staticmethod
    def create_new(path: FilePath, owner: FileOwner = FileOwner.log) -> File:
        """An error if there is one"""

    @property
    def path(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it"""

    def read(self, offset: int, out: Buffer | torch.Tensor) -> None:
        """All of the bytes, or an error"""

    def write(self, offset: int, data: Buffer | torch.Tensor) -> None: ...

    def size(self) -> int: ...

    def next_data(self, offset: int) -> int:
        """
        The first place from there on that is no hole; the file's end where there is none
        """

    def truncate(self, bytes: int) -> None: ...

    def sync(self) -> None:
        """What was written is on the disk"""

    def close(self) -> None:
        """No other call may run at the same time"""

    def __enter__(self) -> File: ...

    def __exit__(self, *args: object) -> None: ...

class FileLock:
    """Held by one process until it is released or the process ends"""

    @staticmethod
    def take(path: FilePath, word: str, owner: FileOwner = FileOwner.log, wait: bool = False) -> FileLock: ...

    @property
    def path(self) -> str: ...

    @property
    def is_held(self) -> bool:
        """False in a forked child"""

    @property
    def is_in_place(self) -> bool:
        """Held, and its path still leads to it"""

    def release(self) -> None: ...

    def __enter__(self) -> FileLock: ...

    def __exit__(self, *args: object) -> None: ...

class FileWriter:
    """Writes a large new file in the background, from beginning to end"""

    @staticmethod
    def create(path: FilePath, direct: bool = True, owner: FileOwner = FileOwner.log) -> FileWriter: ...

    @property
    def path(self) -> str: ...

    @property
    def direct(self) -> bool: ...

    @property
    def position(self) -> int:
        """Bytes that were appended"""

    def append(self, data: Buffer | torch.Tensor) -> None: ...

    def append_checked(self, data: Buffer | torch.Tensor, seed: int = 0) -> int:
        """And the CRC-32C of the bytes, going on from `seed`"""

    def finish(self) -> None:
        """All of it is on the disk"""

    def abandon(self) -> None:
        """The file stays as it is"""

    def __enter__(self) -> FileWriter: ...

    def __exit__(self, *args: object) -> None: ...

class FileReader:
    """Reads a file, ahead where reads ascend"""

    @staticmethod
    def open(path: FilePath, direct: bool = True, owner: FileOwner = FileOwner.log) -> FileReader: ...

    @property
    def path(self) -> str: ...

    @property
    def direct(self) -> bool: ...

    def size(self) -> int: ...

    def read(self, offset: int, out: Buffer | torch.Tensor) -> None:
        """All of the bytes, or an error"""

    def read_checked(self, offset: int, out: Buffer | torch.Tensor) -> int:
        """The same, and their checksum"""

    def bytes_from_ahead(self) -> int: ...

    def close(self) -> None: ...

    def __enter__(self) -> FileReader: ...

    def __exit__(self, *args: object) -> None: ...

def remove_file(path: FilePath, owner: FileOwner = FileOwner.log) -> None:
    """No error where there is none"""

def remove_directory(path: FilePath, owner: FileOwner = FileOwner.log) -> None:
    """One that is empty; no error where there is none"""

def rename_file(path: FilePath, to: FilePath, owner: FileOwner = FileOwner.log) -> None:
    """In place of what is called `to`"""

def link_file(path: FilePath, to: FilePath, owner: FileOwner = FileOwner.log) -> bool:
    """One more name for a file. False where the file system gives it none"""

def sync_directory(path: FilePath, owner: FileOwner = FileOwner.log) -> None:
    """Names that were given and taken in it are on the disk"""

def make_directories(path: FilePath, owner: FileOwner = FileOwner.log) -> None:
    """With those above it, and on the disk"""

def list_directory(path: FilePath, owner: FileOwner = FileOwner.log) -> list[str]: ...

def file_size(path: FilePath, owner: FileOwner = FileOwner.log) -> int | None:
    """None where there is no file"""

def look_at(path: FilePath, owner: FileOwner = FileOwner.log) -> FileEntry | None:
    """What its name stands for; None where there is none"""

def crc32c(data: Buffer | torch.Tensor, seed: int = 0) -> int:
    """Going on from the CRC-32C of what came before"""

class FileCall(enum.Enum):
    open = 0

    read = 1

    write = 2

    sync = 3

    remove = 4

    rename = 5

    link = 6

    truncate = 7

    sync_directory = 8

    list = 9

    make_directory = 10

    size = 11

def inject_fault(call: FileCall, path_part: str, error: int, after: int = 0, times: int = 1) -> None:
    """
    For tests: calls of that kind on files with that in their path answer with an errno
    """

def clear_faults() -> None: ...

def record_power_cut(path_part: str) -> None:
    """
    For tests: from now on, changes to files with that in their path remember what they replaced until they are durable
    """

def cut_power(seed: int) -> None:
    """
    Takes a random part of what is not durable back, and ends the recording
    """

def forget_power_cut() -> None:
    """Ends the recording; all stays as it is"""

class SsdStats:
    @property
    def rows(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def index_bytes(self) -> int: ...

    @property
    def reads(self) -> int: ...

    @property
    def read_bytes(self) -> int: ...

    @property
    def read_calls(self) -> int: ...

    @property
    def read_nanoseconds(self) -> int: ...

    @property
    def written_rows(self) -> int: ...

    @property
    def written_bytes(self) -> int: ...

    @property
    def write_nanoseconds(self) -> int: ...

    @property
    def collected_rows(self) -> int: ...

    @property
    def collected_bytes(self) -> int: ...

    @property
    def damaged(self) -> int: ...

class SsdStore:
    """Rows on disk, by key"""

    @staticmethod
    def open(directory: FilePath, row_bytes: int, max_bytes: int, direct: bool, io: str, depth: int) -> SsdStore: ...

    @property
    def capacity(self) -> int: ...

    @property
    def rows(self) -> int: ...

    def write(self, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

    def read(self, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], rows: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu')], found: Annotated[torch.Tensor, dict(dtype='bool_', shape=(None,), order='C', device='cpu')]) -> None: ...

    def contains(self, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], found: Annotated[torch.Tensor, dict(dtype='bool_', shape=(None,), order='C', device='cpu')]) -> None: ...

    def erase(self, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]) -> int: ...

    def keys(self) -> Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))]: ...

    def clear(self) -> None: ...

    def stats(self) -> SsdStats: ...

def read_together(reads: Sequence[tuple[SsdStore, int, int, int, int]]) -> list[int | Exception]:
    """
    Read from several stores at a time, each as (store, address of keys, how many, address of rows, address of found); how many each has, or the exception of one that failed
    """

class DramStore:
    """Rows in host memory"""

    def __init__(self, dim: int, dtype: Dtype, state_floats: int, first_facts: bytes = ...) -> None:
        """
        first_facts: the first values of what rows have besides state and score
        """

    @property
    def rows(self) -> Rows: ...

    @property
    def live(self) -> int:
        """Slots that are taken"""

    @property
    def bytes(self) -> int: ...

    def bytes_after(self, more: int) -> int: ...

    def reserve(self, more: int) -> None: ...

    def take(self, out: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None: ...

    def give(self, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None: ...

    def keep_keys(self) -> None:
        """Know whose each slot is from here on"""

    def forget_keys(self) -> None: ...

    def name(self, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """Say whose the slots are, if that is kept"""

    @property
    def sparse(self) -> bool: ...

    @property
    def compact_from(self) -> int: ...

    def release_tail(self) -> None: ...

class MissingKeys:
    """The keys of a batch that have no slot in their table, each once"""

    @property
    def counts(self) -> list[int]: ...

    def keys(self, table: int) -> Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))]:
        """A view of one table's keys"""

    def without(self, others: Sequence[Sequence[tuple[int, int]]]) -> tuple[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))], list[int]]:
        """
        Keys of all tables, those of each in ascending order, without those at `others`: by table, the (address, count) of keys in order. And how many each table has left
        """

    def count_after(self, table: int, parts: int) -> int:
        """How many of them are in the first so many of the table's parts"""

    def positions(self, table: int, of: Annotated[torch.Tensor, dict(dtype='bool_', shape=(None,), order='C', device='cpu', writable=False)]) -> int:
        """How many positions hold those of one table's keys that `of` has"""

class Index:
    """key -> slot for one table"""

    def __init__(self) -> None: ...

    def __len__(self) -> int: ...

    @property
    def bytes(self) -> int: ...

    @property
    def extent(self) -> int: ...

    def bytes_after(self, more: int) -> int: ...

    def reserve(self, more: int) -> None: ...

    def shrink(self, budget: int) -> bool: ...

    def entries(self, from_bucket: int, to_bucket: int, from_slot: int = 0) -> tuple[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))], Annotated[torch.Tensor, dict(dtype='int32', shape=(None,))]]:
        """
        (keys, slots) of a range of buckets, without the slots below `from_slot`
        """

def find(index: Index, keys: Annotated[torch.Tensor, dict(shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], threads: int) -> int:
    """slots[i] of key i, or -1; how many have one"""

def keys_without(keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], others: Sequence[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]]) -> Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))]:
    """Keys in ascending order, without those of others, which are in order"""

class InitKind(enum.Enum):
    zeros = 0

    constant = 1

    uniform = 2

    normal = 3

class Init:
    """How rows are born"""

    def __init__(self, kind: InitKind, a: float = 0.0, b: float = 0.0, stream: int = 0) -> None: ...

class Pooling(enum.Enum):
    none = 0

    sum = 1

    mean = 2

class Optimizer(enum.Enum):
    sgd = 0

    momentum = 1

    adagrad = 2

    rowwise_adagrad = 3

    adam = 4

    partial_rowwise_adam = 5

    ftrl = 6

    assign = 7

class Reduce(enum.Enum):
    sum = 0

    mean = 1

    first = 2

    last = 3

class ChangedRows:
    """The rows that changed since they were taken last, by key or by slot"""

    def __init__(self) -> None: ...

    def add(self, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def take_keys(self) -> Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))]: ...

    def take_slots(self) -> Annotated[torch.Tensor, dict(dtype='int32', shape=(None,))]: ...

class Backwards:
    """
    What a table remembers of its backwards; it changes with the rows, in one call
    """

    def __init__(self) -> None: ...

    @property
    def step(self) -> int: ...

    @step.setter
    def step(self, arg: int, /) -> None: ...

    @property
    def applied(self) -> int: ...

    @property
    def dropped(self) -> int:
        """Gradients of erased rows"""

    @dropped.setter
    def dropped(self, arg: int, /) -> None: ...

    @property
    def skipped(self) -> int:
        """Rows whose gradients overflowed"""

class UpdateTable:
    """One table's part of a backward pass"""

    def __init__(self, rows: Rows, rounding_stream: int, backwards: Backwards) -> None: ...

    def set(self, optimizer: Optimizer, reduce: Reduce, lr: float, settings: Sequence[float], weight_decay: float, shrink: float, clip_value: float, clip_norm: float, max_norm: float) -> None: ...

    def begin(self, score: float, clock: int, grad_scale: float, changed: ChangedRows | None) -> None:
        """
        What the next backward has of its own, and where it lists the rows that change
        """

    def count_pieces(self, pieces: Backwards | None) -> None:
        """What pieces of the next backward left out before it is counted with it"""

class UpdateFeature:
    """The gradient of one feature's output"""

    def __init__(self, table: int, source: int, slot_list: int, pooling: Pooling, column: int) -> None: ...

def update(tables: Sequence[UpdateTable], features: Sequence[UpdateFeature], grads: Sequence[tuple[int, int]], bags: Bags, threads: int) -> list[tuple[int, int]]:
    """
    The optimizers' steps; gradients come as (address, stride). Rows, the tables' steps and that the batch's backward is applied change in this one call. Returns (number, rows whose sum overflowed) of the tables where there were any
    """

def weight_gradients(rows: Sequence[Rows], features: Sequence[UpdateFeature], grads: Sequence[tuple[int, int]], missing: Sequence[Init], bags: Bags, out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None,), order='C', device='cpu')], threads: int) -> None: ...

def all_finite(address: int, rows: int, columns: int, stride: int, threads: int) -> bool: ...

def birth(rows: Rows, init: Init, state: Annotated[torch.Tensor, dict(dtype='float32', shape=(None,), order='C', device='cpu', writable=False)], score: float, clock: int, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], threads: int) -> None: ...

def read_weights(rows: Rows, missing: Init, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], out: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu')], threads: int) -> None: ...

def write_weights(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], values: Annotated[torch.Tensor, dict(dtype='float32', shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

def read_column(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], from_byte: int, missing: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu')]) -> None:
    """A column of the tails, as bytes; without a slot it reads `missing`"""

def write_column(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], from_byte: int, values: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu', writable=False)]) -> None: ...

def pack(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], out: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu')], threads: int) -> None: ...

def unpack(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], values: Annotated[torch.Tensor, dict(dtype='uint8', shape=(None, None), order='C', device='cpu', writable=False)], clock: int, threads: int) -> None:
    """Whole rows to slots, where they are clean"""

def order_by_bucket(keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], buckets: int, out: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')]) -> None:
    """Where the keys are that come by bucket"""

def repeated_key(pieces: Sequence[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]]) -> int | None:
    """
    A key that comes more than once in these tensors; None where each comes once
    """

def all_finite16(floats: Annotated[torch.Tensor, dict(dtype='int16', shape=(None,), order='C', device='cpu', writable=False)], exponent: int) -> bool:
    """
    Whether none of these 16-bit floats, given as their bits, is NaN or infinity; `exponent`: its bits in one
    """

def look_by_bucket(keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], buckets: int, first: int, last: int) -> tuple[int, int | None, int, int]:
    """
    Of keys in the order of their buckets, which are in [first, last]: the position of one that is not, or -1; one that is repeated, or None; how many have the bucket of the first; where those begin that have that of the last
    """

def hash_strings(data: int, bytes: int, offsets: int, are_wide: bool, out: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')], threads: int) -> int:
    """
    Ids of strings, by addresses of n + 1 offsets and of bytes; the first with wrong offsets, or -1
    """

def hash_padded(data: int, width: int, out: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')], threads: int) -> None:
    """
    Ids of strings of so many bytes each, with NULs at their end that do not count
    """

def hash_utf32(data: int, width: int, out: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu')], threads: int) -> int:
    """
    Ids of strings of so many code points each, by their UTF-8; the first that has none, or -1
    """

def export_rows(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], weights: int, tail: Sequence[tuple[int, int, int]], threads: int) -> None:
    """
    Whole rows to columns; those of the tail as (address, first byte in the tail, bytes)
    """

def import_rows(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], weights: int, tail: Sequence[tuple[int, int, int]], first_state: Annotated[torch.Tensor, dict(dtype='float32', shape=(None,), order='C', device='cpu', writable=False)], score: float, clock: int, changed: bool, threads: int) -> None:
    """Columns to whole rows; columns that are not given are as at birth"""

def set_dirty(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], dirty: bool) -> None: ...

def is_dirty(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], out: Annotated[torch.Tensor, dict(dtype='bool_', shape=(None,), order='C', device='cpu')]) -> None: ...

def stamp(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], clock: int) -> None: ...

def is_changed(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')], out: Annotated[torch.Tensor, dict(dtype='bool_', shape=(None,), order='C', device='cpu')]) -> None: ...

def changed_keys(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))]:
    """The keys of those rows that are flagged changed; keys must be kept"""

def clear_changed(rows: Rows, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None: ...

class Pins:
    """Slots of one table's rows that must stay"""

    def __init__(self, rows: Rows) -> None: ...

    def add(self, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None: ...

    def has(self, slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> Annotated[torch.Tensor, dict(dtype='bool', shape=(None,))]:
        """Whether each is pinned"""

    @property
    def count(self) -> int: ...

class Victims:
    """Which rows leave memory when others need their place"""

    def __init__(self) -> None: ...

    def choose(self, index: Index, rows: Rows, clock: int, pins: Pins, n: int) -> tuple[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,))], Annotated[torch.Tensor, dict(dtype='int32', shape=(None,))], int]:
        """
        (keys, slots, how many of the first are dirty) of up to n rows that are not pinned
        """

def begin_tracking(index: Index, rows: Rows, threads: int) -> None:
    """Write every row's key to its slot, and say that the row did not change"""

def arrive(tables: Sequence[tuple[Index, DramStore]], keys: Sequence[Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]], slots: Sequence[Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]], threads: int) -> None:
    """
    Give the absent keys of all tables, each as (index, store), their slots, or none; the stores have room
    """

def leave(index: Index, store: DramStore, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Take keys out and free their slots, where they are there; takes no memory
    """

def relocate(index: Index, store: DramStore, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], slots: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None:
    """Move the rows of keys from their slots to the lowest free ones"""

class Limbo:
    """Slots of erased rows that leases may hold"""

    def __init__(self) -> None: ...

    @property
    def any(self) -> bool: ...

    def erase(self, index: Index, store: DramStore, keys: Annotated[torch.Tensor, dict(dtype='int64', shape=(None,), order='C', device='cpu', writable=False)], lease: int) -> None:
        """
        Take keys out; their rows are flagged erased, and their slots wait for that lease and those before it
        """

    def free(self, store: DramStore, oldest: int | None) -> None:
        """
        Free the slots that no lease can hold any more; `oldest`: of those alive
        """

def place(tables: Sequence[tuple[Index, DramStore, int, int, int, int, int]], indexes: RwLock, missing: MissingKeys, bags: Bags, threads: int) -> list[int]:
    """
    Put rows that were read ahead in memory, where they are not there yet, and say to their batch where; how many came of each table, or -1 where memory was refused
    """

class Tally:
    """
    Keys looked up, those that had a row in memory, and those that had one below
    """

    def __init__(self) -> None: ...

    @property
    def lookups(self) -> int: ...

    @property
    def hits(self) -> int: ...

    @property
    def fetched(self) -> int: ...

    def add(self, lookups: int = 0, hits: int = 0, fetched: int = 0) -> None: ...

class Bags:
    """
    A batch of bags of keys, and their slots. Tensors come as (address, count, whether int32), and the caller keeps them
    """

    def __init__(self, keys: tuple[int, int, bool], offsets: tuple[int, int, bool], weights: int, features: int, slot_lists: int) -> None: ...

    def bind_again(self, keys: tuple[int, int, bool], offsets: tuple[int, int, bool], weights: int) -> None: ...

    def begin_ahead(self) -> None:
        """
        Before slots are found ahead of the lookup: keep the offsets as they are now, and know no slot
        """

    def has_bags_of(self, keys: tuple[int, int, bool], offsets: tuple[int, int, bool]) -> bool:
        """Whether these are as many keys, in bags as they were when it was found"""

    @property
    def bounds(self) -> list[int]:
        """Where each feature's keys begin, and the end"""

    @property
    def applied(self) -> bool:
        """Whether the batch's backward is done"""

    @applied.setter
    def applied(self, arg: bool, /) -> None: ...

    def missing(self, tables: Sequence[Sequence[tuple[int, int]]], threads: int) -> MissingKeys:
        """
        For every table, given as the (source, slot list) of its parts, the keys without a slot
        """

    def fill(self, missing: MissingKeys, table: int, slots_of_keys: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu')]) -> None:
        """Give every position of a table the slot that its key got"""

    def finish(self, threads: int) -> None:
        """Pool what waited for births"""

    def touch(self, rows: Rows, source: int, slot_list: int, score: float, changed: ChangedRows | None) -> None:
        """Raise the scores of one part's rows"""

    def stamp(self, rows: Rows, source: int, slot_list: int, clock: int) -> None:
        """Say that one part's rows were used now"""

    def pin(self, pins: Pins, source: int, slot_list: int) -> None:
        """Pin one part's rows"""

class Lookup:
    """The features of a batch, and how each reads its table"""

    def __init__(self) -> None: ...

    def add(self, index: Index, rows: Rows, tally: Tally, source: int, slot_list: int, pooling: Pooling, silent: bool, missing: Init, column: int, trains: bool, fetches: bool) -> None:
        """
        `trains`: in training keys without a row get one; `fetches`: they may have one below
        """

    def find(self, bags: Bags, indexes: RwLock, tables: Sequence[Sequence[int]], threads: int) -> MissingKeys:
        """
        Find slots only; other threads may change indexes meanwhile. Returns, for the tables, each given as the numbers of its parts, the keys without a slot
        """

    def run(self, bags: Bags, out: int, width: int, dtype: Dtype, training: bool, known: bool, threads: int) -> list[int]:
        """
        Slots, unless they are known, then rows to the output at an address; if some rows are to be born first, how many each part lacks
        """

class BatchSizes:
    """What follows from how many keys each feature of a batch has"""

    @property
    def counts(self) -> list[int]: ...

    @property
    def least(self) -> int: ...

    @property
    def keys(self) -> int: ...

    @property
    def elements(self) -> int:
        """Of the output, without pooling"""

    @property
    def births(self) -> Births: ...

class Births:
    """Most new keys of a batch, by table and by family"""

    def of(self, place: int) -> int: ...

class Room:
    """
    How many rows tables can have at most, and whether more fit. Families come after tables
    """

    def __init__(self, family_of: Sequence[int], most_rows: Sequence[int], families: int) -> None: ...

    def births(self, by_table: Sequence[int]) -> Births:
        """So many new keys of each table"""

    def fits(self, births: Births, batches: int = 1) -> bool: ...

    def take(self, births: Births) -> bool:
        """Count a batch, if it surely fits"""

    def add(self, births: Births) -> None: ...

    def most(self, place: int) -> int: ...

    def fit(self, place: int) -> int: ...

    def set_fit(self, place: int, rows: int) -> None: ...

    def recount(self, place: int) -> None: ...

    def set_whole(self, family: int, whole: bool) -> None: ...

    def lower(self, table: int, rows: int) -> None: ...

    def new_rows(self, births: Births, batches: int) -> list[int]: ...

    def sent(self, copy: int, kept: int) -> None: ...

    def heard(self, copy: int, counted: Annotated[torch.Tensor, dict(dtype='int32', shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def remembered(self) -> int: ...

class BatchParts:
    """How features meet tables: (feature, table, dim, whether it trains)"""

    def __init__(self, parts: Sequence[tuple[int, int, int, bool]]) -> None: ...

    def sizes(self, counts: Sequence[int], room: Room) -> BatchSizes: ...

class Program:
    """
    Launches of compiled kernels. An argument is (fixed, number of a variable or -1)
    """

    def __init__(self, as_graph: bool) -> None:
        """as_graph: kept with the driver; its calls come one at a time"""

    def add_kernel(self, function: int, threads: int, shared_bytes: int, grid: tuple[tuple[int, int], tuple[int, int], tuple[int, int]], arguments: Sequence[tuple[int, int]]) -> None: ...

    def add_fill(self, address: tuple[int, int], words: tuple[int, int], word: int) -> None: ...

    def add_copy_to_host(self, to: tuple[int, int], source: tuple[int, int], bytes: tuple[int, int]) -> None: ...

    def add_record(self, event: tuple[int, int]) -> None: ...

    def run(self, stream: int, variables: list[object]) -> None:
        """Numbers, and tensors, which stand for their addresses"""

class CapturedGraph:
    def start(self, stream: int) -> None: ...

class CaptureStream:
    """A stream that nothing but captures is done on"""

    @staticmethod
    def make() -> CaptureStream: ...

    @property
    def handle(self) -> int: ...

    def capture(self, work: Callable[[], object]) -> CapturedGraph:
        """
        The launches of a call as a graph. REQUIRES: this stream is torch's current one
        """
