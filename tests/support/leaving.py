"""A storage that goes away in the middle of an erase."""

from shoal.storage import MemoryStorage


class Leaving(MemoryStorage):
    """Erases half of the keys and goes away, once `is_leaving` is set; answers again once `is_gone` is not."""

    is_leaving = is_gone = False

    def _answers(self):
        if self.is_gone:
            raise ConnectionError("gone")

    def read(self, keys):
        self._answers()
        return super().read(keys)

    def keys(self):
        self._answers()
        return super().keys()

    def erase(self, keys):
        if self.is_leaving:
            self.is_gone = True
            super().erase(keys[: len(keys) // 2])
            raise ConnectionError("lost in the middle")
        return super().erase(keys)
