"""KeyedTensor: columns by name."""

import pytest
import torch

from shoal.errors import InputError, NotFoundError
from shoal.modules.jagged import KeyedTensor


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
