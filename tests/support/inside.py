"""From a collection to the parts of it that have no public name: for tests of what nothing public shows."""

import threading


def group_of(collection):
    """Returns the group that holds the collection's tables."""
    return next(iter(collection.tables().values())).place[0]


def groups_of(collection):
    """Returns the groups that hold the collection's tables, in their order."""
    return collection._group.members


def tables_of(collection):
    """Returns the group's tables, in the order of their configs."""
    places = [handle.place for handle in collection.tables().values()]
    return [group.tables[number] for group, number in places]


def table_of(collection, number=0):
    """Returns one of the group's tables, by its number."""
    return tables_of(collection)[number]


def device_rows_of(collection):
    """Returns the rows of tables in device memory."""
    return group_of(collection)._rows


def live_leases_of(collection):
    """Returns the leases whose backward has not run, and may run yet."""
    return group_of(collection)._leases.live()


def staged_batches_of(collection):
    """Returns the staged batches, by the address of their keys."""
    return group_of(collection).staged


def nothing_is_staged(collection):
    """Returns whether no batch is staged, and no row waits for one."""
    lowest = [table.lowest for table in tables_of(collection)]
    return not staged_batches_of(collection) and not any(tier._staged for tier in lowest if tier is not None)


def locks_are_free(collection):
    """Returns whether another thread gets the group's locks, which it releases again."""
    group, got = group_of(collection), threading.Event()

    def get():
        with group.writing(), group.indexes.exclusive():
            got.set()

    thread = threading.Thread(target=get, daemon=True)
    thread.start()
    thread.join(120)
    return got.is_set()
