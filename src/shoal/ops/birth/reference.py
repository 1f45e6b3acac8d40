"""Births in plain torch, as docs/formats.md words them."""

import torch
from torch import Tensor

from shoal import _native
from shoal.config import Constant, Init, Normal, Uniform

MASK = 0xFFFFFFFF


def mix64(x: int) -> int:
    """The finaliser of MurmurHash3."""
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & (2**64 - 1)
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & (2**64 - 1)
    return x ^ (x >> 33)


def name_hash(name: str) -> int:
    """FNV-1a over the name's UTF-8."""
    result = 0xCBF29CE484222325
    for byte in name.encode():
        result = ((result ^ byte) * 0x100000001B3) & (2**64 - 1)
    return result


def bucket_of(key: int, buckets: int) -> int:
    """The bucket that a key belongs to."""
    return mix64(key & (2**64 - 1)) % buckets


def birth_stream(seed: int, name: str) -> int:
    """The Philox key of a table's births."""
    return mix64((mix64(name_hash(name)) + seed) & (2**64 - 1))


def rounding_stream(seed: int, name: str) -> int:
    """The Philox key of a table's stochastic rounding."""
    return mix64((birth_stream(seed, name) + 0x9E3779B97F4A7C15) & (2**64 - 1))


def philox(stream: int, counters: Tensor) -> Tensor:
    """Philox4x32-10 of [n, 4] counters: 32-bit words in int64."""
    c0, c1, c2, c3 = counters.unbind(1)
    k0, k1 = stream & MASK, stream >> 32
    for _ in range(10):
        p0, p1 = _product(0xD2511F53, c0), _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = p1[0] ^ c1 ^ k0, p1[1], p0[0] ^ c3 ^ k1, p0[1]
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack([c0, c1, c2, c3], dim=1)


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a 32 x 32-bit product, without a signed overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return (middle >> 16) & MASK, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def words(stream: int, keys: Tensor, dim: int, word3: int = 0) -> Tensor:
    """The random word of every element of every key's row: [n, dim]."""
    blocks = (dim + 3) // 4
    counters = torch.stack(
        [
            (keys & MASK).repeat_interleave(blocks),
            ((keys >> 32) & MASK).repeat_interleave(blocks),
            torch.arange(blocks).repeat(len(keys)),
            torch.full((len(keys) * blocks,), word3 & MASK),
        ],
        dim=1,
    )
    return philox(stream, counters).reshape(len(keys), 4 * blocks)[:, :dim]


def unit_normal(word: Tensor) -> Tensor:
    """A standard normal from the table of its inverse CDF, interpolated."""
    table = _native.normal_table()
    tail = word & 0x7FFFFFFF
    octave = torch.clamp(torch.floor(torch.log2(tail.clamp(min=1).double())).long() - 6, min=0)
    knot = torch.where(tail < 64, tail, 64 * octave + (tail >> octave))
    rest = torch.where(tail < 64, 0, tail & ((1 << octave) - 1))
    along = rest.float() * torch.pow(torch.tensor(2.0), -octave.float())
    z = table[knot] + along * (table[knot + 1] - table[knot])
    z = torch.where(tail < 64, table[knot], z)
    return torch.where(word >> 31 == 1, -z, z)


def first_rows(init: Init, seed: int, name: str, keys: Tensor, dim: int) -> Tensor:
    """The rows that keys are born with: float32 [n, dim]."""
    drawn = words(birth_stream(seed, name), keys, dim)
    match init:
        case Uniform(low, high):
            span = torch.tensor(high - low, dtype=torch.float32)
            return torch.tensor(low, dtype=torch.float32) + (drawn >> 8).float() * 2.0**-24 * span
        case Normal(mean, std):
            return torch.tensor(mean, dtype=torch.float32) + unit_normal(drawn) * torch.tensor(std, dtype=torch.float32)
        case Constant(value):
            return torch.full((len(keys), dim), value, dtype=torch.float32)
        case _:
            return torch.zeros(len(keys), dim)
