"""What a table's policies remember is part of what a commit keeps of it."""

import json

import pytest
from support.logged import made, train

import shoal
from shoal.errors import InputError
from shoal.log.commit import TableCommit

STATE = {"due": 3, "cutoffs": [0.25, -1.5], "histogram": {"8": 2}}


def remembered(bags, name):
    group, number = bags.table(name).place
    return group.tables[number].policy_state


@pytest.mark.parametrize("call", ["recover", "load"])
def test_a_commit_keeps_it_and_a_table_gets_it_back(tmp_path, call):
    bags = made()
    train(bags, range(2))
    remembered(bags, "b").update(STATE)
    if call == "load":
        shoal.save(tmp_path / "log", bags)
    else:
        with shoal.ChangeLog(tmp_path / "log") as log:
            log.commit(bags)
            train(bags, range(2, 3))
            log.commit(bags)  # which says nothing new of it
    other = made()
    remembered(other, "a")["old"] = 1
    getattr(shoal, call)(tmp_path / "log", other)
    assert remembered(other, "b") == STATE
    assert remembered(other, "a") == {} and remembered(other, "c") == {}
    remembered(other, "b")["cutoffs"].append(1)  # a table's own
    assert STATE["cutoffs"] == [0.25, -1.5]


def test_a_later_commit_may_change_it_and_may_remove_it(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        for state in ({}, {"due": 1}, {"due": 1}, {"due": 2}, {}):
            train(bags, range(1))
            remembered(bags, "a").clear()
            remembered(bags, "a").update(state)
            log.commit(bags)
            other = made()
            shoal.recover(tmp_path / "log", other)
            assert remembered(other, "a") == state


def test_a_frame_has_a_place_for_it_only_where_there_is_something():
    nothing, something = TableCommit(1, 2), TableCommit(1, 2, policies={"due": 1})
    assert "policies" not in nothing.to_json() and "policies" not in nothing.to_frame(None)
    assert "policies" not in nothing.to_frame(nothing) and "policies" not in something.to_frame(something)
    for before in (None, nothing, something):
        for now in (nothing, something):
            said = json.loads(json.dumps(now.to_frame(before)))
            assert TableCommit.from_json("here", said, before).policies == now.policies


def test_what_json_has_not_is_refused_before_anything_is_written(tmp_path):
    bags = made()
    remembered(bags, "a")["due"] = {1, 2}
    with shoal.ChangeLog(tmp_path / "log") as log, pytest.raises(InputError, match=r"'a'.*policies remember"):
        log.commit(bags)
    remembered(bags, "a").clear()
    with shoal.ChangeLog(tmp_path / "log") as log:
        assert log.commit(bags) == 1
