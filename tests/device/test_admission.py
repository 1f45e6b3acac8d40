"""On a device no policy may say which keys get a row: kernels give every key its row."""

import pytest
from support.device_tables import on_device
from support.inside import group_of

from shoal import Table
from shoal.errors import ConfigError


def test_a_policy_is_refused_rather_than_ignored():
    class Never:
        def admits(self, candidates):
            return candidates.keys != candidates.keys

    group = group_of(on_device(Table("a", 4)))
    with pytest.raises(ConfigError, match="'a' by a policy"):
        group.admit_by(0, Never())
    group.admit_by(0, None)
