"""What the users of a table need of it: small protocols, which the tables of both backends have."""

import inspect

import pytest

from shoal.table import protocols
from shoal.table.device.table import DeviceTable
from shoal.table.host.table import HostTable
from shoal.table.protocols import GroupTable

SMALL = [one for one in GroupTable.__mro__[1:] if one.__module__ == protocols.__name__]


def members(protocol):
    """The methods and attributes that a protocol itself names."""
    named = {name for name in vars(protocol) if not name.startswith("_") or name == "__len__"}
    return named | set(inspect.get_annotations(protocol))


def test_a_table_is_nothing_but_the_small_protocols():
    assert len(SMALL) > 5
    assert members(GroupTable) == set()


@pytest.mark.parametrize("protocol", SMALL, ids=lambda one: one.__name__)
def test_a_protocol_has_at_most_five_members(protocol):
    assert 1 <= len(members(protocol)) <= 5


@pytest.mark.parametrize("table", [HostTable, DeviceTable])
@pytest.mark.parametrize("protocol", SMALL, ids=lambda one: one.__name__)
def test_the_tables_of_both_backends_have_its_methods(protocol, table):
    methods = members(protocol) - set(inspect.get_annotations(protocol))
    assert all(hasattr(table, name) for name in methods)
