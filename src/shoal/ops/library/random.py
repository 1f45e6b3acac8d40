"""Hashes and random words, as kernels compute them."""

import triton
import triton.language as tl


@triton.jit
def mix64(key):
    x = key.to(tl.uint64)
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    return x ^ (x >> 33)


@triton.jit
def philox(stream, key, element, word3):
    """The random word of each element: [n, 1] streams, keys and words, [1, d] elements."""
    k0 = (stream & 0xFFFFFFFF).to(tl.uint32)
    k1 = (stream >> 32).to(tl.uint32)
    wide = key.to(tl.uint64)
    zero = (element * 0).to(tl.uint32)
    c0 = (wide & 0xFFFFFFFF).to(tl.uint32) | zero
    c1 = (wide >> 32).to(tl.uint32) | zero
    c2 = (element // 4).to(tl.uint32) | (c0 & 0)
    c3 = word3.to(tl.uint32) | (c0 & 0)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = (p1 & 0xFFFFFFFF).to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = (p0 & 0xFFFFFFFF).to(tl.uint32)
        k0 = ((k0.to(tl.uint64) + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
        k1 = ((k1.to(tl.uint64) + 0xBB67AE85) & 0xFFFFFFFF).to(tl.uint32)
    lane = element % 4
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))
