import numpy as np
import pytest
import torch

from examples.click_stream import HISTORY, STEPS_PER_HOUR, ClickStream


@pytest.fixture(scope="module")
def batches():
    return list(ClickStream(steps=30 * STEPS_PER_HOUR, batch=64, users=200, items=200))


def ids(batches, feature):
    return torch.cat([batch.ids[feature].values() for batch in batches])


def test_the_same_seed_gives_the_same_clicks_every_time():
    stream = ClickStream(steps=60, seed=3, batch=32, users=50, items=50)
    for first, second in zip(stream, stream, strict=True):
        assert torch.equal(first.labels, second.labels)
        assert torch.equal(first.dense, second.dense)
        assert torch.equal(first.ids.values(), second.ids.values())
        assert torch.equal(first.ids.lengths(), second.ids.lengths())
    other = next(iter(ClickStream(steps=1, seed=4, batch=32, users=50, items=50)))
    assert not torch.equal(other.ids.values()[:64], next(iter(stream)).ids.values()[:64])


def test_ids_are_born_and_die(batches):
    for feature in ("user", "item"):
        first_hour = set(ids(batches[:STEPS_PER_HOUR], feature).tolist())
        last_hour = set(ids(batches[-STEPS_PER_HOUR:], feature).tolist())
        assert len(last_hour - first_hour) > len(last_hour) / 2
        assert len(ids(batches, feature).unique()) > 2 * 200  # while no more than 200 are alive at a time


def test_within_an_hour_no_more_ids_than_are_alive_are_seen_and_a_few_are_seen_most(batches):
    _, counts = ids(batches[:STEPS_PER_HOUR], "item").unique(return_counts=True)
    assert len(counts) <= 200
    assert counts.sort(descending=True).values[:20].sum() > 0.25 * counts.sum()


def test_a_history_holds_items_that_were_shown_before(batches):
    shown = set()
    for batch in batches[:100]:
        assert batch.ids["history"].lengths().max() <= HISTORY
        assert set(batch.ids["history"].values().tolist()) <= shown
        shown |= set(batch.ids["item"].values().tolist())
    assert len(ids(batches, "history"))


def test_clicks_depend_on_the_item(batches):
    hour = batches[:STEPS_PER_HOUR]
    item, click = ids(hour, "item").numpy(), torch.cat([batch.labels for batch in hour]).numpy()
    _, which, shown = np.unique(item, return_inverse=True, return_counts=True)
    rate = np.bincount(which, weights=click) / shown
    chance = click.mean() * (1 - click.mean()) / shown
    often = shown >= 20
    assert rate[often].var() > 2 * chance[often].mean()
