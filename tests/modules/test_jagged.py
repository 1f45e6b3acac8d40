"""Jagged and keyed tensors against their plain definition: lists of lists."""

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.export import Dim
from torch.utils import _pytree as pytree

from shoal.errors import DeviceError, InputError, NotFoundError
from shoal.modules.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor

INDEX_DTYPES = [torch.int32, torch.int64]

bags_of_ids = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=5)


@st.composite
def batches(draw):
    """Key -> bags of ids, the same number of bags for every key."""
    keys = draw(st.lists(st.text(min_size=1, max_size=3), max_size=4, unique=True))
    stride = draw(st.integers(0, 4))
    bag = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)
    return {key: draw(st.lists(bag, min_size=stride, max_size=stride)) for key in keys}, stride


def flat(bags):
    return [element for bag in bags for element in bag]


def jagged(bags, dtype=torch.int64, by="lengths"):
    lengths = torch.tensor([len(bag) for bag in bags], dtype=dtype)
    values = torch.tensor(flat(bags), dtype=torch.int64)
    if by == "lengths":
        return JaggedTensor(values, lengths=lengths)
    offsets = torch.tensor([sum(len(bag) for bag in bags[:i]) for i in range(len(bags) + 1)], dtype=dtype)
    return JaggedTensor(values, offsets=offsets)


def keyed(batch, stride, dtype=torch.int64, by="lengths", weighted=False):
    one = jagged([bag for bags in batch.values() for bag in bags], dtype, by)
    return KeyedJaggedTensor(
        list(batch),
        one.values(),
        torch.arange(float(one.values().numel())) if weighted else None,
        one.lengths() if by == "lengths" else None,
        one.offsets() if by == "offsets" else None,
        stride=stride,
    )


def lists(one: JaggedTensor) -> list[list[int]]:
    return [bag.tolist() for bag in one.to_dense()]


@pytest.fixture
def kjt():
    """a: [1, 2] [3]; b: [] [4]."""
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3, 4]), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([2, 1, 0, 1])
    )


# JaggedTensor


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


VALUES, FOUR = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 0, 1])


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


# KeyedJaggedTensor


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
@given(drawn=batches())
def test_keyed_jagged_tensor_is_its_lists(dtype, by, weighted, drawn):
    batch, stride = drawn
    one = keyed(batch, stride, dtype, by, weighted)
    counts = [len(flat(bags)) for bags in batch.values()]
    assert one.keys() == list(batch)
    assert len(one) == len(batch)
    assert one.stride() == stride
    assert one.variable_stride_per_key() is False
    assert one.device() == torch.device("cpu")
    assert one.lengths().tolist() == [len(bag) for bags in batch.values() for bag in bags]
    assert one.lengths().dtype == one.offsets().dtype == dtype
    assert one.length_per_key_or_none() is one.offset_per_key_or_none() is None
    assert one.length_per_key() == one.length_per_key_or_none() == counts
    assert one.offset_per_key() == one.offset_per_key_or_none() == [sum(counts[:i]) for i in range(len(counts) + 1)]
    assert {key: lists(share) for key, share in one.to_dict().items()} == batch
    start = 0
    for key, bags in batch.items():
        assert lists(one[key]) == bags
        if weighted:
            assert one[key].weights().tolist() == list(range(start, start + len(flat(bags))))
        start += len(flat(bags))


@given(drawn=batches(), data=st.data())
def test_split_cuts_between_keys_and_concat_puts_together(drawn, data):
    batch, stride = drawn
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    segments = [end - start for start, end in zip([0, *cuts], [*cuts, len(batch)], strict=True)]
    whole = keyed(batch, stride, weighted=True)
    parts = whole.split(segments)
    assert [len(part) for part in parts] == segments
    assert all(part.stride() == stride for part in parts)
    assert all(part.length_per_key_or_none() is not None for part in parts)
    joined = KeyedJaggedTensor.concat(parts)
    assert joined.keys() == whole.keys()
    assert joined.stride() == stride
    assert joined.length_per_key_or_none() == whole.length_per_key()
    for tensor in ("values", "weights", "lengths", "offsets"):
        assert torch.equal(getattr(joined, tensor)(), getattr(whole, tensor)())


