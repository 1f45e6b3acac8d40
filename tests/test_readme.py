"""What the README and the docs say is so: the example runs, links and paths exist, numbers come from the CSV."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import shoal
from benchmarks import readme
from benchmarks.measure import OURS
from benchmarks.record import Row, read
from shoal.cli.app import app
from shoal.config import Optimizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    return block


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert found, f"README.md has no section {title!r}"
    return found[1]


def test_the_example_runs_as_pasted(capsys):
    ran: dict[str, object] = {"__name__": "__main__"}
    exec(compile(example(), "README.md", "exec"), ran)
    assert isinstance(ran["loss"], torch.Tensor)
    assert ran["loss"] < 0.5
    assert "3 items" in capsys.readouterr().out


def test_the_example_is_the_quickstart():
    source = (ROOT / "examples" / "quickstart.py").read_text()
    docstring = ast.parse(source).body[0]
    code = "".join(source.splitlines(keepends=True)[docstring.end_lineno :])
    assert example() == code.lstrip("\n")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/api.md",
        "docs/design.md",
        "docs/formats.md",
        "docs/from-torchrec.md",
        "docs/guarantees.md",
        "docs/log.md",
        "docs/training.md",
        "docs/tuning.md",
    ],
)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        if not link.startswith(("http://", "https://")):
            assert ((ROOT / page).parent / link.strip()).exists(), f"{page}: {link}"


@pytest.mark.parametrize("page", ["docs/from-torchrec.md", "docs/training.md"])
def test_links_within_a_page_lead_to_headings(page):
    text = (ROOT / page).read_text()
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors


def test_the_version_of_torchrec_is_the_one_that_is_tested():
    tested = re.search(r"^torchrec==(\d+\.\d+)", (ROOT / "scripts" / "torchrec.txt").read_text(), re.MULTILINE)
    for page in ("README.md", "docs/from-torchrec.md"):
        assert set(re.findall(r"TorchRec (\d+\.\d+)", (ROOT / page).read_text())) == {tested[1]}, page


def test_the_examples_of_the_log_run_as_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran: dict[str, object] = {"__name__": "__main__"}
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "log.md").read_text(), re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "sh"}
    for language, block in blocks:
        if language == "python":
            exec(compile(block, "docs/log.md", "exec"), ran)
            continue
        for line in block.splitlines():
            command, *arguments = shlex.split(line)
            assert command == "shoal"
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, (line, result.output)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/design.md", "docs/formats.md", "docs/from-torchrec.md", "docs/log.md"]
)
def test_paths_exist(page):
    for path in re.findall(
        r"`((?:src|csrc|tests|docs|scripts|examples|benchmarks|shoal)/[\w./]+)`", (ROOT / page).read_text()
    ):
        base = ROOT / "src" if path.startswith("shoal/") else ROOT
        assert (base / path).exists(), f"{page}: {path}"


def test_the_map_names_every_folder():
    named = set(re.findall(r"`([\w./]+)`", section("Map")))
    package = {
        f"src/shoal/{path.name}" for path in (ROOT / "src" / "shoal").iterdir() if (path / "__init__.py").exists()
    }
    native = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert package | native <= named


def test_the_map_links_every_page_of_the_docs():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", section("Map")))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


def test_the_matrix_has_every_optimizer_and_nothing_else():
    public = {name: getattr(shoal, name) for name in shoal.__all__}
    optimizers = {name for name, one in public.items() if isinstance(one, type) and issubclass(one, Optimizer)}
    table = re.search(r"\| optimizer \|.*?\n\n", section("What works with what"), re.DOTALL)
    assert table
    assert set(re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE)) == optimizers


@pytest.mark.parametrize("suite", readme.SUITES)
def test_numbers_are_those_of_the_csv(suite):
    rows = read(readme.csv_of(suite)) if readme.csv_of(suite).exists() else []
    assert readme.is_current(TEXT, suite, rows), "README.md: run `python -m benchmarks.readme`"


def measured(case: str, contender: str, p50: float, when: str, **others: object) -> Row:
    row = {"unit": "ms", "p20": p50 - 1, "p80": p50 + 1, "ratio": None, "limit": None, "verdict": "", "rounds": 9}
    return Row(
        when=when,
        commit="abc",
        machine="m, 2 cores",
        case=case,
        contender=contender,
        p50=p50,
        disturbed=0,
        **row | others,
    )


RUNS = [
    measured("train sgd, dim 64, zipf", OURS, 9.0, "2026-01-01T00:00:00+00:00"),
    measured("train sgd, dim 64, zipf", "fbgemm", 15.0, "2026-01-01T00:00:00+00:00", ratio=0.6),
    measured("train sgd, dim 64, zipf", OURS, 6.0, "2026-01-02T00:00:00+00:00"),
    measured("train sgd, dim 64, zipf", "fbgemm", 15.0, "2026-01-02T00:00:00+00:00", ratio=0.4),
    measured("train sgd, dim 32, zipf", OURS, 3.0, "2026-01-02T00:00:00+00:00"),
    measured("cost growth of find, dim 8", OURS, 150.0, "2026-01-02T00:00:00+00:00", unit="ns/key", rounds=1),
]


def test_numbers_are_of_the_newest_run_and_the_shown_dims():
    block = readme.render("cpu", RUNS)
    assert "| train sgd, dim 64, zipf | 6 (5 to 7) ms | fbgemm 15 (0.40) |" in block
    assert "a line takes" not in block
    assert "| cost growth of find, dim 8 | 150 ns/key |  |" in block
    assert "dim 32" not in block
    assert "2026-01-02" in block
    assert readme.render("cpu", []) == readme.NONE


def test_a_row_says_what_a_line_takes_between_the_cores_where_that_was_measured():
    when = "2026-01-03T00:00:00+00:00"
    block = readme.render("cpu", [*RUNS, measured("eval", OURS, 2.0, when, transfer_ns=171.6)])
    assert "| | Shoal (p20 to p80) | others (Shoal / other) | a line takes |\n|---|---|---|---|\n" in block
    assert "| eval | 2 (1 to 3) ms |  | 172 ns |" in block
    assert "| cost growth of find, dim 8 | 150 ns/key |  |  |" in block


def test_rows_measured_since_do_not_make_the_numbers_wrong():
    def page(rows):
        return f"a\n<!-- numbers of cpu -->\n{readme.render('cpu', rows)}<!-- /numbers -->\nb\n"

    def is_current(text, rows):
        return readme.is_current(text, "cpu", rows)

    assert is_current(page(RUNS), RUNS)
    assert is_current(page(RUNS[:2]), RUNS)
    assert not is_current(page(RUNS).replace("6 (5 to 7)", "2 (1 to 3)"), RUNS)
    assert not is_current(page([]), RUNS)
    assert is_current(page([]), [])
    assert not is_current("no markers", [])
    assert not readme.is_current(page(RUNS), "log", RUNS)
