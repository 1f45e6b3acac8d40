from functools import partial

from examples import tiers
from shoal.storage import check_storage


def test_all_three_end_with_the_same_rows(capsys):
    tiers.main()
    assert "bit for bit" in capsys.readouterr().out


def test_a_storage_of_ones_own_is_one(tmp_path):
    check_storage(partial(tiers.SqliteStorage, path=":memory:"), rows=100)