@pytest.mark.parametrize("by", ["lengths", "offsets"])
@given(drawn=batches(), data=st.data())
def test_permute_picks_keys_in_that_order(by, drawn, data):
    batch, stride = drawn
    order = data.draw(st.permutations(range(len(batch))))[: data.draw(st.integers(0, len(batch)))]
    picked = keyed(batch, stride, by=by, weighted=True).permute(order, torch.tensor(order))
    names = list(batch)
    assert picked.keys() == [names[index] for index in order]
    assert picked.stride() == stride
    assert {key: lists(share) for key, share in picked.to_dict().items()} == {names[i]: batch[names[i]] for i in order}
    assert picked.length_per_key_or_none() == [len(flat(batch[names[i]])) for i in order]


@given(drawn=batches())
def test_from_jt_dict_is_the_inverse_of_to_dict(drawn):
    batch, stride = drawn
    if batch:
        whole = keyed(batch, stride, weighted=True)
        again = KeyedJaggedTensor.from_jt_dict(whole.to_dict())
        assert again.keys() == whole.keys()
        assert again.stride() == stride
        for tensor in ("values", "weights", "lengths"):
            assert torch.equal(getattr(again, tensor)(), getattr(whole, tensor)())


def test_from_jt_dict_takes_offsets_too():
    again = KeyedJaggedTensor.from_jt_dict({"a": jagged([[1], []], by="offsets"), "b": jagged([[], [2, 3]])})
    assert again.lengths().tolist() == [1, 0, 0, 2]
    assert again.values().tolist() == [1, 2, 3]


def test_sync_constructors_know_their_lengths_per_key(kjt):
    from_lengths = KeyedJaggedTensor.from_lengths_sync(kjt.keys(), kjt.values(), kjt.lengths(), kjt.weights())
    from_offsets = KeyedJaggedTensor.from_offsets_sync(kjt.keys(), kjt.values(), kjt.offsets(), kjt.weights())
    for one in (from_lengths, from_offsets):
        assert one.length_per_key_or_none() == [3, 1]
        assert one.offset_per_key_or_none() == [0, 3, 4]
        assert one.unsync().length_per_key_or_none() is None
        assert one.sync() is one
        assert one.length_per_key_or_none() == [3, 1]
        assert one.weights() is kjt.weights()


def test_lists_that_are_handed_out_are_copies(kjt):
    kjt.sync()
    for handed_out in (kjt.keys(), kjt.length_per_key(), kjt.length_per_key_or_none()):
        handed_out.clear()
    assert kjt.keys() == ["a", "b"]
    assert kjt.length_per_key() == [3, 1]


@pytest.mark.parametrize("lengths", [[2, 1, 0, 2], [2, 1, 0, 0], [5, 1, -1, -1]])
@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_wrong_contents_pass_the_constructor_and_stop_where_they_are_looked_at(lengths, by):
    lengths = torch.tensor(lengths)
    tensors = (
        {"lengths": lengths} if by == "lengths" else {"offsets": torch.cat([torch.zeros(1).long(), lengths.cumsum(0)])}
    )
    one = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), **tensors)
    assert one.stride() == 2
    for look in (
        one.length_per_key,
        one.offset_per_key,
        one.sync,
        one.to_dict,
        lambda: one["a"],
        lambda: one.split([1, 1]),
    ):
        with pytest.raises(InputError, match="wanted none negative, and a sum of 4"):
            look()


def test_stride_may_be_given_and_must_fit():
    assert KeyedJaggedTensor(["a", "b"], VALUES, lengths=FOUR, stride=2).stride() == 2
    with pytest.raises(InputError, match="as many as 2 keys \\* stride 3; got 4"):
        KeyedJaggedTensor(["a", "b"], VALUES, lengths=FOUR, stride=3)
    with pytest.raises(InputError, match="stride: wanted 0 or more; got -1"):
        KeyedJaggedTensor(["a", "b"], VALUES, lengths=FOUR, stride=-1)
    with pytest.raises(InputError, match="a multiple of the 3 keys; got 4"):
        KeyedJaggedTensor(["a", "b", "c"], VALUES, lengths=FOUR)
    with pytest.raises(InputError, match="a multiple of the 2 keys; got 3"):
        KeyedJaggedTensor(["a", "b"], VALUES, offsets=FOUR)


