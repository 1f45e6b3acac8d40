"""Saving tables and loading them again, with other tiers, devices or ranks if need be."""

from shoal.checkpoint.loading import load
from shoal.checkpoint.recovery import recover
from shoal.checkpoint.saving import save

__all__ = ["load", "recover", "save"]
