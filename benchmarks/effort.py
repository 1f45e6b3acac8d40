"""How long a run measures: every number of rounds, seconds, rows and bytes that is smaller in a shorter run."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class MemorySizes:
    """Numbers of the cases that measure resident memory, each in a process of its own."""

    rows: tuple[int, ...] = (125_000, 300_000, 1_000_000, 2_000_000)
    judged_from: int = 100_000  # rows; jumps below it are left out, because fixed costs decide there
    erase_rows: int = 4_000_000
    spilled_rows: int = 2_000_000
    spilled_steps: int = 400


@dataclass(frozen=True)
class DiskSizes:
    """Numbers of the cases that read and write files, and of the fio jobs that they are compared with."""

    file_bytes: int = 1 << 30
    turn_seconds: float = 2.0
    read_rows: int = 20_000  # of a call
    write_rows: int = 65_536
    rocks_rows: int = 1_000_000  # 256 MiB: it takes rows one by one
    overwritten_bytes: int = 256 << 20  # of the store that is full
    overwrites: int = 60  # calls of 8192 rows


@dataclass(frozen=True)
class SpillSizes:
    """Numbers of training with rows in memory and on a disk; rows and batches are those of the cpu suite."""

    warm_turns: int = 3
    turn_steps: int = 12


@dataclass(frozen=True)
class LogSizes:
    """Numbers of saves, commits and loads, and of training while they run."""

    rows: int = 10_000_000
    commits: int = 100
    batches: int = 64
    bags: int = 4096
    turns: int = 60  # with a commit between two
    alone_steps: int = 40


@dataclass(frozen=True)
class Effort:
    """Numbers of turns. A turn is long enough for /proc/stat, which counts in hundredths of a second."""

    rounds: int = 9
    turn_seconds: float = 0.3
    live_rows: int = 1_000_000
    bags: int = 1024  # of a table in a batch
    batches: int = 16  # rotated, so that no contender finds its batch in the caches: 16 x 42 MB at dim 64
    ragged_bags: int = 4096  # at most, if a case says how many
    ragged_batches: int = 6
    find_keys: int = 10_000_000
    growth_rows: tuple[int, int] = (10_000_000, 100_000_000)
    memory: MemorySizes = field(default_factory=MemorySizes)
    disk: DiskSizes = field(default_factory=DiskSizes)
    spill: SpillSizes = field(default_factory=SpillSizes)
    log: LogSizes = field(default_factory=LogSizes)


# The numbers that benchmarks/results was measured with.
FULL = Effort()

# Some seconds a case: to see that it runs, with tables that do not fit a core's caches.
QUICK = Effort(
    rounds=3,
    turn_seconds=0.1,
    live_rows=50_000,
    batches=4,
    ragged_batches=3,
    find_keys=500_000,
    growth_rows=(200_000, 2_000_000),
    memory=MemorySizes(
        rows=(25_000, 50_000, 100_000, 200_000),
        judged_from=20_000,
        erase_rows=400_000,
        spilled_rows=100_000,
        spilled_steps=100,
    ),
    disk=DiskSizes(
        file_bytes=64 << 20,
        turn_seconds=0.5,
        rocks_rows=50_000,
        overwritten_bytes=32 << 20,
        overwrites=20,
    ),
    log=LogSizes(rows=100_000, commits=20, turns=10, alone_steps=10),
)

# A fraction of a second a case: the tests run them all.
TINY = Effort(
    rounds=2,
    turn_seconds=0.001,
    live_rows=2_000,
    bags=32,
    batches=2,
    ragged_bags=16,
    ragged_batches=2,
    find_keys=2_000,
    growth_rows=(1_000, 10_000),
    memory=MemorySizes(
        rows=(5_000, 10_000, 20_000, 40_000),
        judged_from=10_000,
        erase_rows=40_000,
        spilled_rows=20_000,
        spilled_steps=4,
    ),
    disk=DiskSizes(
        file_bytes=8 << 20,
        turn_seconds=0.02,
        read_rows=200,
        write_rows=4_096,
        rocks_rows=2_000,
        overwritten_bytes=4 << 20,
        overwrites=2,
    ),
    spill=SpillSizes(warm_turns=1, turn_steps=2),
    log=LogSizes(rows=20_000, commits=2, batches=2, bags=32, turns=2, alone_steps=2),
)