def test_without_keys_the_stride_is_what_was_given_or_zero():
    none = torch.empty(0, dtype=torch.int64)
    assert KeyedJaggedTensor([], none, lengths=none).stride() == 0
    assert KeyedJaggedTensor([], none, lengths=none, stride=3).stride() == 3
    assert KeyedJaggedTensor([], none, lengths=none, stride=3).to("cpu").stride() == 3
    with pytest.raises(InputError, match="lengths: wanted"):
        KeyedJaggedTensor([], VALUES, lengths=FOUR)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["a", "a"], r"wanted each name once; got \['a', 'a'\]"),
        ("ab", r"got the str 'ab'. Write keys=\['ab'\]"),
        (["a", 1], "wanted names; got 1"),
        ([b"a", "b"], "wanted names; got b'a'"),
    ],
)
def test_bad_keys_are_refused(keys, message):
    with pytest.raises(InputError, match=message):
        KeyedJaggedTensor(keys, VALUES, lengths=FOUR)
    with pytest.raises(InputError, match=message):
        KeyedTensor(keys, [1, 1], torch.ones(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_are_int32_or_int64(dtype):
    with pytest.raises(InputError, match="values: wanted a 1-D tensor of int32 or int64"):
        KeyedJaggedTensor(["a", "b"], VALUES.to(dtype), lengths=FOUR)
    with pytest.raises(InputError, match="values: wanted a 1-D tensor of int32 or int64; got 2-D"):
        KeyedJaggedTensor(["a", "b"], VALUES.view(3, 1), lengths=FOUR)
    assert KeyedJaggedTensor(["a", "b"], VALUES.int(), lengths=FOUR).values().dtype == torch.int32


def test_unknown_key_is_a_not_found_error(kjt):
    with pytest.raises(NotFoundError, match=r"\[KeyedJaggedTensor\] wanted one of a, b; got 'c'"):
        kjt["c"]
    with pytest.raises(KeyError):
        kjt["c"]


def test_parts_that_do_not_fit_are_refused(kjt):
    for segments in ([1], [1, 2], [3, -1]):
        with pytest.raises(InputError, match="segments: wanted sizes that sum to the 2 keys"):
            kjt.split(segments)
    for indices in ([2], [-1]):
        with pytest.raises(InputError, match="indices: wanted from 0 to 1"):
            kjt.permute(indices)
    with pytest.raises(InputError, match="wanted each name once"):
        kjt.permute([0, 0])
    with pytest.raises(InputError, match="indices_tensor: wanted the 2 indices of the list; got 1"):
        kjt.permute([1, 0], torch.tensor([1]))
    with pytest.raises(InputError, match="at least one KeyedJaggedTensor"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(InputError, match="at least one entry"):
        KeyedJaggedTensor.from_jt_dict({})
    with pytest.raises(InputError, match="wanted each name once"):
        KeyedJaggedTensor.concat([kjt, kjt])
    with pytest.raises(InputError, match=r"the same stride in all; got \[2, 1\]"):
        KeyedJaggedTensor.concat([kjt, keyed({"c": [[1]]}, 1, weighted=True)])
    with pytest.raises(InputError, match="weights in all or in none; got them in 1 of 2"):
        KeyedJaggedTensor.concat([kjt, keyed({"c": [[1], []]}, 2)])


def test_empty_keyed_jagged_tensors(kjt):
    empty = KeyedJaggedTensor.empty(is_weighted=True)
    assert empty.keys() == empty.length_per_key() == []
    assert empty.stride() == 0
    assert empty.values().dtype == torch.int64
    assert empty.lengths().dtype == torch.int32
    assert empty.offsets().tolist() == empty.offset_per_key() == [0]
    assert empty.weights().numel() == 0
    like = KeyedJaggedTensor.empty_like(kjt)
    assert like.keys() == []
    assert like.stride() == 2
    assert like.weights().dtype == kjt.weights().dtype
    assert like.lengths().dtype == kjt.lengths().dtype
    assert KeyedJaggedTensor.empty_like(keyed({"a": [[1]]}, 1), device="meta").device() == torch.device("meta")


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_to_moves_everything_and_keeps_what_is_known(by):
    one = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2, by=by, weighted=True).sync()
    moved = one.to("meta", non_blocking=True)
    assert moved.device() == torch.device("meta")
    assert {tensor.device.type for tensor in (moved.weights(), moved.lengths(), moved.offsets())} == {"meta"}
    assert moved.keys() == ["a", "b"]
    assert moved.stride() == 2
    assert moved.length_per_key() == [3, 1]
    assert one.to("cpu").values() is one.values()
    assert one.to("cpu", dtype=torch.float64).weights().dtype == torch.float64
    assert keyed({"a": [[1]]}, 1).to("cpu", dtype=torch.float64).weights_or_none() is None


def test_jagged_tensor_moves():
    moved = JaggedTensor(VALUES, torch.ones(3), FOUR).to("meta")
    assert {tensor.device.type for tensor in (moved.values(), moved.weights(), moved.lengths())} == {"meta"}


def test_two_dimensional_weights_go_with_their_ids():
    one = KeyedJaggedTensor(["a", "b"], VALUES, torch.arange(6.0).view(3, 2), FOUR)
    assert one["b"].weights().tolist() == [[4.0, 5.0]]
    assert one.permute([1, 0]).weights().tolist() == [[4.0, 5.0], [0.0, 1.0], [2.0, 3.0]]
    assert KeyedJaggedTensor.empty_like(one).weights().shape == (0, 2)


def test_repr_shows_what_was_given_even_if_it_is_wrong(kjt):
    shown = repr(kjt)
    assert shown.startswith("KeyedJaggedTensor(\n    keys=['a', 'b'],\n    values=tensor([1, 2, 3, 4]),\n")
    assert "stride=2" in str(kjt)
    assert "lengths=tensor([7])" in repr(JaggedTensor(VALUES, lengths=torch.tensor([7])))
    assert "key_dim=1" in repr(KeyedTensor(["a"], [2], torch.ones(1, 2)))


# KeyedTensor


@pytest.mark.parametrize("key_dim", [0, 1, 2])
def test_keyed_tensor_names_its_columns(key_dim):
    shape = [2, 3, 4]
    shape[key_dim] = 6
    values = torch.randn(shape)
    one = KeyedTensor(["a", "b", "c"], [1, 0, 5], values, key_dim)
    assert one.keys() == ["a", "b", "c"]
    assert one.length_per_key() == [1, 0, 5]
    assert one.offset_per_key() == [0, 1, 1, 6]
    assert one.key_dim() == key_dim
    assert one.values() is values
    assert one.device() == values.device
    pieces = values.split([1, 0, 5], key_dim)
    for key, piece in zip("abc", pieces, strict=True):
        assert torch.equal(one[key], piece)
        assert torch.equal(one.to_dict()[key], piece)
        assert one[key].untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert one.to("meta").device() == torch.device("meta")
    assert one.to("meta").key_dim() == key_dim


def test_keyed_tensor_without_keys():
    one = KeyedTensor([], [], torch.empty(3, 0))
    assert one.to_dict() == {}
    assert one.offset_per_key() == [0]


def test_from_tensor_list_joins():
    one = KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2, 1), torch.ones(2, 3)])
    assert one.length_per_key() == [1, 3]
    assert one.values().tolist() == [[0, 1, 1, 1]] * 2
    with pytest.raises(InputError, match="at least one"):
        KeyedTensor.from_tensor_list([], [])


