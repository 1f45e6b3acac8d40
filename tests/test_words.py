"""Plain words: some phrases that readers stumble over are not in the docs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    # api.md is made from docstrings, formats.md and log.md are next.
    *(page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in ("api.md", "formats.md", "log.md")),
]

# A phrase, and words to use in its place. Only phrases that are never right in these texts.
PHRASES = {
    r"\bbeside\b": "'next to' for a place, 'while' for a time, 'compared with' for a comparison",
    r"\bwhoever\b": "the name of the caller, thread or process",
    r"\bnobody\b": "'no caller', 'no thread', or the passive",
    r"\bsomebody\b": "'a user', 'another process'",
    r"\bwhat has\b": "the thing's name",
    r"\bwho (has|holds|reads|writes|waits|must|is|was)\b": "the name of the caller or thread",
    r"\b(behind|beside) (each|one another)\b": "'one after the other'",
    r"\bbehind (it|that|them|the (update|forward|backward|step|lookup|commit))\b": "'after' for a time",
}
# What tests compare with the CSVs holds the names of cases, which never change.
NUMBERS = re.compile(r"<!-- numbers of (\w+) -->.*?<!-- /numbers -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def stumbles(text: str) -> list[str]:
    """Each banned phrase in a text, with its line and the words to use."""
    for left_out in (NUMBERS, CODE):
        text = left_out.sub(lambda found: "\n" * found[0].count("\n"), text)
    return [
        f"line {1 + text.count(chr(10), 0, found.start())}: '{found[0]}': write {instead}"
        for phrase, instead in PHRASES.items()
        for found in re.finditer(phrase, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_in_plain_words(page):
    assert stumbles(page.read_text()) == []


def test_a_phrase_is_found_with_its_line_but_not_in_code_or_numbers():
    text = "Fine.\n`nobody`\n```\nwhoever\n```\n<!-- numbers of a -->\nbeside\n<!-- /numbers -->\nAsk whoever\nhas it."
    assert [found.split(": write")[0] for found in stumbles(text)] == ["line 9: 'whoever'"]


@pytest.mark.parametrize("text", ["The lock is held.", "behind one lock", "A step, and the next one after it."])
def test_plain_words_pass(text):
    assert stumbles(text) == []
