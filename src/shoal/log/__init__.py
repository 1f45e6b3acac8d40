"""The change log: commits of rows, atomic and in order, that checkpoints, replicas and recovery read."""

from shoal.log.changelog import ChangeLog, open_log
from shoal.log.commit import Commit
from shoal.log.opening import TornTailWarning
from shoal.log.reader import DivergedError, SnapshotWarning
from shoal.log.repair import RepairWarning

__all__ = ["ChangeLog", "Commit", "DivergedError", "RepairWarning", "SnapshotWarning", "TornTailWarning", "open_log"]
