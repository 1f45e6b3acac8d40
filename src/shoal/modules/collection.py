"""What EmbeddingBagCollection and EmbeddingCollection share: tables behind an nn.Module."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal import torch_private
from shoal.config import Table
from shoal.config.checked import flag, integer
from shoal.config.dtypes import TORCH_WEIGHTS
from shoal.errors import (
    ConfigError,
    DeviceError,
    NotFoundError,
    ShoalError,
)
from shoal.modules.features import features_of, output_names
from shoal.modules.groups import Groups, open_groups
from shoal.modules.habits import Habits
from shoal.modules.lookup import Lookup
from shoal.modules.optimizer import TableOptimizer
from shoal.modules.scaling import ScaledLoss
from shoal.modules.state_dict import TablesInStateDict
from shoal.modules.torchrec import Defaults
from shoal.modules.tracing import require_no_recording
from shoal.modules.transfer import move_in_place
from shoal.table import (
    Batch,
    Group,
    Staging,
    TableHandle,
    TableStats,
    registry,
)

_counter = itertools.count()


class Collection(TablesInStateDict):
    """Tables, looked up together. Rows are not parameters: they grow, and are updated in the backward pass.

    `optimizer` shows the tables' settings to schedulers; `scaler` may be a torch.amp.GradScaler. `state_dict()` holds
    the rows as tensors, up to `state_dict_limit` bytes.
    """

    # The values of Table(pooling=) that it serves, and the class that serves the others.
    _poolings: ClassVar[tuple[str, ...]]
    _other: ClassVar[str]

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        device: str | torch.device | None,
        seed: int,
        name: str | None,
        output_dtype: torch.dtype,
        strict_features: bool,
        defaults: Defaults,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self._device = _device(where, device)
        self._configs = self._checked(tables, defaults)
        self._given = tuple(tables)  # TorchRec's models read their own configs again
        self._without_optimizer = defaults.without_optimizer(tables)
        seed = integer(where, "seed", seed, low=-(2**63), high=2**64 - 1)
        if output_dtype not in TORCH_WEIGHTS:
            raise ConfigError(f"[{where}] output_dtype must be float32, float16 or bfloat16; got {output_dtype}.")
        self._output_dtype = output_dtype
        self._strict_features = flag(where, "strict_features", strict_features)
        # One output for each feature of each table, in order.
        self._names = output_names(where, self._configs)
        self._dims = [config.dim for config in self._configs for _ in config.features]
        self._open(name, seed)

    def _checked(self, tables: Any, defaults: Defaults) -> tuple[Table, ...]:
        where = type(self).__name__
        if isinstance(tables, str) or not isinstance(tables, Sequence) or not tables:
            raise ConfigError(f"[{where}] tables must be a non-empty list of Table; got {tables!r}.")
        configs = defaults.tables(where, tables)
        for config in configs:
            if not isinstance(config, Table):
                raise ConfigError(f"[{where}] tables must be Table values; got {config!r}.")
            if config.pooling not in self._poolings:
                raise ConfigError(
                    f"[{where}] table {config.name!r} must have pooling {' or '.join(map(repr, self._poolings))}; got "
                    f"{config.pooling!r}, which is {self._other}'s."
                )
        names = [config.name for config in configs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"[{where}] tables must have different names; got {name!r} more than once.")
        return configs

    def _open(self, name: str | None, seed: int) -> None:
        where = type(self).__name__
        if name is None:
            name = next(free for free in (f"{where}-{n}" for n in _counter) if registry.is_free(free))
        elif not isinstance(name, str) or not name:
            raise ConfigError(f"[{where}] name must be a non-empty str; got {name!r}.")
        elif not _becomes_free(name):
            raise ConfigError(
                f"[{where}] name must be free; a live collection is called {name!r} already. In a notebook, delete it "
                f"before the cell runs again, and all that holds its tables: the model, outputs and losses without a "
                f"backward, table() handles. %xdel bags deletes results that the notebook keeps, too, and %xdel _ one "
                f"without a name; it keeps the last error until the next one. Or leave name= out."
            )
        self.name = name
        self._make_group(seed % 2**64)

    def _make_group(self, seed: int) -> None:
        # Not before it is open: where that fails, the one before stays.
        self._group = open_groups(self.name, self._configs, seed, self._device)
        with torch.inference_mode(False):  # tensors that are born in it could not be used outside
            self._token = torch.zeros(1, dtype=torch.float32, device="cpu")
            self._update_token = torch.zeros(1, dtype=torch.float32, device="cpu")
            # Autograd calls back only where something requires a gradient; this is no parameter, and gets none.
            self._anchor = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True)
        changeable = any(table.optimizer_hyper for table in self._group.tables)
        self._optimizer = TableOptimizer(self._group) if changeable else None
        self._scaler: torch.amp.GradScaler | None = None
        self._habits = Habits(type(self).__name__, self.name, self._group, self._without_optimizer)
        self._group.habits = self._habits

    def _make_anew(
        self, configs: Sequence[Table], device: torch.device, without_optimizer: tuple[str, ...] | None = None
    ) -> None:
        """Replace the tables by ones of the same names, under the collection's name and seed.

        REQUIRES: no table has a row, and `optimizer` was not asked for. Handles of the old tables are refused from here
        on.
        """
        before, old, scaler = (self._configs, self._device, self._without_optimizer), self._group, self._scaler
        old.retire(f"[{self.name}] these tables were made anew since. Call table() again.")
        self._configs, self._device = tuple(configs), device
        if without_optimizer is not None:
            self._without_optimizer = without_optimizer
        try:
            self._make_group(old.seed)
        except BaseException:
            self._configs, self._device, self._without_optimizer = before
            self._make_group(old.seed)
            self.scaler = scaler
            raise
        self.scaler = scaler

    # ---- tables

    def table(self, name: str) -> TableHandle:
        """Returns the table of that name: to look at its rows, write them or erase them."""
        number = self._group.number_of(name)
        if number is None:
            names = ", ".join(repr(config.name) for config in self._configs)
            raise NotFoundError(f"[{self.name}] has the tables {names}; got {name!r}.")
        return TableHandle(*self._group.place_of(number))

    def tables(self) -> dict[str, TableHandle]:
        """Returns all tables, by name."""
        return {config.name: TableHandle(*self._group.place_of(number)) for number, config in enumerate(self._configs)}

    @property
    def device(self) -> torch.device:
        """The device on which the rows are."""
        return self._group.device

    def extra_repr(self) -> str:
        return "\n".join(
            f"{config.name}: dim={config.dim}, pooling={config.pooling}, features={list(config.feature_names)}, "
            f"optimizer={type(config.optimizer).__name__}, rows={len(handle)}"
            for config, handle in zip(self._configs, self.tables().values(), strict=True)
        )

    def stats(self) -> dict[str, TableStats]:
        """Returns rows, bytes and counters of every table and its tiers, by the table's name."""
        return {name: handle.stats() for name, handle in self.tables().items()}

    def move_here(self, features: Any) -> Callable[[], None] | None:
        """Move a batch of the host to a GPU's tables, in place. Returns a function that moves it back, if it moved.

        For `shoal.prefetch`; a lookup does not need it.
        """
        features = features_of(type(self).__name__, features)
        return move_in_place(features, self.device) if self.device.type == "cuda" else None

    def stage(self, features: Any) -> Staging | None:
        """Begin to bring the rows of a batch to the top tier before its lookup, as `shoal.prefetch` does.

        REQUIRES: the batch is on the tables' device.
        """
        features = features_of(type(self).__name__, features)
        return self._group.stage(Batch(list(features.keys()), features.values(), features.offsets()))

    def _as_given(self) -> list[Any]:
        """Returns TorchRec's configs, which its models read again, and Tables that know how many rows they have."""
        return [
            config.counted_by(partial(_rows_of, weakref.ref(self._group), number))
            if isinstance(given, Table)
            else given
            for number, (given, config) in enumerate(zip(self._given, self._configs, strict=True))
        ]

    # ---- optimizers, scalers, devices: what the rest of torch asks

    @property
    def optimizer(self) -> TableOptimizer:
        """The tables' optimizers for schedulers: a param group for each table that has settings, with its name."""
        if self._optimizer is None:
            raise ConfigError(f"[{self.name}] no table has an optimizer with settings: there is nothing to schedule.")
        if self.device.type == "meta":
            raise DeviceError(
                f"[{self.name}] wanted tables with rows to schedule; these are on meta, and their optimizer is "
                f"made with them. Call to_empty(device='cpu') or to_empty(device='cuda') first."
            )
        self._group.settings_may_change = True
        return self._optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The torch.amp.GradScaler that scales the loss, or None.

        Set it wherever one does: rows are updated in the backward pass, before the scaler could unscale their
        gradients, so the tables must know the scale. A backward that overflows leaves the rows as they were.
        """
        return self._scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise ConfigError(f"[{self.name}] scaler must be a torch.amp.GradScaler or None; got {scaler!r}.")
        self._scaler = scaler
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        self._group.loss_scale = None if enabled is None else ScaledLoss(enabled, self._optimizer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        try:
            try:
                probe = fn(torch.zeros(1, dtype=torch.float32, device=self.device))
            except NotImplementedError:
                if self.device.type != "meta":
                    raise
                # torch copies nothing out of meta. Tables there have no rows, so there is nothing to copy.
                probe = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
        except (AssertionError, RuntimeError) as error:  # as torch says that there is no such device
            raise DeviceError(
                f"[{self.name}] tables live on {self.device} and stay there: move the rest of the model; {error}."
            ) from error
        if self.device.type == "meta" and probe.device.type != "meta" and probe.dtype == torch.float32:
            self._make_anew(self._configs, probe.device)
        self._require_stay(probe.device)
        if probe.dtype != torch.float32:
            raise ConfigError(
                f"[{self.name}] rows keep their type when a module is cast; got {probe.dtype}. Table(dtype=...) sets "
                f"it, and output_dtype= the output's. Cast the other modules, not this one."
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _require_stay(self, device: torch.device) -> None:
        if device != self.device and device.type == "meta":
            raise DeviceError(
                f"[{self.name}] tables live on {self.device} and do not move; got meta, which would drop their rows. "
                f"For shapes alone make another collection with device='meta'."
            )
        if device != self.device:
            raise DeviceError(
                f"[{self.name}] tables live on {self.device} and do not move; got {device}. Make the collection with "
                f"device={str(device)!r} and load its state dict, or keep it here: move the rest of the model, and its "
                f"output with .to({str(device)!r})."
            )

    def check(self) -> None:
        """Raise errors of the device that were not raised yet. Waits for the device; on cpu it has nothing to do."""
        self._group.check()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if not requires_grad:
            raise ConfigError(
                f"[{self.name}] rows are no parameters, so this would not freeze them. Call eval(), or set "
                f"Table(optimizer=None) or Feature(mode='read')."
            )
        return super().requires_grad_(requires_grad)

    def __prepare_scriptable__(self) -> Any:
        """What torch.jit.script asks of every module of a model, before it looks at any."""
        raise ConfigError(
            f"[{self.name}] torch.jit.script cannot have tables, which grow outside of its types. Use torch.compile to "
            f"train or torch.export in eval(), or script the other modules of the model one by one."
        )

    def _lookup(self, features: Any, training: bool) -> Lookup:
        names = list(features.keys())
        if self._strict_features:
            self._require_known(names)
        if torch.compiler.is_compiling():
            return Lookup(self._group.name, names, training, self._output_dtype)
        require_no_recording(self.name)
        self._habits.before_lookup(training, torch.is_grad_enabled())
        counts = None
        if self.device.type != "cpu":
            counts = getattr(features, "length_per_key_or_none", lambda: None)()
        return Lookup(self._group.name, names, training, self._output_dtype, counts, self._group, self._habits)

    def _require_known(self, names: Sequence[str]) -> None:
        known = {name for config in self._configs for name in config.feature_names}
        if unknown := [name for name in names if name not in known]:
            raise NotFoundError(
                f"[{self.name}] strict_features=True: no table has the feature {', '.join(map(repr, unknown))} of the "
                f"batch; the tables have {', '.join(map(repr, sorted(known)))}. Leave it out, or name it in a Table's "
                f"features."
            )

    def _token_now(self, training: bool) -> Tensor:
        """Returns the tensor that operators declare as changed: see table/ops.py."""
        if not torch_private.is_exporting():
            return self._token
        if training:
            raise ConfigError(f"[{self.name}] torch.export wants a model that does not train. Call eval() first.")
        # A program may not change its constants. A token of its own for each run is enough to read.
        return torch.zeros(1, dtype=torch.float32, device="cpu")

    # ---- copying

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        own = {"_group", "_token", "_update_token", "_anchor", "_optimizer", "_scaler", "_habits", "name"}
        for attribute, value in self.__dict__.items():
            if attribute not in own:
                made.__dict__[attribute] = copy.deepcopy(value, memo)
        made._open(None, self._group.seed)
        for config, table in zip(self._configs, made._group.tables, strict=True):
            if len(table):  # what a user's storage has would be overwritten, and is the original's
                raise ConfigError(
                    f"[table {config.name!r}] deepcopy: wanted what makes its lowest tier to make another, empty one; "
                    f"got one with {len(table)} rows. Name other tiers and load a checkpoint, or have it open another "
                    f"place each time."
                )
        if self.device.type == "meta":
            made.scaler = self.scaler
            return made
        with self._group.reading_all():
            contents = {n: table.content() for n, table in enumerate(self._group.tables)}
        with made._group.writing():
            made._group.replace(contents)
        if self._optimizer is not None:
            made.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        # The scaler belongs to the loss, not to the tables: a loss that reaches both has one.
        made.scaler = self.scaler
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShoalError(
            f"[{self.name}] a collection is not pickled: its rows live outside of Python. Save state_dict(), or copy "
            f"it with copy.deepcopy."
        )


def _rows_of(group: "weakref.ref[Group | Groups]", number: int) -> int:
    """The rows of a table whose config may outlive it: then there are none."""
    alive = group()
    return 0 if alive is None else len(TableHandle(*alive.place_of(number)))


def _becomes_free(name: str) -> bool:
    """Whether no live group has the name, once garbage is collected: a cycle may keep one that no code can reach."""
    if not registry.is_free(name):
        gc.collect()
    return registry.is_free(name)


def _device(where: str, device: Any) -> torch.device:
    try:
        return torch.device("cpu" if device is None else device)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"[{where}] device must be a torch.device or its name; got {device!r}.") from error
