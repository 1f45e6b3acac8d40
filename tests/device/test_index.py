"""The index in device memory against a dict, also with keys that were made to collide."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.device_tables import DEVICE, here, in_hbm

from shoal import Table
from shoal.index.device import ENTRIES
from shoal.index.kernels.buckets import HOLE, REACH
from shoal.ops.birth.reference import mix64
from shoal.table.device.rows import DeviceRows

_UNDO = (pow(0xFF51AFD7ED558CCD, -1, 2**64), pow(0xC4CEB9FE1A85EC53, -1, 2**64))


def key_of_hash(hash):
    """The key whose hash it is."""
    x = hash ^ (hash >> 33)
    x = x * _UNDO[1] % 2**64
    x ^= x >> 33
    x = x * _UNDO[0] % 2**64
    x ^= x >> 33
    assert mix64(x) == hash
    return x - 2**64 if x >= 2**63 else x


def colliding(n, home=2**31, first=0):
    """Keys of one home bucket."""
    return [key_of_hash(home << 32 | number) for number in range(first, first + n)]


def rows(*names):
    configs = [in_hbm(Table(name, 2, optimizer=None)) for name in names or ("a",)]
    return DeviceRows(configs, 0, torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device(DEVICE))


def slots_of(held, keys, table=0):
    return held.index.find_keys(table, here(*keys, dtype=torch.int64)).tolist()


def insert(held, keys, table=0):
    return dict(zip(keys, held.upsert(table, here(*keys, dtype=torch.int64)).tolist(), strict=True))


def assert_holds(held, wanted, table=0):
    """The index has these keys with these slots, and no other."""
    keys, slots = held.index.entries(table)
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == wanted
    assert len(keys) == len(wanted) == int(held.ledger.keys[table])
    assert slots_of(held, list(wanted), table) == list(wanted.values())


def test_an_empty_index_finds_nothing():
    held = rows()
    assert slots_of(held, [0, -1, 5]) == [-1, -1, -1]
    assert held.index.erase(0, here(1, 2)).tolist() == [-1, -1]
    assert_holds(held, {})


def test_tables_do_not_see_each_others_keys():
    held = rows("a", "b")
    one, other = insert(held, [1, 2, 3], 0), insert(held, [3, 4], 1)
    assert not set(one.values()) & set(other.values())
    assert_holds(held, one, 0)
    assert_holds(held, other, 1)
    held.clear(0)
    assert_holds(held, {}, 0)
    assert_holds(held, other, 1)


def test_of_equal_keys_one_claims_an_entry():
    held = rows()
    held.make_room(held.room.births([64]))
    keys = here(*([5, 6, 5, 7, 5, 6] * 8))
    slots = held.insert(0, keys)
    wanted = dict(zip(keys.tolist(), slots.tolist(), strict=True))
    assert len(set(wanted.values())) == 3
    assert slots.tolist() == [wanted[key] for key in keys.tolist()]
    assert_holds(held, wanted)


def test_keys_that_collide_go_to_the_next_buckets():
    held = rows()
    keys = colliding(9 * ENTRIES + 2)
    held.index.reserve({0: 200})
    wanted = insert(held, keys[:-1])
    assert len(set(wanted.values())) == len(wanted)
    assert_holds(held, wanted)
    assert slots_of(held, keys[-1:]) == [-1]
    # Behind an erased key the others are still found, and its place is taken again.
    gone = keys[3:60:2]
    assert held.erase(0, here(*gone))[0].tolist() == [wanted.pop(key) for key in gone]
    assert_holds(held, wanted)
    assert slots_of(held, gone) == [-1] * len(gone)
    assert insert(held, keys[:3]) == {key: wanted[key] for key in keys[:3]}
    wanted |= insert(held, gone)
    assert_holds(held, wanted)


def test_keys_that_collide_survive_a_rehash():
    held = rows()
    held.index.reserve({0: 100})
    wanted = insert(held, [*colliding(2 * ENTRIES), 0, 1, -1, 2**63 - 1, -(2**63)])
    before = held.index.bytes(0)
    for keys in (300, 900):
        held.index.reserve({0: keys})
        assert_holds(held, wanted)
    assert held.index.bytes(0) > 2 * before


def test_a_home_in_the_last_bucket_goes_on_in_the_first():
    held = rows()
    held.index.reserve({0: 100})
    keys = colliding(ENTRIES + 9, home=2**32 - 1)
    wanted = insert(held, keys)
    assert_holds(held, wanted)


def test_a_hash_of_zero_is_a_key_like_others():
    held = rows()
    assert key_of_hash(0) == 0
    keys = [key_of_hash(hash) for hash in (0, 1, 2**32, 256, 257)]
    assert_holds(held, insert(held, keys))


@pytest.mark.slow
def test_more_colliding_keys_than_are_in_reach_are_refused_and_counted():
    held = rows()
    held.index.reserve({0: 4000})
    slots = held.upsert(0, here(*colliding((REACH.value + 1) * ENTRIES + 5)))
    assert int((slots < 0).sum()) == int(held.ledger.refused[0]) == 5


@settings(max_examples=10, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_it_agrees_with_a_dict(data):
    held, wanted = rows(), {}
    pool = [*range(30), *colliding(40), -1, 2**63 - 1, -(2**63)]
    some = st.lists(st.sampled_from(pool), unique=True, max_size=30)
    for _ in range(3):
        keys = data.draw(some, label="insert")
        for key, slot in insert(held, keys).items():
            assert wanted.setdefault(key, slot) == slot >= 0
        gone = data.draw(some, label="erase")
        slots, copies = held.erase(0, here(*gone, dtype=torch.int64))
        assert slots.tolist() == [wanted.pop(key) for key in gone if key in wanted]
        held.give(0, slots, copies)
        if data.draw(st.booleans(), label="grow"):
            held.index.reserve({0: held.index.capacity(0) + 1})
        assert_holds(held, wanted)
    assert len(set(wanted.values())) == len(wanted)


def test_only_buckets_that_were_full_have_holes_and_lose_them_when_built_anew():
    held = rows()
    held.index.reserve({0: 100})
    keys = colliding(2 * ENTRIES - 1)
    wanted = insert(held, keys)

    def holes():
        return int((held.index._buffers[0] == HOLE.value).sum())

    assert holes() == 0
    assert held.erase(0, here(*keys[1:-1]))[0].tolist() == [wanted.pop(key) for key in keys[1:-1]]
    assert ENTRIES - 2 <= holes() < ENTRIES + 1  # of the full bucket's keys; the other one is empty again
    assert_holds(held, wanted)
    held.tidy(0, held.index.capacity(0))  # as if more had come and gone
    assert holes() == 0
    assert_holds(held, wanted)
