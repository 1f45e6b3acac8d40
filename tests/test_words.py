"""Plain words: phrases that a reader stumbles over are not in the docs, and not in docstrings, comments and errors."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
# Of src/ the packages that are in plain words already; the others follow.
CLEAN = [
    "checkpoint",
    "cli",
    "config",
    "errors.py",
    "index",
    "interop",
    "log",
    "metrics",
    "modules",
    "ops",
    "optim",
    "prefetch",
    "records",
    "storage",
    "torch_private.py",
]
PLACES = ["benchmarks", "examples", *(f"src/shoal/{name}" for name in CLEAN)]

# A phrase, and the words to use in its place. Only phrases that are never right in these texts.
PHRASES = {
    r"\bbeside\b": "'next to' for a place, 'while' for a time, 'compared with' for a comparison",
    r"\bwhoever\b": "the name of the caller, thread or process",
    r"\bnobody\b": "'no caller', 'no thread', or the passive",
    r"\bsomebody\b": "'a user', 'another process'",
    r"\bwhat has\b": "the thing's name",
    r"\bwho (has|holds|reads|writes|waits|must|is|was)\b": "the name of the caller or thread",
    r"\b(behind each other|behind one another|one behind the other)\b": "'one after the other'",
    r"\bbehind (it|that|them|the (update|forward|backward|step|lookup|commit|last))\b": "'after' for a time",
}
# Tables made from the CSVs have the names of cases, which never change.
NUMBERS = re.compile(r"<!-- numbers of (\w+) -->.*?<!-- /numbers -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def stumbles(text: str, first: int = 1) -> list[str]:
    """Returns each such phrase in a text that begins at line `first`: its line, and the words to use."""
    for left_out in (NUMBERS, CODE):
        text = left_out.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        f"line {first + text.count(chr(10), 0, found.start())}: '{' '.join(found[0].split())}': write {instead}"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase.replace(" ", r"\s+"), text, re.IGNORECASE)
    ]


def stumbles_of_source(source: str) -> list[str]:
    """Returns the phrases in the docstrings, the comments and the messages of raised errors of a Python file."""
    texts: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                docstring = node.body[0].value
                texts.append((docstring.lineno, docstring.value))
        elif isinstance(node, ast.Raise):
            parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            texts.extend((part.lineno, part.value) for part in parts)
    comments = [
        (token.start[0], token.string.removeprefix("#").strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return [found for first, text in (*texts, *comments) for found in stumbles(text, first)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page):
    assert stumbles(page.read_text()) == []


@pytest.mark.parametrize("place", PLACES)
def test_sources_are_in_plain_words(place):
    paths = sorted((ROOT / place).rglob("*.py")) or [ROOT / place]
    found = {str(path.relative_to(ROOT)): stumbles_of_source(path.read_text()) for path in paths}
    assert {path: some for path, some in found.items() if some} == {}


def test_a_phrase_is_found_with_its_line_but_not_in_code_or_numbers():
    text = "Fine.\n`nobody`\n```\nwhoever\n```\n<!-- numbers of a -->\nbeside\n<!-- /numbers -->\nAsk what\nhas it."
    assert [found.split(": write")[0] for found in stumbles(text)] == ["line 9: 'what has'"]


def test_a_phrase_is_found_in_docstrings_comments_and_errors_of_a_source():
    source = '''"""Runs beside it."""
NAME = "train beside it"  # nobody knows
def f():
    """Fine.

    Whoever calls."""
    raise ValueError(f"{NAME}: " "somebody else has it")
'''
    assert sorted(found.split(": write")[0] for found in stumbles_of_source(source)) == [
        "line 1: 'beside'",
        "line 2: 'nobody'",
        "line 6: 'Whoever'",
        "line 7: 'somebody'",
    ]


@pytest.mark.parametrize("text", ["The lock is held.", "behind one lock", "A step, and the next one after it."])
def test_plain_words_pass(text):
    assert stumbles(text) == []