def test_regroup_puts_columns_side_by_side_and_carries_the_gradient():
    first = torch.arange(6.0).view(2, 3).requires_grad_()
    second = torch.arange(4.0).view(2, 2).requires_grad_()
    tensors = [KeyedTensor(["a", "b"], [1, 2], first), KeyedTensor(["c"], [2], second)]
    left, right = KeyedTensor.regroup(tensors, [["c", "a"], ["b", "a"]])
    assert torch.equal(left, torch.cat([second, first[:, :1]], 1))
    assert torch.equal(right, torch.cat([first[:, 1:], first[:, :1]], 1))
    (left.sum() + right.sum()).backward()
    assert first.grad.tolist() == [[2, 1, 1]] * 2
    named = KeyedTensor.regroup_as_dict(tensors, [["c"], ["a"]], ["x", "y"])
    assert torch.equal(named["x"], second)
    assert torch.equal(named["y"], first[:, :1])


def test_regroup_refuses_what_is_ambiguous_or_missing():
    one, same = KeyedTensor(["a"], [1], torch.ones(2, 1)), KeyedTensor(["a"], [1], torch.ones(2, 1))
    with pytest.raises(NotFoundError, match="wanted one of a; got 'z'"):
        KeyedTensor.regroup([one], [["z"]])
    with pytest.raises(InputError, match="wanted each key in one tensor; got 'a' in 2"):
        KeyedTensor.regroup([one, same], [["a"]])
    with pytest.raises(InputError, match="at least one key in each"):
        KeyedTensor.regroup([one], [[]])
    with pytest.raises(InputError, match="the same key_dim in all"):
        KeyedTensor.regroup([one, KeyedTensor(["b"], [2], torch.ones(2, 1), key_dim=0)], [["a"]])
    with pytest.raises(InputError, match="wanted one for each of the 1 groups; got 2"):
        KeyedTensor.regroup_as_dict([one], [["a"]], ["x", "y"])
    with pytest.raises(InputError, match="wanted each name once"):
        KeyedTensor.regroup_as_dict([one], [["a"], ["a"]], ["x", "x"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a"], [1, 1], torch.ones(2, 2)), "length_per_key: wanted one for each of the 1 keys"),
        ((["a", "b"], [1, 2], torch.ones(2, 2)), "lengths that sum to the 2 columns of the values"),
        ((["a", "b"], [3, -1], torch.ones(2, 2)), "lengths that sum to the 2 columns of the values"),
        ((["a"], [2], torch.ones(2)), "key_dim: wanted from 0 to 0; got 1"),
        ((["a"], [2], torch.ones(2, 2), -1), "key_dim: wanted from 0 to 1; got -1"),
        ((["a"], [2], [[1.0, 2.0]]), "values: wanted a tensor; got list"),
    ],
)
def test_keyed_tensor_checks_its_shape(arguments, message):
    with pytest.raises(InputError, match=message):
        KeyedTensor(*arguments)


