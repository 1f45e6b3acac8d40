"""Records of launches: names and order stand in them once."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from shoal.ops.arguments import F32, I32, I64, Int, Ints, SomeF32, Variable, flat, leaves, lengths, variables
from shoal.ops.launch import Fill, Launch, Pieces, Program, Space, _folded


class Pair(NamedTuple):
    source: Ints
    scale: SomeF32


class Arguments(NamedTuple):
    pair: Pair
    out: I64
    n: Int


class Work(NamedTuple):
    counts: I32
    out: I64


class Call(NamedTuple):
    pair: Pair
    work: Work
    sizes: tuple[Int, ...]
    n: Int


@triton.jit(do_not_specialize=["n"])
def add_up(source, scale, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(source + at, mask=at < n, other=0).to(tl.int64) + 1, mask=at < n)


def add(arguments, **constants):
    return Launch(add_up, (1,), arguments, {"BLOCK": 8, **constants}, {})


def test_variables_are_numbered_in_the_order_of_a_records_fields():
    v = variables(Call, families=2)
    assert [variable.place for variable in flat(v)] == [0, 1, 2, 3, 4, 5, 6]
    assert v.work.out == Variable(3) and v.sizes == (Variable(4), Variable(5))
    assert v.pair.source[3:] == Variable(0, 3)


def test_a_record_in_a_record_stands_for_its_fields():
    assert [name for name, _kind in leaves(Arguments)] == ["source", "scale", "out", "n"]


def test_a_launch_names_its_arguments_as_the_kernel_does():
    source, out = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    launch = add(Arguments(Pair(source, source), out, 4))
    assert [(name, value) for name, _kind, value in launch.named()][3] == ("n", 4)

    class Swapped(NamedTuple):
        out: I64
        pair: Pair
        n: Int

    with pytest.raises(AssertionError, match="add_up takes"):
        add(Swapped(out, Pair(source, source), 4))


def test_pieces_lie_apart_in_the_order_of_their_record():
    pieces = Pieces(lengths(Work, counts=3, out=70))
    space = Space.of(pieces, torch.device("cpu"))
    assert pieces.begins == [0, 256]
    assert space.tensor("out").dtype == torch.int64 and space.tensor("out").numel() == 70
    assert space.addresses() == [piece.data_ptr() for piece in space.tensors()]


def test_every_call_of_a_program_brings_its_own_values():
    v = variables(Call, families=1)
    arguments = Arguments(Pair(v.pair.source, v.pair.scale), v.work.out, v.n)
    program = Program([Fill(v.work.counts, 3, -1), add(arguments)])
    for n in (2, 5):
        source = torch.arange(n, dtype=torch.int32 if n == 2 else torch.int64)
        space = Space.of(Pieces(lengths(Work, counts=3, out=n)), source.device)
        program.run(Call(Pair(source, source), space.as_(Work), (1,), n))
        assert space.tensor("counts").tolist() == [-1, -1, -1]
        assert space.tensor("out").tolist() == list(range(1, n + 1))


def test_a_tensor_of_another_type_than_its_record_says_is_refused():
    v = variables(Call, families=1)
    program = Program([add(Arguments(Pair(v.pair.source, v.pair.scale), v.work.out, v.n))])
    source = torch.zeros(2, dtype=torch.int64)
    wrong = Work(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(AssertionError, match="out of add_up"):
        program.run(Call(Pair(source, source), wrong, (1,), 2))


def test_a_call_becomes_the_numbers_and_tensors_that_its_variables_stand_for():
    class Bias(NamedTuple):
        bias: F32

    class Outer(NamedTuple):
        bias: Bias
        call: Call

    source = torch.zeros(2)
    space = Space.of(Pieces(lengths(Work, counts=3, out=2)), source.device)
    call = Outer(Bias(source), Call(Pair(source, source), space.as_(Work), (7, 8), 2))
    values = list(call)
    for at, unfold in _folded(call):
        values[at : at + 1] = unfold(values[at])
    wanted = [source, source, source, *space.addresses(), 7, 8, 2]
    assert len(values) == len(wanted) == len(list(flat(variables(Outer, 2))))
    assert all(value is want or value == want for value, want in zip(values, wanted, strict=True))
