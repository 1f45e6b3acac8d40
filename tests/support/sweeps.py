"""How much a property test tries."""

from hypothesis import settings


def examples(normally: int) -> int:
    """So many in a normal run, and in a thorough one more by as much as where nothing is said."""
    return normally * settings.default.max_examples // settings.get_profile("default").max_examples
