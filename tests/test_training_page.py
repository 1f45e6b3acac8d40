"""The examples of docs/training.md run as pasted, each by itself, and check what they show."""

import ast
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "training.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
EXAMPLES = [
    pytest.param(block, id=f"{title}, {number}")
    for title, section in SECTIONS.items()
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL), 1)
]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs_as_pasted(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/training.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_checks_what_it_shows(block):
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(block)))


def test_every_section_has_an_example_and_is_in_the_contents():
    assert all("```python" in section for section in SECTIONS.values())
    assert re.findall(r"^- \[(.*?)\]", TEXT, re.MULTILINE) == list(SECTIONS)


def test_the_first_example_of_mixed_precision_sets_the_scaler():
    first = next(title for title in SECTIONS if "GradScaler" in title)
    assert first == next(iter(SECTIONS))
    assert "bags.scaler = scaler" in SECTIONS[first]
