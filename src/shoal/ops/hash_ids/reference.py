"""Ids of strings in plain Python, as docs/formats.md words them."""

_WORD = 2**64 - 1
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


def id_of(text: str | bytes) -> int:
    """The id of a string: XXH64 of its UTF-8, or of the bytes, as a signed integer."""
    hashed = xxh64(text.encode() if isinstance(text, str) else text)
    return hashed - 2**64 if hashed >= 2**63 else hashed


def xxh64(data: bytes) -> int:
    """XXH64 with seed 0."""
    p1, p2, p3, p4, p5 = _PRIMES
    at, left = 0, len(data)
    if left >= 32:
        sums = [(p1 + p2) & _WORD, p2, 0, -p1 & _WORD]
        while left >= 32:
            sums = [_round(one, _word(data, at + 8 * i, 8)) for i, one in enumerate(sums)]
            at, left = at + 32, left - 32
        h = sum(_rotate(one, by) for one, by in zip(sums, (1, 7, 12, 18), strict=True)) & _WORD
        for one in sums:
            h = ((h ^ _round(0, one)) * p1 + p4) & _WORD
    else:
        h = p5
    h = (h + len(data)) & _WORD
    while left >= 8:
        h = (_rotate(h ^ _round(0, _word(data, at, 8)), 27) * p1 + p4) & _WORD
        at, left = at + 8, left - 8
    if left >= 4:
        h = (_rotate(h ^ (_word(data, at, 4) * p1 & _WORD), 23) * p2 + p3) & _WORD
        at, left = at + 4, left - 4
    for byte in data[at:]:
        h = _rotate(h ^ (byte * p5 & _WORD), 11) * p1 & _WORD
    h = (h ^ (h >> 33)) * p2 & _WORD
    h = (h ^ (h >> 29)) * p3 & _WORD
    return h ^ (h >> 32)


def _round(total: int, word: int) -> int:
    return _rotate((total + word * _PRIMES[1]) & _WORD, 31) * _PRIMES[0] & _WORD


def _rotate(x: int, by: int) -> int:
    return (x << by | x >> (64 - by)) & _WORD


def _word(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
