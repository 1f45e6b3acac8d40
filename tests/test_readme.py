"""The README and the docs are true: the example runs, links and paths exist, numbers come from the CSVs."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import shoal
from benchmarks import plot, readme, summary
from benchmarks.measure import OURS
from benchmarks.record import Row
from shoal.cli.app import app
from shoal.config import Optimizer

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]


def example() -> str:
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    return block


def section(title: str, page: str = "README.md") -> str:
    text = (ROOT / page).read_text()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} has no section {title!r}"
    return found[1]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    found: dict[str, int] = {}  # and how often each came
    for heading in headings:
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[anchor] = found.get(anchor, 0) + 1
    return set(found) | {f"{anchor}-{again}" for anchor, times in found.items() for again in range(1, times)}


def test_the_readme_is_short():
    assert len(TEXT.splitlines()) <= 160


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


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", (ROOT / page).read_text()):
        if link.startswith(("http://", "https://")):
            continue
        target = (ROOT / page).parent / link.strip() if link else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target), f"{page}: {link}#{anchor}"


def test_the_version_of_torchrec_is_the_one_that_is_tested():
    tested = re.search(r"^torchrec==(\d+\.\d+)", (ROOT / "scripts" / "torchrec.txt").read_text(), re.MULTILINE)
    for page in ("docs/compare.md", "docs/from-torchrec.md"):
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


# The folders that a path on a page may begin in.
BASES = [ROOT, ROOT / "src", ROOT / "src" / "shoal", ROOT / "csrc", ROOT / "tests"]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_paths_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:src|csrc|tests|docs|scripts|examples|benchmarks|shoal)/[\w./]+)`", text):
        assert any((base / path).exists() for base in BASES), f"{page}: {path}"
    for path in re.findall(r"`([\w.]+/[\w./]+\.(?:py|h|cc))`", text):
        assert any((base / path).exists() for base in BASES), f"{page}: {path}"


def test_the_map_names_every_folder():
    named = set(re.findall(r"`([\w./]+)`", section("Map")))
    package = {
        f"src/shoal/{path.name}" for path in (ROOT / "src" / "shoal").iterdir() if (path / "__init__.py").exists()
    }
    native = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir() if path.is_dir()}
    assert package | native <= named


def test_the_tree_of_the_design_names_every_file_of_the_tables():
    (tree,) = re.findall(r"```\n(table/ .*?)```", section("16. Layers", "docs/design.md"), re.DOTALL)
    parts = re.split(r"^  (\w+)/", tree, flags=re.MULTILINE)  # what stands before the first folder, folder, files, ...
    named = dict(zip(parts[1::2], parts[2::2], strict=True)) | {"": parts[0]}
    for path in (ROOT / "src" / "shoal" / "table").rglob("[!_]*.py"):
        folder = "" if path.parent.name == "table" else path.parent.name
        assert path.stem in re.findall(r"\w+", named.get(folder, "")), f"docs/design.md, section 16: {path} is missing"


def test_the_readme_links_every_page_of_the_docs():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", section("Documentation")))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


def test_the_matrix_has_every_optimizer_and_nothing_else():
    public = {name: getattr(shoal, name) for name in shoal.__all__}
    optimizers = {name for name, one in public.items() if isinstance(one, type) and issubclass(one, Optimizer)}
    table = re.search(r"\| optimizer \|.*?\n\n", section("What works with what", "docs/limitations.md"), re.DOTALL)
    assert table
    assert set(re.findall(r"^\| `(\w+)`", table[0], re.MULTILINE)) == optimizers


@pytest.mark.parametrize("suite", readme.SUITES)
def test_numbers_are_those_of_the_csv(suite):
    rows = readme.rows_of([suite])[suite]
    page = readme.NUMBERS.read_text()
    assert readme.is_current(page, suite, rows), "docs/numbers.md: run `python -m benchmarks.readme`"


def test_the_six_numbers_are_those_of_the_csvs():
    assert readme.is_summary_current(TEXT, readme.rows_of(readme.SUITES)), "run `python -m benchmarks.readme`"
    block = readme.block_of(readme.SUMMARY).search(TEXT)
    assert block[0].count("\n| ") == 1 + 6


def test_the_picture_shows_the_six_numbers():
    block = readme.block_of(readme.SUMMARY).search(TEXT)
    with Image.open(plot.SUMMARY) as picture:
        assert picture.text[plot.NUMBERS] == block[0], "run `python -m benchmarks.readme`"


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
    for around, told in (((40.0, 44.0), "42 ns"), ((40.2, 170.4), "40, then 170 ns")):
        row = measured("eval", OURS, 2.0, when, transfer_ns=around[0], transfer_after_ns=around[1])
        assert f"| {told} |" in readme.render("cpu", [row])
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


STEP, COMMIT = summary.NUMBERS[0], summary.NUMBERS[-1]
TWO_SUITES = {
    "cpu": [
        measured(STEP.case, OURS, 2.5, "2026-01-02T00:00:00+00:00"),
        measured(STEP.case, "fbgemm", 3.5, "2026-01-02T00:00:00+00:00"),
        measured(STEP.case, "rows read once", 0.25, "2026-01-02T00:00:00+00:00"),
        measured("another case", OURS, 9.0, "2026-01-05T00:00:00+00:00"),
    ],
    "gpu": [],
    "tiers": [],
    "log": [
        measured(COMMIT.case, OURS, 40.0, "2026-01-01T00:00:00+00:00"),
        measured(COMMIT.case, OURS, 37.0, "2026-01-03T00:00:00+00:00"),
    ],
}


def test_the_summary_has_the_newest_run_of_its_cases_and_the_contenders_that_it_names():
    block = readme.render_summary(TWO_SUITES)
    assert block.startswith("<!-- up to 2026-01-03T00:00:00+00:00 -->\n")
    assert f"| {STEP.title} | 2.5 ms | FBGEMM 3.5 |" in block
    assert f"| {COMMIT.title} | 37 ms |  |" in block
    assert "another" not in block
    assert "0.25" not in block
    assert readme.render_summary({suite: [] for suite in TWO_SUITES}) == readme.NONE


def test_rows_measured_later_do_not_make_the_summary_wrong():
    text = f"<!-- numbers of summary -->\n{readme.render_summary(TWO_SUITES)}<!-- /numbers -->\n"
    later = [*TWO_SUITES["log"], measured(COMMIT.case, OURS, 30.0, "2026-01-04T00:00:00+00:00")]
    assert readme.is_summary_current(text, TWO_SUITES | {"log": later})
    assert not readme.is_summary_current(text.replace("37 ms", "30 ms"), TWO_SUITES)
    assert not readme.is_summary_current("no markers", TWO_SUITES)


def test_the_summary_is_drawn_with_its_numbers_as_text(tmp_path):
    path = tmp_path / "summary.png"
    plot.draw_summary(TWO_SUITES, path)
    with Image.open(path) as picture:
        assert picture.text[plot.NUMBERS] == readme.render_summary(TWO_SUITES)


def test_a_page_without_its_markers_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- numbers of cpu -->\nold\n<!-- /numbers -->\nb\n")
    readme.rewrite(page, {"cpu": "new\n"})
    assert page.read_text() == "a\n<!-- numbers of cpu -->\nnew\n<!-- /numbers -->\nb\n"
    with pytest.raises(ValueError, match=r"page\.md: wanted the markers <!-- numbers of log -->"):
        readme.rewrite(page, {"cpu": "newer\n", "log": "new\n"})
    assert "newer" not in page.read_text()