def test_unknown_column_is_a_not_found_error():
    with pytest.raises(NotFoundError, match=r"\[KeyedTensor\] wanted one of a; got 'b'"):
        KeyedTensor(["a"], [2], torch.ones(2, 2))["b"]


# Copies, pytrees, compiler


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"])
def test_copies_are_equal_and_apart(kjt, again):
    other = again(kjt.sync())
    other.values()[0] = 9
    assert kjt.values()[0] == 1
    assert other.keys() == kjt.keys()
    assert other.length_per_key_or_none() == [3, 1]
    assert torch.equal(other.lengths(), kjt.lengths())


@pytest.mark.parametrize("by", ["lengths", "offsets"])
def test_pytree_has_the_same_leaves_whatever_was_asked_before(by):
    one = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2, by=by)
    leaves, spec = pytree.tree_flatten(one)
    one.lengths(), one.offsets(), one.sync()
    again, same = pytree.tree_flatten(one)
    assert spec == same
    assert [leaf is None for leaf in leaves] == [leaf is None for leaf in again]


def test_pytree_comes_back_and_maps(kjt):
    jt, kt = kjt["a"], KeyedTensor(["x", "y"], [1, 2], torch.ones(2, 3))
    none = KeyedJaggedTensor([], VALUES[:0], lengths=FOUR[:0], stride=7)
    leaves, spec = pytree.tree_flatten({"kjt": kjt, "jt": jt, "kt": kt, "none": none})
    back = pytree.tree_unflatten(leaves, spec)
    assert repr(back) == repr({"kjt": kjt, "jt": jt, "kt": kt, "none": none})
    doubled = pytree.tree_map_only(Tensor, lambda leaf: leaf * 2, kt)
    assert isinstance(doubled, KeyedTensor)
    assert doubled["y"].tolist() == [[2.0, 2.0]] * 2
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


def test_pytree_leaves_have_paths(kjt):
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": kjt})[0]]
    assert paths == ["['x']._values", "['x']._weights", "['x']._lengths", "['x']._offsets"]
    assert [
        pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(KeyedTensor(["a"], [1], torch.ones(1, 1)))[0]
    ] == ["._values"]


