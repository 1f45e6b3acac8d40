"""KeyedJaggedTensor against its plain definition: lists of lists by key."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.batches import random_kjt
from support.jagged_lists import FOUR, INDEX_DTYPES, VALUES, batches, flat, jagged, keyed, lists

from shoal.errors import InputError, NotFoundError
from shoal.modules.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor


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


def test_lengths_per_key_are_those_of_the_offsets_that_a_lookup_reads():
    """Tensors are not to be changed; where they were, what was asked before and after still fits together."""
    for first in (KeyedJaggedTensor.offsets, KeyedJaggedTensor.sync):
        one = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 1, 0, 1]))
        first(one)
        one.lengths()[1:3] = torch.tensor([0, 1])
        for same in (one, one.to("cpu"), copy.deepcopy(one)):
            assert same.offsets()[::2].diff().tolist() == same.length_per_key() == [3, 1]


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


@pytest.mark.parametrize("strides", [(2, 2), (3, 1), (0, 2)])
def test_what_two_ranks_exchange_makes_a_batch_of_both(strides):
    parts = [random_kjt(["a", "b"], bags=stride, seed=n, weighted=True) for n, stride in enumerate(strides)]
    tensors = [torch.cat(pair) for pair in zip(*(part.dist_tensors() for part in parts), strict=True)]
    first, second = strides
    blocks = torch.arange(2 * first + 2 * second).split([first, first, second, second])  # a, b; a, b
    order = torch.tensor([0, 2, 1, 3]) if first == second else torch.cat([blocks[at] for at in (0, 2, 1, 3)])
    made = KeyedJaggedTensor.dist_init(["a", "b"], tensors, False, 2, order, strides)
    assert made.stride() == sum(strides)
    for key in ("a", "b"):
        for kind in ("values", "weights", "lengths"):
            wanted = torch.cat([getattr(part[key], kind)() for part in parts])
            assert torch.equal(getattr(made[key], kind)(), wanted)


def test_an_exchange_of_a_variable_stride_is_refused():
    tensors = random_kjt(["a"]).dist_tensors()
    with pytest.raises(InputError, match="same stride for all keys"):
        KeyedJaggedTensor.dist_init(["a"], tensors, True, 1, None, [4])
    with pytest.raises(InputError, match="lengths, values and perhaps weights; got 1"):
        KeyedJaggedTensor.dist_init(["a"], tensors[:1], False, 1, None, [4])


def test_sizes_in_bytes_are_of_what_was_given():
    batch = random_kjt(["a", "b"], bags=3, weighted=True)
    batch.offsets()
    assert batch.size_in_bytes() == 12 * batch.values().numel() + 8 * 6
    assert batch["a"].size_in_bytes() == 12 * batch["a"].values().numel() + 8 * 3
    assert KeyedTensor(["a"], [3], torch.zeros(2, 3)).size_in_bytes() == 24
