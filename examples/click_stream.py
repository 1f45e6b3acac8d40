"""A stream of clicks whose ids are born and die.

A fixed number of users and items is alive. Popularity is Zipf. Every hour some die, and others, with ids never seen
before and a hidden taste and appeal of their own, take their places. A click depends on how well the item's taste fits
the user's and the mood of the moment (a dense feature), on the appeal of both, and on the time of day: whatever is
hidden must be learned from the clicks on that very id.
"""

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

import shoal
from examples.dlrm import Batch

STEPS_PER_HOUR = 25
HISTORY = 8  # the last items a user clicked
FIT_WEIGHT, ITEM_WEIGHT, USER_WEIGHT = 1.0, 1.5, 1.0  # of the fit and the appeals, in the logit of a click
TASTE = 2  # dimensions of a taste and of a mood
USER_LIFE, ITEM_LIFE = 24, 12  # mean, in hours
DENSE_WEIGHTS = np.array([-0.5, 0.3, 0.4, 0.2])  # mood, then time of day


class Population:
    def __init__(self, rng: np.random.Generator, size: int, life_hours: float, zipf: float) -> None:
        self.rng, self.death_rate = rng, 1 / life_hours
        self.ids = np.empty(size, np.int64)
        self.taste = np.empty((size, TASTE))
        self.appeal = np.empty(size)
        self.born(np.arange(size))
        share = np.arange(1, size + 1) ** -zipf
        self.cumulative = np.cumsum(share / share.sum())

    def born(self, places: np.ndarray) -> None:
        n = len(places)
        self.ids[places] = self.rng.integers(-(2**63), 2**63 - 1, n)  # as if hashed from a string: any int64
        self.taste[places] = self.rng.normal(size=(n, TASTE))
        self.appeal[places] = self.rng.normal(size=n)

    def an_hour_passes(self) -> np.ndarray:
        """Returns the places that now belong to new ids."""
        places = np.flatnonzero(self.rng.random(len(self.ids)) < self.death_rate)
        self.born(places)
        return places

    def draw(self, n: int) -> np.ndarray:
        return np.searchsorted(self.cumulative, self.rng.random(n)).clip(max=len(self.ids) - 1)


class ClickStream:
    title = "Generated click stream"
    tables: ClassVar = {"user": ["user"], "item": ["item", "history"]}
    dense = len(DENSE_WEIGHTS)
    forget_after = 6 * STEPS_PER_HOUR
    time_unit = "hours"

    def __init__(
        self, steps: int = 2400, seed: int = 0, *, batch: int = 1024, users: int = 10_000, items: int = 10_000
    ) -> None:
        self.steps, self.seed, self.batch, self.users, self.items = steps, seed, batch, users, items

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng(self.seed)
        users = Population(rng, self.users, life_hours=USER_LIFE, zipf=0.8)
        items = Population(rng, self.items, life_hours=ITEM_LIFE, zipf=0.8)
        history = np.zeros((self.users, HISTORY), np.int64)
        clicked = np.zeros(self.users, np.int64)
        for step in range(self.steps):
            if step and step % STEPS_PER_HOUR == 0:
                clicked[users.an_hour_passes()] = 0
                items.an_hour_passes()
            hour = step / STEPS_PER_HOUR
            user, item = users.draw(self.batch), items.draw(self.batch)
            day = 2 * np.pi * hour / 24
            mood = rng.normal(size=(self.batch, TASTE))
            dense = np.hstack([mood, np.full((self.batch, 2), [np.sin(day), np.cos(day)])])
            fit = ((users.taste[user] + mood) * items.taste[item]).sum(1)
            appeal = ITEM_WEIGHT * items.appeal[item] + USER_WEIGHT * users.appeal[user]
            logit = FIT_WEIGHT * fit + appeal + dense @ DENSE_WEIGHTS - 1.0
            click = rng.random(self.batch) < 1 / (1 + np.exp(-logit))

            lengths = clicked[user].clip(max=HISTORY)
            past = history[user][np.arange(HISTORY) < lengths[:, None]]
            ids = shoal.KeyedJaggedTensor(
                keys=["user", "item", "history"],
                values=torch.from_numpy(np.concatenate([users.ids[user], items.ids[item], past])),
                lengths=torch.from_numpy(np.concatenate([np.ones(2 * self.batch, np.int64), lengths])),
            )
            yield Batch(
                labels=torch.from_numpy(click.astype(np.float32)),
                dense=torch.from_numpy(dense.astype(np.float32)),
                ids=ids,
                time=hour,
            )
            user, item = user[click], item[click]
            history[user, clicked[user] % HISTORY] = items.ids[item]
            clicked[user] += 1  # of two clicks by one user in a batch, one is remembered
