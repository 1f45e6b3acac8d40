"""The change log: commits of rows, atomic and in order, that checkpoints, replicas and recovery read."""

from shoal.log.changelog import ChangeLog, TornTailWarning
from shoal.log.commit import Commit

__all__ = ["ChangeLog", "Commit", "TornTailWarning"]
