"""What a lifecycle policy declares of the rows that it decides about."""

from typing import Protocol

from shoal.config.rows import Column


class Policy(Protocol):
    """A policy that keeps columns in every row. Policies that declare equal columns share them."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns, without the score, in the order in which they lie in a row."""
