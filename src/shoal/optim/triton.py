"""The optimizers' steps on rows in device memory, as the update kernel calls them. One function each.

A step takes rows [g, d] of weights and gradients, the sums [g] of squared gradients, pointers [g] to the rows' state,
to the tables' settings (whose first is the learning rate) and to the optimizer's own, the number [g] of the table's
step, the elements [d], which of them are inside, and which rows [g] to write. It returns the new weights.

Between the loads and the stores of state stands a barrier: threads of other warps may hold the same element.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from shoal import _native


@triton.jit
def sgd(w, g, squares, state, rate, own, number, element, inside, live, dim):
    return w - tl.load(rate, mask=live, other=0.0).to(tl.float32)[:, None] * g


@triton.jit
def momentum(w, g, squares, state, rate, own, number, element, inside, live, dim):
    at = state[:, None] + element[None, :]
    keep = tl.load(own, mask=live, other=0.0).to(tl.float32)[:, None]
    nesterov = tl.load(own + 1, mask=live, other=0.0)[:, None] != 0.0
    m = keep * tl.load(at, mask=live[:, None] & inside, other=0.0) + g
    tl.debug_barrier()
    tl.store(at, m, mask=live[:, None] & inside)
    return w - tl.load(rate, mask=live, other=0.0).to(tl.float32)[:, None] * tl.where(nesterov, g + keep * m, m)


@triton.jit
def adagrad(w, g, squares, state, rate, own, number, element, inside, live, dim):
    at = state[:, None] + element[None, :]
    total = tl.load(at, mask=live[:, None] & inside, other=0.0) + g * g
    tl.debug_barrier()
    tl.store(at, total, mask=live[:, None] & inside)
    eps = tl.load(own, mask=live, other=1.0).to(tl.float32)[:, None]
    return w - tl.load(rate, mask=live, other=0.0).to(tl.float32)[:, None] * g / (tl.sqrt(total) + eps)


@triton.jit
def rowwise_adagrad(w, g, squares, state, rate, own, number, element, inside, live, dim):
    total = tl.load(state, mask=live, other=0.0) + squares / dim
    tl.debug_barrier()
    tl.store(state, total, mask=live)
    eps = tl.load(own, mask=live, other=1.0).to(tl.float32)
    return w - (tl.load(rate, mask=live, other=0.0).to(tl.float32) / (tl.sqrt(total) + eps))[:, None] * g


@triton.jit
def one_minus_power(log, t):
    """1 - e^(log t), log <= 0. Where it is small, by its series: the difference would lose the digits."""
    x = log * t
    y = tl.maximum(x, -0.3)
    series = y * (
        1.0 + y / 2.0 * (1.0 + y / 3.0 * (1.0 + y / 4.0 * (1.0 + y / 5.0 * (1.0 + y / 6.0 * (1.0 + y / 7.0)))))
    )
    return tl.where(x > -0.3, -series, 1.0 - tl.exp(x))


@triton.jit
def count_update(count):
    """Counts of one update more, as docs/formats.md has them, and how many updates these are."""
    bits = tl.minimum(count.to(tl.int32, bitcast=True) + 1, 0x7F7FFFFF)
    exact = count < 16777216.0
    counted = tl.where(exact, count + 1.0, bits.to(tl.float32, bitcast=True))
    return counted, tl.where(exact, counted, (bits - 0x4B800000 + 16777216).to(tl.float32))


@triton.jit
def bias_corrections(count, own, number, live):
    """1 - beta^t of both betas; t is the row's own count, or the table's step where the settings say so."""
    table_wide = tl.load(own + 3, mask=live, other=1.0) != 0.0
    counted, updates = count_update(tl.load(count, mask=live & (table_wide == 0), other=0.0))
    tl.debug_barrier()
    tl.store(count, counted, mask=live & (table_wide == 0))
    t = tl.where(table_wide, number.to(tl.float32), updates)
    first = tl.load(own + 5, mask=live, other=-1.0).to(tl.float32)
    second = tl.load(own + 6, mask=live, other=-1.0).to(tl.float32)
    return one_minus_power(first, t), one_minus_power(second, t)


@triton.jit
def adam(w, g, squares, state, rate, own, number, element, inside, live, dim):
    at = state[:, None] + element[None, :]
    wanted = live[:, None] & inside
    b1 = tl.load(own, mask=live, other=0.0)[:, None]
    b2 = tl.load(own + 1, mask=live, other=0.0)[:, None]
    m = b1.to(tl.float32) * tl.load(at, mask=wanted, other=0.0) + (1.0 - b1).to(tl.float32) * g
    v = b2.to(tl.float32) * tl.load(at + dim, mask=wanted, other=0.0) + (1.0 - b2).to(tl.float32) * g * g
    tl.debug_barrier()
    tl.store(at, m, mask=wanted)
    tl.store(at + dim, v, mask=wanted)
    one, two = bias_corrections(state + 2 * dim, own, number, live)
    eps = tl.load(own + 2, mask=live, other=1.0).to(tl.float32)[:, None]
    lr = tl.load(rate, mask=live, other=0.0).to(tl.float32)
    return w - (lr / one)[:, None] * m / (tl.sqrt(v) / tl.sqrt(two)[:, None] + eps)


@triton.jit
def partial_rowwise_adam(w, g, squares, state, rate, own, number, element, inside, live, dim):
    at = state[:, None] + element[None, :]
    wanted = live[:, None] & inside
    b1 = tl.load(own, mask=live, other=0.0)
    b2 = tl.load(own + 1, mask=live, other=0.0)
    m = b1.to(tl.float32)[:, None] * tl.load(at, mask=wanted, other=0.0) + (1.0 - b1).to(tl.float32)[:, None] * g
    v = b2.to(tl.float32) * tl.load(state + dim, mask=live, other=0.0) + (1.0 - b2).to(tl.float32) * (squares / dim)
    tl.debug_barrier()
    tl.store(at, m, mask=wanted)
    tl.store(state + dim, v, mask=live)
    one, two = bias_corrections(state + dim + 1, own, number, live)
    eps = tl.load(own + 2, mask=live, other=1.0).to(tl.float32)
    lr = tl.load(rate, mask=live, other=0.0).to(tl.float32)
    return w - (lr / one / (tl.sqrt(v) / tl.sqrt(two) + eps))[:, None] * m


@triton.jit
def ftrl(w, g, squares, state, rate, own, number, element, inside, live, dim):
    at = state[:, None] + element[None, :]
    wanted = live[:, None] & inside
    lr = tl.load(rate, mask=live, other=1.0).to(tl.float32)[:, None]
    l1 = tl.load(own, mask=live, other=0.0).to(tl.float32)[:, None]
    l2 = tl.load(own + 1, mask=live, other=1.0).to(tl.float32)[:, None]
    beta = tl.load(own + 2, mask=live, other=1.0).to(tl.float32)[:, None]
    n = tl.load(at + dim, mask=wanted, other=0.0)
    grown = n + g * g
    z = tl.load(at, mask=wanted, other=0.0) + g - (tl.sqrt(grown) - tl.sqrt(n)) / lr * w
    tl.debug_barrier()
    tl.store(at, z, mask=wanted)
    tl.store(at + dim, grown, mask=wanted)
    excess = tl.where(z < 0.0, z + l1, z - l1)
    return tl.where(tl.abs(z) > l1, -excess / ((beta + tl.sqrt(grown)) / lr + l2), 0.0)


@triton.jit
def assign(w, g, squares, state, rate, own, number, element, inside, live, dim):
    return g


STEPS: Mapping[Any, Any] = {
    _native.Optimizer.sgd: sgd,
    _native.Optimizer.momentum: momentum,
    _native.Optimizer.adagrad: adagrad,
    _native.Optimizer.rowwise_adagrad: rowwise_adagrad,
    _native.Optimizer.adam: adam,
    _native.Optimizer.partial_rowwise_adam: partial_rowwise_adam,
    _native.Optimizer.ftrl: ftrl,
    _native.Optimizer.assign: assign,
}
