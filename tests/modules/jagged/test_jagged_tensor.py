"""JaggedTensor against its plain definition, a list of lists; and what both jagged tensors refuse."""

import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.jagged_lists import FOUR, INDEX_DTYPES, VALUES, bags_of_ids, flat, jagged, lists

from shoal.errors import DeviceError, InputError
from shoal.modules.jagged import JaggedTensor, KeyedJaggedTensor


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@given(bags=bags_of_ids)
def test_lengths_and_offsets_follow_from_each_other_in_their_own_type(dtype, bags):
    from_lengths, from_offsets = jagged(bags, dtype), jagged(bags, dtype, by="offsets")
    assert from_lengths.offsets_or_none() is None
    assert from_offsets.lengths_or_none() is None
    for one in (from_lengths, from_offsets):
        assert one.lengths().tolist() == [len(bag) for bag in bags]
        assert one.offsets().tolist() == [len(flat(bags[:i])) for i in range(len(bags) + 1)]
        assert one.lengths().dtype == one.offsets().dtype == dtype
        assert lists(one) == bags
    assert torch.equal(from_lengths.offsets_or_none(), from_offsets.offsets())
    assert torch.equal(from_offsets.lengths_or_none(), from_lengths.lengths())


def test_what_was_computed_once_is_kept():
    one = jagged([[1], [2, 3]])
    assert one.offsets() is one.offsets()


def test_lengths_and_offsets_may_both_be_given():
    lengths, offsets = torch.tensor([1, 0]), torch.tensor([0, 1, 1])
    one = JaggedTensor(torch.tensor([5]), lengths=lengths, offsets=offsets)
    assert one.lengths() is lengths
    assert one.offsets() is offsets


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 2, 3, 3], "got 3 at 3, where the sum is 2. Give only one of the two"),
        ([1, 2, 3, 3, 4], "got 1 at 0, where the sum is 0"),
        ([0, 1, 2, 2, 4], "got 4 at 4, where the sum is 3"),
        ([0, 1, 2, 2, 3 + 2**32], "got 4294967299 at 4, where the sum is 3"),
    ],
)
def test_lengths_and_offsets_that_disagree_are_refused(dtype, offsets, message):
    for make in (JaggedTensor, partial(KeyedJaggedTensor, ["a", "b"])):
        with pytest.raises(InputError, match=f"offsets: wanted the running sums of the lengths, from 0; {message}"):
            make(VALUES, lengths=FOUR.to(dtype), offsets=torch.tensor(offsets))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("at", [0, 1, 16384, 16385, 40000])
def test_many_lengths_and_offsets_are_compared_to_the_last(dtype, at):
    lengths = torch.ones(40000, dtype=dtype)
    offsets = torch.arange(40001, dtype=dtype)
    JaggedTensor(torch.arange(40000), lengths=lengths, offsets=offsets)
    offsets[at] += 1
    with pytest.raises(InputError, match=f"got {at + 1} at {at}, where the sum is {at}"):
        JaggedTensor(torch.arange(40000), lengths=lengths, offsets=offsets)


def test_a_traced_function_makes_offsets_of_any_number_of_bags():
    def offsets_of(values, lengths):
        return JaggedTensor(values, lengths=lengths).offsets()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, about itself and about our checks
        traced = torch.jit.trace(offsets_of, (torch.arange(6), torch.tensor([1, 2, 3])), check_trace=False)
    assert traced(torch.arange(15), torch.tensor([1, 2, 3, 4, 5])).tolist() == [0, 1, 3, 6, 10, 15]


def test_lengths_whose_sum_wraps_around_do_not_agree():
    lengths = torch.tensor([2**31 - 1, 1], dtype=torch.int32)
    with pytest.raises(InputError, match="got -2147483648 at 2, where the sum is 2147483648"):
        JaggedTensor(VALUES, lengths=lengths, offsets=torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32))


@given(bags=bags_of_ids, desired=st.one_of(st.none(), st.integers(0, 6)), padding=st.integers(-5, 5))
def test_padded_dense_cuts_and_pads(bags, desired, padding):
    length = max(map(len, bags), default=0) if desired is None else desired
    padded = jagged(bags).to_padded_dense(desired, padding)
    assert padded.shape == (len(bags), length)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [(bag + [padding] * length)[:length] for bag in bags]


def test_padded_dense_keeps_trailing_dimensions_and_carries_the_gradient():
    values = torch.randn(3, 2, requires_grad=True)
    padded = JaggedTensor(values, lengths=torch.tensor([1, 0, 2])).to_padded_dense(2, -1.0)
    assert padded.shape == (3, 2, 2)
    expected = torch.full((3, 2, 2), -1.0)
    expected[0, 0], expected[2] = values[0], values[1:]
    assert torch.equal(padded, expected)
    padded.sum().backward()
    assert torch.equal(values.grad, torch.ones(3, 2))


def test_padding_that_the_type_cannot_hold_is_refused():
    with pytest.raises(InputError, match=r"padding_value: wanted an integer for torch.int64; got 0.5"):
        jagged([[1], []]).to_padded_dense(2, 0.5)
    with pytest.raises(InputError, match="padding_value: wanted an integer"):
        jagged([[1], []]).to_padded_dense(2, float("nan"))
    with pytest.raises(InputError, match="desired_length: wanted 0 or more; got -1"):
        jagged([[1], []]).to_padded_dense(-1)


def test_weights_are_split_and_padded_like_the_values():
    one = JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0.5, 1.5, 2.5]), torch.tensor([2, 1]))
    assert [weights.tolist() for weights in one.to_dense_weights()] == [[0.5, 1.5], [2.5]]
    assert one.to_padded_dense_weights(padding_value=9.0).tolist() == [[0.5, 1.5], [2.5, 9.0]]
    assert one.weights() is one.weights_or_none()


