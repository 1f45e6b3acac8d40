"""What came, for an error's sentence: short however large or deep it is."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


def excerpt(given: object) -> str:
    """`given` as repr shows it, cut."""
    try:
        return _SHORT.repr(given)
    except ValueError:  # an int with more digits than Python prints
        return f"a large {type(given).__name__}"
