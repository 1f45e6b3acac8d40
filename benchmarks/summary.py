"""The six numbers of the README: which cases they are, and which contenders stand next to ours."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.measure import OURS
from benchmarks.record import Row, digits, newest


@dataclass(frozen=True)
class Number:
    """One case of a suite."""

    title: str
    suite: str
    case: str
    others: Mapping[str, str]
    """The contenders that are shown: their names in the CSV, and what a reader calls them."""


NUMBERS = (
    Number(
        "Training step on a CPU, 40 tables",
        "cpu",
        "real step, rowwise_adagrad, batch 512, zipf 1.2",
        {"fbgemm": "FBGEMM", "fbgemm x 2": "FBGEMM, a module for each core", "torch": "torch.nn.EmbeddingBag"},
    ),
    Number(
        "Lookup on a CPU, 40 tables",
        "cpu",
        "real eval, batch 512, zipf 1.2",
        {"fbgemm": "FBGEMM", "fbgemm x 2": "FBGEMM, a module for each core", "torch": "torch.nn.EmbeddingBag"},
    ),
    Number(
        "Training step on a GPU, Adam",
        "gpu",
        "A train adam",
        {
            "shoal module": "Shoal with its collection",
            "fbgemm": "FBGEMM",
            "fbgemm unchecked": "FBGEMM without bounds check",
        },
    ),
    Number(
        "Training step, three quarters of the rows on disk",
        "tiers",
        "train, memory for a quarter of the rows, zipf 1.05, prefetch",
        {"misses by fio": "the disk's reads alone, by fio", "all in memory": "all rows in memory"},
    ),
    Number(
        "Memory after an erase of 75 % of four million rows",
        "cpu",
        "memory after erase of 75 % of the rows, dim 64",
        {"alive": "the rows that are left need", "before the erase": "before the erase"},
    ),
    Number(
        "Commit of 1 % of ten million rows",
        "log",
        "commit of 1 % of the rows, dim 64",
        {"write + fsync": "write and fsync of as many bytes"},
    ),
)
SUITES = tuple(dict.fromkeys(number.suite for number in NUMBERS))


@dataclass(frozen=True)
class Measured:
    """A number with its newest run."""

    number: Number
    ours: Row
    others: Sequence[Row]

    @property
    def names(self) -> list[str]:
        """The names of all contenders, ours first."""
        return ["Shoal", *(self.number.others[row.contender] for row in self.others)]


def measured(rows: Mapping[str, Iterable[Row]]) -> list[Measured]:
    """Returns the six numbers from each suite's rows. Leaves out those that no run has."""
    found = []
    for number in NUMBERS:
        of_case = {row.contender: row for row in newest(rows[number.suite]) if row.case == number.case}
        if OURS in of_case:
            others = [of_case[name] for name in number.others if name in of_case]
            found.append(Measured(number, of_case[OURS], others))
    return found


def table(numbers: Sequence[Measured]) -> str:
    """Returns the numbers as a table, with the time of the newest run in its first line."""
    lines = ["| | Shoal | others |", "|---|---|---|"]
    for one in numbers:
        _, *names = one.names
        others = [f"{name} {digits(row.p50)}" for name, row in zip(names, one.others, strict=True)]
        lines.append(f"| {one.number.title} | {digits(one.ours.p50)} {one.ours.unit} | {'; '.join(others)} |")
    return "\n".join([f"<!-- up to {max(one.ours.when for one in numbers)} -->", *lines, ""])
