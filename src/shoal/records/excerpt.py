"""Text for errors: values made short, and sentences with one full stop."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def excerpt(given: object) -> str:
    """Returns `repr(given)`, cut where it is long."""
    try:
        return _SHORT.repr(given)
    except ValueError:  # an int with more digits than Python prints
        return f"a large {type(given).__name__}"


def sentence(text: str) -> str:
    """Returns `text` with a full stop, unless it ends with a mark of its own, as texts of other libraries may."""
    text = text.rstrip()
    return text if text.endswith((".", "?", "!")) else f"{text}."


def without_place(text: str) -> str:
    """Returns an error's text without the "[where]" that it begins with and without its last full stop, to be part of
    another error."""
    if text.startswith("[") and "] " in text:
        text = text.partition("] ")[2]
    return text.removesuffix(".")