@pytest.fixture
def compiled():
    """torch.compile without code generation: what is tested is the tracing. Counts the graphs."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def compile_(function, dynamic=None):
        return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend), graphs

    yield compile_
    torch._dynamo.reset()


def test_building_and_reading_inside_a_compiled_graph(compiled):
    def f(values, lengths, weights):
        one = KeyedJaggedTensor(["a", "b"], values, weights, lengths)
        return one.offsets(), one.lengths() * one.stride(), one.weights() * one.values()

    g, graphs = compiled(f, dynamic=True)
    for lengths in ([2, 1, 1, 1], [5, 0], [1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, 5, 0]):
        arguments = (torch.tensor([1, 2, 3, 4, 5]), torch.tensor(lengths, dtype=torch.int32), torch.ones(5))
        for expected, got in zip(f(*arguments), g(*arguments), strict=True):
            assert torch.equal(expected, got)
            assert expected.dtype == got.dtype
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_with_code_generation():
    def f(values, lengths):
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths).offsets()

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True)
    arguments = (torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 0, 1]))
    assert torch.equal(f(*arguments), g(*arguments))
    torch._dynamo.reset()


def test_as_argument_of_a_compiled_function_it_is_not_changed_and_not_recompiled(compiled):
    g, graphs = compiled(lambda one: one.offsets() + one.stride() + len(one))
    one = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2)
    for _ in range(3):
        assert g(one).tolist() == [4, 6, 7, 7, 8]
    assert one.offsets_or_none() is None
    assert len(graphs) == 1


def test_as_result_of_a_compiled_function(compiled):
    def f(values, lengths):
        one = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
        columns = KeyedTensor(["x", "y"], [1, 2], torch.ones(one.stride(), 3) * 2)
        return one, columns, KeyedTensor.regroup_as_dict([columns], [["y", "x"]], ["z"]), columns.to_dict()

    one, columns, grouped, split = compiled(f)[0](torch.tensor([1, 2, 3, 4]), torch.tensor([2, 1, 0, 1]))
    assert lists(one["a"]) == [[1, 2], [3]]
    assert columns["y"].tolist() == [[2.0, 2.0]] * 2
    assert grouped["z"].shape == (2, 3)
    assert list(split) == ["x", "y"]


def test_sizes_known_only_when_the_graph_runs_can_be_traced(compiled):
    def f(values, weights):
        kept = values > 1
        one = KeyedJaggedTensor(["a"], values[kept], weights[kept], lengths=kept.sum().view(1))
        return one.offsets(), one.values() * one.weights()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        offsets, products = compiled(f)[0](torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 4.0]))
    assert offsets.tolist() == [0, 2]
    assert products.tolist() == [4.0, 12.0]


def test_shapes_are_checked_inside_a_compiled_graph_too(compiled):
    g, _ = compiled(lambda values, lengths: KeyedJaggedTensor(["a", "b"], values, lengths=lengths).offsets())
    with pytest.raises(Exception, match="a multiple of the 2 keys; got 3"):
        g(VALUES, torch.tensor([1, 1, 1]))


class Offsets(torch.nn.Module):
    def forward(self, one: KeyedJaggedTensor) -> KeyedTensor:
        bags = one.lengths().view(len(one.keys()), one.stride()).t().float()
        return KeyedTensor(one.keys(), [1] * len(one.keys()), bags)


@pytest.mark.parametrize("strict", [False, True])
def test_export_takes_and_gives_them_with_a_dynamic_batch_and_survives_a_file(strict):
    example = keyed({"a": [[1, 2], [3]], "b": [[], [4]]}, 2)
    free = [{0: Dim.AUTO}, None, {0: Dim.AUTO}, None]  # values, weights, lengths, offsets
    program = torch.export.export(Offsets(), (example,), dynamic_shapes=(free,), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file)):
        out = exported.module()(keyed({"a": [[1], [], [2, 3]], "b": [[4], [5], []]}, 3))
        assert isinstance(out, KeyedTensor)
        assert out.keys() == ["a", "b"]
        assert out["a"].tolist() == [[1.0], [0.0], [2.0]]
        assert out["b"].tolist() == [[1.0], [1.0], [0.0]]
