"""Saving tables and having them again, in another layout of tiers, devices or ranks."""

from shoal.checkpoint.loading import load
from shoal.checkpoint.recovery import recover
from shoal.checkpoint.saving import save

__all__ = ["load", "recover", "save"]
