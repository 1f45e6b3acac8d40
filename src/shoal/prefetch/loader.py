"""A loader whose batches find their rows in the top tier."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from shoal.config.checked import integer
from shoal.errors import ConfigError, InputError, ShoalError
from shoal.prefetch.run import Run
from shoal.table import StagedTogether, Staging, collections_in
from shoal.table.lower.threads import IoThreads

BatchT = TypeVar("BatchT")

_WHAT_TO_PASS = "Pass prefetch(..., features=a function that finds it in a batch), such as lambda batch: batch[0]."
# I/O threads for second and further collections: of up to eight batches, mostly of two or three collections.
_MOST_IO_THREADS = 16


class Stages(Protocol):
    """What prefetch calls of a collection."""

    @property
    def device(self) -> torch.device:
        """Where its rows are."""

    def move_here(self, features: Any) -> Callable[[], None] | None:
        """Move a batch of the host to a device, in place. If it moved, returns a function that moves it back."""

    def stage(self, features: Any) -> Staging | None:
        """Begin to bring a batch's rows to the top tier."""


class _Moved:
    """The functions that move the batches of one pass back to the host, in the order of the batches."""

    def __init__(self) -> None:
        self._batches: deque[list[Callable[[], None]]] = deque()
        self._lock = threading.RLock()  # a garbage collection may close the pass in the thread that holds it
        self._is_closed = False

    def add(self, moved: list[Callable[[], None]]) -> None:
        """Add those of a batch that was moved. After the pass they are called at once."""
        with self._lock:
            if not self._is_closed:
                self._batches.append(moved)
                return
        self._let_go(moved)

    def let_go(self) -> None:
        """Move the oldest batch back: the loop is done with it."""
        self._let_go(self._batches.popleft())

    def close(self) -> None:
        """Move all batches back: the loop has ended."""
        with self._lock:
            self._is_closed = True
        while self._batches:
            self.let_go()

    @staticmethod
    def _let_go(moved: list[Callable[[], None]]) -> None:
        for let_go in moved:
            let_go()


class Prefetch(Generic[BatchT]):
    """What `prefetch` returns: an iterable over the loader's batches, as often as the loader can be iterated over."""

    def __init__(
        self, loader: Iterable[BatchT], bags: Sequence[Stages], features: Callable[[BatchT], Any] | None, depth: int
    ) -> None:
        self._loader = loader
        self._bags = bags
        self._features = features
        self._depth = depth

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[BatchT]:
        devices = {bags.device: None for bags in self._bags if bags.device.type == "cuda"}
        moved = _Moved()
        stage = partial(self._stage, IoThreads(_MOST_IO_THREADS), moved)
        run: Run[BatchT] | None = None
        try:
            run = Run(iter(self._loader), stage, self._depth, list(devices))
            while True:
                try:
                    batch = run.next()
                except StopIteration:
                    return
                yield batch
                moved.let_go()
        finally:
            if run is not None:
                run.close()
            moved.close()

    def _stage(self, io_threads: IoThreads, moved: _Moved, batch: BatchT) -> Staging | None:
        found = batch if self._features is None else self._features(batch)
        each = list(found) if isinstance(found, (list, tuple)) else [found] * len(self._bags)
        if len(each) != len(self._bags):
            raise InputError(
                f"[prefetch] features: wanted a KeyedJaggedTensor, or a list with one for each of the "
                f"{len(self._bags)} collections; got a {type(found).__name__} of {len(each)}. {_WHAT_TO_PASS}"
            )
        for features in each:
            if not callable(getattr(features, "lengths", None)):
                raise InputError(
                    f"[prefetch] features: wanted the KeyedJaggedTensor that a collection will be called with; got "
                    f"{type(features).__name__}. {_WHAT_TO_PASS}"
                )
        self._require_one_device(each)
        parts: list[Staging] = []
        let_go: list[Callable[[], None]] = []
        try:
            for bags, features in zip(self._bags, each, strict=True):
                with suppress(ShoalError):  # the lookup raises it too, where the user can handle it
                    if (back := bags.move_here(features)) is not None:
                        let_go.append(back)
                    if (part := bags.stage(features)) is not None:
                        parts.append(part)
        except BaseException:
            for part in parts:
                part.release()
            raise
        finally:
            moved.add(let_go)
        return StagedTogether(parts, io_threads) if parts else None

    def _require_one_device(self, each: Sequence[Any]) -> None:
        """Raise InputError for one batch that collections on several devices share."""
        for features in each:
            pairs = zip(self._bags, each, strict=True)
            devices = sorted({str(bags.device) for bags, other in pairs if other is features})
            if len(devices) > 1:
                raise InputError(
                    f"[prefetch] features: wanted a KeyedJaggedTensor for each device; got one for collections on "
                    f"{' and '.join(devices)}. Pass prefetch(..., features=a function that returns a list with one for "
                    f"each collection), and call each with its own."
                )


def _collections(bags: Any) -> list[Any]:
    """Returns the collections in `bags`, or the objects in it that can stage batches."""
    given = list(bags) if isinstance(bags, (list, tuple)) else [bags]
    wanted = (
        "[prefetch] bags: wanted an EmbeddingBagCollection or EmbeddingCollection, several, or a module that holds "
        "some; got"
    )
    if given and all(callable(getattr(one, "stage", None)) for one in given):
        return given
    try:
        found = collections_in(given)
    except TypeError as error:
        raise ConfigError(f"{wanted} {error}.") from None
    if not found:
        raise ConfigError(f"{wanted} {type(bags).__name__} without any.")
    return found


def prefetch(
    loader: Iterable[BatchT], bags: Any, features: Callable[[BatchT], Any] | None = None, depth: int = 2
) -> Prefetch[BatchT]:
    """The loader's batches, in order, with their rows brought to the top tier of `bags` ahead of the loop.

    bags: a collection, a list of several, or a module that holds some.
    features: finds a batch's KeyedJaggedTensor, the one that the collections will be called with, or a list with one
        for each; by default the batch is it.
    depth: how many batches are on their way at a time, of which at most eight are read at a time. One more than the
        number of steps that a read takes is enough. Their rows hold places in memory. Where no place is free, rows wait
        outside of the memory's budget (`ahead_bytes` in `stats()`); once these take 16 MiB, or a quarter of the budget,
        only the next batch is read.

    The loader runs in a thread, ahead of the loop, by `depth` batches and, where tables are in host memory, one more:
    one that draws from torch's global generator draws before the loop does. Give it a generator of its own. Where the
    loop is left early, batches that were taken from the loader are lost if it cannot be iterated over again, and the
    loop waits for a loader that is at work on a batch, up to ten seconds.

    A storage that fails here does not end the loop: the lookup reads from it again. A PrefetchWarning tells of the
    first failure, and `failures` in `stats()` counts all.

    For collections on a GPU, batches of the host are moved there, in place: the KeyedJaggedTensor that `features` finds
    has its tensors on the GPU until the loop goes on to the next batch, or is left. Then it has those of the host
    again, unless the loop has changed it. So a list of batches does not fill the GPU's memory. Collections on
    different devices need a KeyedJaggedTensor each: let `features` return a list. The loader's work on the GPU is on a
    stream of its own; the loop's stream waits for the batch it is given.
    """
    several = _collections(bags)
    depth = integer("prefetch", "depth", depth, low=1)
    if features is not None and not callable(features):
        raise ConfigError(f"[prefetch] features: wanted a function of a batch; got {features!r}.")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"[prefetch] loader: wanted an iterable of batches; got {loader!r}.")
    return Prefetch(loader, several, features, depth)
