"""Replacing the rows of tables that have no room for two sets of them: one table after the other."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from shoal.table.content import TableContent

if TYPE_CHECKING:
    from shoal.table.group import Group


class Replacement:
    """The replacement of some tables' rows. Tables that are not reached stay as they are; what it raises has a note
    that says which those are, and which are loaded or empty. The group's exclusive lock covers it."""

    def __init__(self, group: "Group", contents: Mapping[int, TableContent]) -> None:
        self._group = group
        self._contents = contents
        self._done: list[int] = []
        self._at: int | None = None  # the table that is being replaced
        self._is_empty = False

    def run(self, first: Callable[[list[int]], None] | None = None) -> None:
        """Replace the rows. `first` replaces other tables before them, all or none, and adds their numbers to a
        list."""
        group = self._group
        try:
            if first is not None:
                group.decided.do(first, self._done)
            for number, content in self._contents.items():
                self._is_empty = False
                self._at = number
                group.clear([number])
                self._is_empty = True
                group.tables[number].fill(content)
                self._done.append(number)
                self._at = None
        except BaseException as error:
            if group.decided.is_unfinished:  # an interrupt came
                group.decided.finish()
                self._is_empty = self._at is not None
            if note := self._note(error):
                error.add_note(note)
            raise

    def _note(self, error: BaseException) -> str:
        """What became of the tables, where an error does not say it by itself."""
        done, at = self._done, self._at
        names = {number: repr(self._group.tables[number].config.name) for number in (*done, *self._contents)}
        what = ""
        if at is not None and at not in done:
            is_empty = (self._is_empty or not isinstance(error, Exception)) and self._is_cleared(at)
            what = "is empty now" if is_empty else "could not be emptied, and may have lost rows"
            what = f"[table {names[at]}] it was being loaded, and {what}. Load it again."
        rest = [other for other in self._contents if other not in done and other != at]
        told = [
            f"{', '.join(names[one] for one in some)} {verb}."
            for some, verb in ((done, "did load"), (rest, "stayed as before"))
            if some and (what or (done and rest))
        ]
        if not what and not told:
            return ""
        return " ".join([what, *told] if what else [f"[{self._group.name}]", *told])

    def _is_cleared(self, number: int) -> bool:
        """Empty a table that was loaded in part. Returns whether that worked: the caller has another error to raise."""
        try:
            self._group.clear([number])  # also of rows that were staged meanwhile
        except Exception:
            return False
        return True