def test_without_weights():
    one = jagged([[1]])
    assert one.weights_or_none() is None
    assert one.to_dense_weights() is None
    assert one.to_padded_dense_weights() is None
    with pytest.raises(InputError, match="wanted a tensor with weights"):
        one.weights()


@given(bags=bags_of_ids.filter(bool))
def test_from_dense_is_the_inverse_of_to_dense(bags):
    tensors = [torch.tensor(bag, dtype=torch.int64) for bag in bags]
    one = JaggedTensor.from_dense(tensors, [tensor.double() for tensor in tensors])
    assert lists(one) == bags
    assert torch.equal(one.weights(), one.values().double())


def test_from_dense_refuses_nothing_and_weights_of_other_lengths():
    with pytest.raises(InputError, match="at least one tensor"):
        JaggedTensor.from_dense([])
    with pytest.raises(InputError, match=r"weights: wanted tensors of lengths \[1, 2\], as the values; got \[2, 1\]"):
        JaggedTensor.from_dense([torch.ones(1), torch.ones(2)], [torch.ones(2), torch.ones(1)])


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_from_dense_lengths_takes_the_first_of_each_row(dtype):
    dense = torch.arange(6).view(2, 3)
    lengths = torch.tensor([1, 3], dtype=dtype)
    one = JaggedTensor.from_dense_lengths(dense, lengths, dense * 0.5)
    assert lists(one) == [[0], [3, 4, 5]]
    assert one.weights().tolist() == [0.0, 1.5, 2.0, 2.5]
    assert one.lengths() is lengths


@pytest.mark.parametrize(
    ("values", "lengths", "weights"),
    [
        (torch.ones(3), torch.tensor([1, 1, 1]), None),
        (torch.ones(2, 3), torch.tensor([1]), None),
        (torch.ones(2, 3), torch.tensor([1.0, 1.0]), None),
        (torch.ones(2, 3), torch.tensor([1, 4]), None),
        (torch.ones(2, 3), torch.tensor([-1, 3]), None),
        (torch.ones(2, 3), torch.tensor([1, 1]), torch.ones(2, 2)),
    ],
)
def test_from_dense_lengths_refuses_what_does_not_fit(values, lengths, weights):
    with pytest.raises(InputError, match=r"\[JaggedTensor.from_dense_lengths\]"):
        JaggedTensor.from_dense_lengths(values, lengths, weights)


def test_empty_jagged_tensor():
    one = JaggedTensor.empty(is_weighted=True, values_dtype=torch.int64, weights_dtype=torch.float64)
    assert one.values().dtype == torch.int64
    assert one.weights().dtype == torch.float64
    assert one.lengths().dtype == torch.int32
    assert one.offsets().tolist() == [0]
    assert one.to_dense() == []
    assert one.to_padded_dense().shape == (0, 0)
    assert JaggedTensor.empty().weights_or_none() is None


def test_contents_that_do_not_fit_are_refused_where_they_are_looked_at():
    for lengths in ([1, 1], [5, -2], [2, 2]):
        one = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor(lengths))
        with pytest.raises(InputError, match="a sum of 3, the number of values"):
            one.to_dense()
        with pytest.raises(InputError, match="a sum of 3, the number of values"):
            one.to_padded_dense()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"values": VALUES}, "wanted lengths or offsets; got neither"),
        ({"values": [1, 2, 3], "lengths": FOUR}, "values: wanted a tensor; got list"),
        ({"values": torch.tensor(1), "lengths": FOUR}, "values: wanted at least 1 dimension"),
        ({"values": VALUES, "lengths": [3]}, "lengths: wanted a tensor; got list"),
        (
            {"values": VALUES, "lengths": FOUR.float()},
            "lengths: wanted a 1-D tensor of int32 or int64; got 1-D of torch",
        ),
        ({"values": VALUES, "lengths": FOUR.to(torch.int16)}, "lengths: wanted a 1-D tensor of int32 or int64"),
        ({"values": VALUES, "lengths": FOUR.view(2, 2)}, "lengths: wanted a 1-D tensor of int32 or int64; got 2-D"),
        ({"values": VALUES, "offsets": FOUR.bool()}, "offsets: wanted a 1-D tensor of int32 or int64"),
        ({"values": VALUES, "offsets": FOUR[:0]}, "offsets: wanted at least one element"),
        ({"values": VALUES, "lengths": FOUR, "offsets": FOUR}, "offsets: wanted one element more than the 4 lengths"),
        ({"values": VALUES, "lengths": FOUR, "weights": torch.ones(2)}, "weights: wanted one for each of the 3 values"),
        ({"values": VALUES, "lengths": FOUR, "weights": torch.tensor(1.0)}, "weights: wanted one for each"),
        ({"values": VALUES, "lengths": FOUR, "weights": [1.0]}, "weights: wanted a tensor; got list"),
    ],
)
def test_shapes_and_types_are_checked_in_both_jagged_tensors(arguments, message):
    with pytest.raises(InputError, match=message):
        JaggedTensor(**arguments)
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor(["a", "b"], **arguments)


def test_tensors_of_different_devices_are_refused():
    for name, tensor in (("lengths", FOUR), ("weights", torch.ones(3)), ("offsets", FOUR)):
        arguments = {"lengths": FOUR, name: tensor.to("meta")}
        with pytest.raises(DeviceError, match=f"{name}: wanted them on cpu, as the values; got meta"):
            JaggedTensor(VALUES, **arguments)


def test_jagged_tensor_moves():
    moved = JaggedTensor(VALUES, torch.ones(3), FOUR).to("meta")
    assert {tensor.device.type for tensor in (moved.values(), moved.weights(), moved.lengths())} == {"meta"}
