"""What came, for an error's sentence: short however large or deep it is, and with one full stop."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def excerpt(given: object) -> str:
    """`given` as repr shows it, cut."""
    try:
        return _SHORT.repr(given)
    except ValueError:  # an int with more digits than Python prints
        return f"a large {type(given).__name__}"


def sentence(text: str) -> str:
    """`text` with a full stop, unless it ends with a mark of its own, as texts of other libraries may."""
    text = text.rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def without_place(text: str) -> str:
    """An error's text without the "[where]" it begins with and the full stop at its end, for an error that says where
    itself."""
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text.removesuffix(".")
