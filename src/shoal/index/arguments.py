"""What the index's kernels take, and what they want of a batch."""

from typing import NamedTuple

from shoal.ops.arguments import I32, I64, Int, Ints


class Batch(NamedTuple):
    """What a call of a program brings of a batch.

    `find_blocks`: programs of `find`. `walkers`: programs that walk a list whose length only the device knows. `stamp`:
    what the keys are stamped with. `slots`: one for each item.
    """

    n: Int
    batch: Int
    find_blocks: Int
    walkers: Int
    stamp: Int
    values: Ints
    offsets: Ints
    slots: I32


class FoundLists(NamedTuple):
    """The items that were not found (`lost`), whose they are (`lost_of`) and where each claimed an entry (`won_at`).

    `counts`: how long the list is, then the caller's own counts; all 0 before.
    """

    counts: I32
    lost: I32
    lost_of: I32
    won_at: I64


class Finding(NamedTuple):
    """A batch whose keys are found, and the lists that this makes."""

    batch: Batch
    lists: FoundLists


class Lost(NamedTuple):
    """The list of items that were not found, as kernels take it."""

    lost: I32
    lost_of: I32
    lost_count: I32


class Find(NamedTuple):
    """Arguments of `find`."""

    anchor: I32
    tables: I64
    values: Ints
    offsets: Ints
    tables_of: I32
    slots: I32
    features_of: I32
    tickets: I64
    lost: Lost
    looked: I64
    missed: I64
    bad_bags: I32
    n: Int
    batch: Int
    features: Int
    stamp: Int


class Claim(NamedTuple):
    """Arguments of `claim`."""

    anchor: I32
    tables: I64
    values: Ints
    lost: Lost
    won_at: I64
    refused: I32
    dummy: I32
    n: Int


class FindLost(NamedTuple):
    """Arguments of `find_lost`."""

    anchor: I32
    tables: I64
    values: Ints
    slots: I32
    lost: Lost
    n: Int


# ---- tables whose rows are in host memory, with an index of the keys above


class TierLists(NamedTuple):
    """The items that are not above, and the slots that are won there. `counts` of FoundLists ends with their lengths.

    Of the items (`asked`): whose they are, where their slot words below are, where each won an entry above. Of the
    slots (`seated`): where their rows are below, whose they are, where their slot words below are.
    """

    asked: I32
    asked_of: I32
    home_at: I64
    won_above: I64
    seated: I32
    seated_from: I32
    seated_of: I32
    seated_at: I64


class TierNumbers(NamedTuple):
    """Keys stamped with `pinned_from` or later are in use, or will be; those stamped before `held_from` are of no batch
    at work. `sweepers`: programs that go over all that is above. `movers`: programs that move rows."""

    pinned_from: Int
    held_from: Int
    sweepers: Int
    movers: Int


class Tiering(NamedTuple):
    """A batch of tables with tiers. `asked_count`, `seated_count`: how long the lists are."""

    batch: Batch
    found: FoundLists
    lists: TierLists
    numbers: TierNumbers
    asked_count: I32
    seated_count: I32


class Asked(NamedTuple):
    """The items that are not above, as kernels take them."""

    anchor: I32
    tables: I64
    tiers: I64
    values: Ints
    slots: I32
    asked: I32
    asked_of: I32
    asked_count: I32


class FindBelow(NamedTuple):
    """Arguments of `find_below`."""

    asked: Asked
    home_at: I64
    lost: I32
    lost_of: I32
    lost_count: I32
    missed: I64
    n: Int


class Sweep(NamedTuple):
    """Arguments of `take_victims` and `clean`, which go over the entries of the tables `numbers`."""

    anchor: I32
    tables: I64
    tiers: I64
    numbers: I64
    asked_count: I32


class Choose(NamedTuple):
    """Arguments of `choose`."""

    sweep: Sweep
    pinned_from: Int


class GoBack(NamedTuple):
    """Arguments of `go_back`."""

    sweep: Sweep
    dummy: I32


class ClaimAbove(NamedTuple):
    """Arguments of `claim_above`."""

    asked: Asked
    home_at: I64
    won_at: I64
    dummy: I32
    n: Int
    held_from: Int


class Seated(NamedTuple):
    """The slots that were won, as kernels take them."""

    seated: I32
    seated_from: I32
    seated_of: I32
    seated_at: I64
    seated_count: I32


class Seat(NamedTuple):
    """Arguments of `seat`."""

    asked: Asked
    home_at: I64
    won_at: I64
    seated: Seated
    n: Int
    stamp: Int


class Settle(NamedTuple):
    """Arguments of `settle`."""

    asked: Asked
    home_at: I64
    won_at: I64
    n: Int
    stamp: Int


class Pin(NamedTuple):
    """Arguments of `pin`."""

    anchor: I32
    asked_count: I32
    home_at: I64
    stamp: Int
