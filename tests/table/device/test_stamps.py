"""Numbers of batches, and the stamps that keys get for them."""

import itertools

from shoal.table.device.stamps import NO_BATCH, Stamps


def test_stamps_are_the_numbers_until_they_begin_anew():
    stamps = Stamps()
    assert [stamps.of(stamps.number()) for _ in range(3)] == [1, 2, 3]


def test_batches_that_are_kept_stay_in_order_and_before_those_that_come():
    stamps = Stamps()
    stamps._numbers = itertools.count(2**30 - 10)
    kept = [stamps.number() for _ in range(3)]
    assert stamps.begin_anew(reversed(kept)) == kept
    assert [stamps.of(number) for number in (*kept, stamps.number(), stamps.number())] == [1, 2, 3, 5, 6]
    assert stamps.begin_anew(kept[1:]) == [2, 3]
    assert [stamps.of(number) for number in (*kept[1:], stamps.number())] == [1, 2, 4]


def test_a_batch_that_was_numbered_and_not_known_when_stamps_began_anew_is_younger_than_those_that_were():
    stamps = Stamps()
    known, unknown, later = (stamps.number() for _ in range(3))
    stamps.begin_anew([known, later])
    assert stamps.of(known) < stamps.of(later) < stamps.of(unknown) < stamps.of(stamps.number())
    assert stamps.begin_anew([unknown, known]) == [1, 3]
    assert stamps.of(known) < stamps.of(unknown) < stamps.of(stamps.number())


def test_stamps_are_used_up_long_before_their_bits_are():
    stamps = Stamps()
    assert not stamps.are_used_up(2**30 - 1) and stamps.are_used_up(2**30)
    assert NO_BATCH == 2**31 - 1
