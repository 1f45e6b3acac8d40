"""Plain words: phrases that a reader stumbles over are not in the docs, and not in docstrings, comments and errors."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = (".h", ".cc")


def sources_of(place: Path) -> list[Path]:
    """Returns the Python and C++ files of a folder, or the file itself."""
    return [path for path in sorted((place, *place.rglob("*"))) if path.suffix in (".py", ".pyi", *NATIVE)]


def holds_sources(path: Path) -> bool:
    return path.name != "__pycache__" and len(sources_of(path)) > 0


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
]
# Every Python and C++ file of these.
PLACES = [
    "benchmarks",
    "examples",
    *(f"csrc/{path.name}" for path in sorted((ROOT / "csrc").iterdir()) if path.is_dir()),
    *(f"src/shoal/{path.name}" for path in sorted((ROOT / "src/shoal").iterdir()) if holds_sources(path)),
    *(f"tests/{path.name}" for path in sorted((ROOT / "tests").iterdir()) if holds_sources(path)),
]
# Files with the phrases in them, each with the reason.
EXCEPTIONS = {"tests/test_words.py": "it names the phrases"}

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


def stumbles_of_comments(source: str) -> list[str]:
    """Returns the phrases in the comments of a C++ file. Lines of comments that follow each other are one text."""
    blank = re.sub(r'"(?:\\.|[^"\\\n])*"', lambda found: " " * len(found[0]), source)  # "//" may be in a string
    comments = ["".join(re.findall(r"//(.*)", line)) for line in blank.split("\n")]
    return stumbles("\n".join(comments))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page):
    assert stumbles(page.read_text()) == []


@pytest.mark.parametrize("place", PLACES)
def test_sources_are_in_plain_words(place):
    found = {
        str(path.relative_to(ROOT)): (stumbles_of_comments if path.suffix in NATIVE else stumbles_of_source)(
            path.read_text()
        )
        for path in sources_of(ROOT / place)
    }
    assert {path: some for path, some in found.items() if some and path not in EXCEPTIONS} == {}


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


def test_a_phrase_is_found_in_comments_of_cpp_but_not_in_its_strings():
    source = """// Runs beside it. What
// has it?
const char* wanted = "http://nobody";  // as somebody said
int nobody = 0;
"""
    assert [found.split(": write")[0] for found in stumbles_of_comments(source)] == [
        "line 1: 'beside'",
        "line 3: 'somebody'",
        "line 1: 'What has'",
    ]


@pytest.mark.parametrize("text", ["The lock is held.", "behind one lock", "A step, and the next one after it."])
def test_plain_words_pass(text):
    assert stumbles(text) == []
