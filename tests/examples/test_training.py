import math

import numpy as np
import pytest
import torch

import shoal
from examples.click_stream import ClickStream
from examples.training import Forgetting, auc, train


def test_auc_is_the_chance_that_a_click_scores_above_a_non_click():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 10, 200) / 10, rng.integers(0, 2, 200)  # with many ties
    pairs = [(a > b) + (a == b) / 2 for a in scores[labels == 1] for b in scores[labels == 0]]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
    assert math.isnan(auc(scores, np.ones(200)))


def test_a_pass_has_as_many_windows_as_wanted_and_ids_not_seen_for_a_while_lose_their_rows():
    stream = ClickStream(steps=400, batch=64, users=100, items=100)
    tables = [shoal.Table(name, dim=4, features=features) for name, features in stream.tables.items()]
    bags = shoal.EmbeddingBagCollection(tables)
    forgetting = Forgetting(bags, stream)
    seen, ends = [], 0
    for step, (batch, value) in enumerate(train(stream, bags, 4, seed=0)):
        forgetting.saw(batch.ids, step)
        seen.append(set(batch.ids["user"].values().tolist()))
        ends += value is not None
    forgetting.forget(step)
    assert ends == 48
    alive = set().union(*seen[step - stream.forget_after + 1 :])
    assert set(bags.table("user").keys().tolist()) == alive
    assert len(alive) < len(set().union(*seen))
    assert forgetting.rows_alive() == len(bags.table("user")) + len(bags.table("item")) < forgetting.ids_seen()
    assert forgetting.peak_bytes["user"] >= len(alive) * (4 * 4 + 4)


def test_both_passes_see_the_same_dense_weights():
    stream = ClickStream(steps=1, batch=16, users=20, items=20)
    first = []
    for _ in range(2):
        bags = shoal.EmbeddingBagCollection(
            [shoal.Table(name, dim=4, features=features) for name, features in stream.tables.items()]
        )
        torch.rand(3)
        first += [value for _, value in train(stream, bags, 4, seed=7)]
    assert first[0] == first[1]
