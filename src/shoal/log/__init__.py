"""The change log: commits of rows, atomic and in order, that checkpoints, replicas and recovery read."""

from shoal.log.changelog import ChangeLog
from shoal.log.commit import Commit
from shoal.log.opening import TornTailWarning

__all__ = ["ChangeLog", "Commit", "TornTailWarning"]
