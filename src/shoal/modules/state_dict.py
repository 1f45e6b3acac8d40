"""The state dict of a collection: its rows as tensors, of any number of groups."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.config import Table, format_size, parse_size
from shoal.errors import StateDictError
from shoal.modules.groups import Groups
from shoal.modules.habits import Habits
from shoal.modules.state import (
    is_weight_alone,
    load_content,
    names_as_attributes,
    save_content,
    state_names,
    state_shapes,
    trained_otherwise,
    warn_of_weights,
)
from shoal.table import Group, are_left_out, content_bytes


class TablesInStateDict(nn.Module):
    """A module whose state dict has the rows of tables. Each load replaces the rows of its tables."""

    # "embedding_bags" or "embeddings": the part of the state dict's keys before a table's name, as TorchRec has it.
    _state_name: ClassVar[str]
    name: str
    _configs: tuple[Table, ...]
    _group: Group | Groups
    _habits: Habits

    def __init__(self) -> None:
        super().__init__()
        self._state_dict_limit = parse_size("8GiB")
        self._is_strict = False  # while load_state_dict is

    @property
    def state_dict_limit(self) -> int:
        """The most bytes that `state_dict()` copies out of the tables; 8 GiB unless it is set."""
        return self._state_dict_limit

    @state_dict_limit.setter
    def state_dict_limit(self, limit: int | str) -> None:
        self._state_dict_limit = parse_size(limit, "state_dict_limit")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if are_left_out():
            return
        self._habits.before_state_dict()
        with self._group.reading_all():
            wanted = sum(content_bytes(table.config, len(table)) for table in self._group.tables)
            if wanted > self.state_dict_limit:
                raise StateDictError(
                    f"[{self.name}] a state dict would take {format_size(wanted)}; state_dict_limit is "
                    f"{format_size(self.state_dict_limit)}. Raise `state_dict_limit` if memory holds the copy."
                )
            for number, config in enumerate(self._configs):
                save_content(self._group.tables[number].content(), self._prefix(prefix, config), destination)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Replace the rows of the tables. With `strict`, entries that are missing or unknown raise first."""
        self._is_strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._is_strict = False

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if are_left_out():
            return
        names = [name for config in self._configs for name in state_names(config, self._prefix(prefix, config))]
        foreign = [
            config for config in self._configs if is_weight_alone(config, self._prefix(prefix, config), state_dict)
        ]
        whole = {name for config in foreign for name in state_names(config, self._prefix(prefix, config))}
        missing_keys += [name for name in names if name not in state_dict and name not in whole]
        others = {name: value for name, value in state_dict.items() if name not in names}
        super()._load_from_state_dict(others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        # As a part of a model it loads what is there, as all modules do: torch tells none of them whether it is strict.
        if self._is_strict:
            self._require_every_entry(state_dict, prefix, missing_keys, unexpected_keys)
        contents = {
            number: load_content(config, self._prefix(prefix, config), state_dict)
            for number, config in enumerate(self._configs)
        }
        with self._group.writing():
            self._group.replace({number: content for number, content in contents.items() if content})
        if foreign:
            warn_of_weights(self.name, [config.name for config in foreign])

    def _require_every_entry(
        self, state_dict: Mapping[str, Any], prefix: str, missing: Sequence[str], unexpected: Sequence[str]
    ) -> None:
        shapes = {name: getattr(value, "shape", None) for name, value in state_dict.items()}
        told = [trained_otherwise(config, self._prefix(prefix, config), shapes) for config in self._configs]
        otherwise = next((one for one in told if one is not None), None)
        if missing or unexpected:
            raise StateDictError(
                f"[{self.name}] wanted every entry of the tables and no other; got a state dict that lacks {missing} "
                f"and has the unknown {unexpected}{'.' if otherwise is None else f': {otherwise}'} Nothing was loaded."
            )
        if otherwise is not None:
            raise StateDictError(f"[{self.name}] {otherwise} Nothing was loaded. Make the table's optimizer as it was.")

    def state_shapes(self, prefix: str) -> list[dict[str, tuple[torch.dtype, tuple[int, ...] | None]]]:
        """For each table, the entries that it has in a state dict: type, and shape behind the rows, if it has rows."""
        return [state_shapes(config, self._prefix(prefix, config)) for config in self._configs]

    def require_loadable(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raise what `load_state_dict` would: StateDictError for wrong entries, CapacityError without room for them."""
        contents = [load_content(config, self._prefix(prefix, config), state_dict) for config in self._configs]
        with self._group.writing():
            for table, content in zip(self._group.tables, contents, strict=True):
                if content is not None:
                    table.require_room(len(content.keys))

    def _entry_names(self) -> SimpleNamespace:
        return names_as_attributes(name for config in self._configs for name in state_names(config, f"{config.name}."))

    def _prefix(self, prefix: str, config: Table) -> str:
        return f"{prefix}{self._state_name}.{config.name}."
