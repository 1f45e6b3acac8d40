"""A loader whose batches find their rows in the top tier.

One thread takes batches from the loader, up to `depth` ahead of the loop, and finds which rows are not in the top tier
(for a device, the threads that read do so, in turn); others read these, for several batches at a time, so that `depth`
hides a storage's latency; one more puts them there. Each goes on to the next batch meanwhile. They place, and nothing
else: with and without them a run is the same, bit for bit. A batch that could not be placed, for want of room or
because a disk failed, is handed on all the same: its lookup brings the rows itself, or says what is wrong.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from shoal.errors import ConfigError, ForkError, InputError, ShoalError
from shoal.prefetch.streams import Events, LoaderStreams
from shoal.table import Staging

BatchT = TypeVar("BatchT")

# How often a thread that waits for room looks whether there is some.
_LOOK_SECONDS = 0.02
# Batches that are read at a time.
_MOST_READERS = 8
# A loader that does not answer is left alone after so long; the other threads, which may wait for a lock that whoever
# closes has, sooner: they end when they can, and let go what they have.
_JOIN_SECONDS = 10.0
_JOIN_OTHERS_SECONDS = 1.0


class Stages(Protocol):
    """What is asked of a collection."""

    @property
    def device(self) -> torch.device:
        """Where its rows are."""

    def stage(self, features: Any) -> Staging | None:
        """Begin to bring a batch's rows up."""


class _Together:
    """One batch on its way to several collections."""

    def __init__(self, parts: Sequence[Staging]) -> None:
        self._parts = parts
        self.waits = any(part.waits for part in parts)

    def find(self) -> None:
        for part in self._parts:
            part.find()

    def may_read(self, is_first: bool) -> bool:
        return all(part.may_read(is_first) for part in self._parts)

    def read(self) -> None:
        for part in self._parts:
            part.read()

    def place(self, may_wait: Callable[[], bool]) -> None:
        for part in self._parts:
            part.place(may_wait)

    def release(self) -> None:
        for part in self._parts:
            part.release()


_running: "weakref.WeakSet[_Run[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Threads that come back from the core when the interpreter is going would end the process."""
    for run in list(_running):
        run.close()
        run.await_threads(_JOIN_SECONDS)


@dataclass(eq=False)
class _Ahead(Generic[BatchT]):
    """A batch on its way to the loop, and its rows to the top tier, if they are."""

    batch: BatchT
    placed: Staging | None
    ready: Events  # on devices
    is_between: bool = False  # the threads
    is_read: bool = False  # or was tried
    is_placed: bool = False  # or was tried

    def release(self) -> None:
        if self.placed is not None:
            self.placed.release()
            self.placed = None


class _Line(Generic[BatchT]):
    """Batches that wait for a thread. One is woken when one comes: others would take the loop's time."""

    def __init__(self, lock: threading.RLock) -> None:
        self.batches: deque[_Ahead[BatchT]] = deque()
        self.came = threading.Condition(lock)
        self.has_ended = False


class _Run(Generic[BatchT]):
    """One pass over the loader."""

    def __init__(
        self,
        batches: Iterator[BatchT],
        stage: Callable[[BatchT], Staging | None],
        depth: int,
        devices: Sequence[torch.device],
    ) -> None:
        self._batches = batches
        self._stage = stage
        self._depth = depth
        self._streams = LoaderStreams(devices)
        # What is found, read and ready: each thread takes from the one before.
        self._lock = threading.RLock()  # whoever collects garbage may hold it, and close
        self._found: _Line[BatchT] = _Line(self._lock)
        self._read: _Line[BatchT] = _Line(self._lock)
        self._ready: _Line[BatchT] = _Line(self._lock)
        self._taken = threading.Condition(self._lock)  # by the loop
        self._room = threading.Condition(self._lock)  # where rows can be placed; or the loop waits
        self._tried = threading.Condition(self._lock)  # to place a batch's rows
        self._ahead = 0  # batches that were taken from the loader, and not by the loop
        self._between = 0  # of these, those that are on their way from thread to thread
        self._in_use: _Ahead[BatchT] | None = None
        self._is_awaited = self._is_closed = False
        self._error: BaseException | None = None
        self._readers = min(depth, _MOST_READERS)
        self._finding = threading.Lock()  # by a reader: batches are found in their order
        self._process = os.getpid()
        works = [("find", self._find_all), *[("read", self._read_all)] * self._readers, ("place", self._place_all)]
        _running.add(self)
        self._threads = [
            threading.Thread(target=work, name=f"shoal-prefetch-{name}", daemon=True) for name, work in works
        ]
        for thread in self._threads:
            thread.start()

    @property
    def _lines(self) -> "tuple[_Line[BatchT], ...]":
        return self._found, self._read, self._ready

    # ---- the loop's side

    def next(self) -> BatchT:
        """The next batch; StopIteration at the end, or what the loader raised there."""
        if not self._is_own():
            raise ForkError(
                f"[prefetch] this loop belongs to process {self._process}, and so do its threads; this is its forked "
                f"child {os.getpid()}. Begin another one here."
            )
        self._let_go()
        with self._lock:
            self._is_awaited = True
            self._room.notify()
            self._ready.came.wait_for(lambda: self._ready.batches or self._ready.has_ended)
            self._is_awaited = False
            if not self._ready.batches:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            given = self._in_use = self._ready.batches.popleft()
            self._ahead -= 1
            self._taken.notify()
            coming = [ahead for ahead in self._ready.batches if not ahead.is_placed]
        self._streams.hand_over(given.batch, given.ready)
        for ahead in coming:
            self._bring(ahead)
        return given.batch

    def close(self) -> None:
        """End it, wherever it is."""
        if not self._is_own():
            return
        with self._lock:
            self._is_closed = True
            for waited in (self._taken, self._room, self._tried, *(line.came for line in self._lines)):
                waited.notify_all()
        try:
            self._join(self._threads[0], _JOIN_SECONDS)
            self.await_threads(_JOIN_OTHERS_SECONDS)
        finally:
            self._let_go()
            for line in self._lines:
                for ahead in line.batches:
                    ahead.release()
            self._streams.close()

    def await_threads(self, seconds: float) -> None:
        """Wait until they ended, or so long."""
        if not self._is_own():
            return
        end = time.monotonic() + seconds
        for thread in self._threads:
            self._join(thread, max(end - time.monotonic(), 0.0))

    def _is_own(self) -> bool:
        """Whether this process made it. In a child a lock may be held for ever, by a thread that it does not have."""
        return os.getpid() == self._process

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        if thread is not threading.current_thread():  # who collects garbage may be any of them
            thread.join(seconds)

    def _let_go(self) -> None:
        if self._in_use is not None:
            self._in_use.release()
            self._streams.take_back(self._in_use.batch)
            self._in_use = None

    # ---- the threads' side

    def _find_all(self) -> None:
        try:
            with self._streams.current():
                while self._may_go_on():
                    try:
                        batch = next(self._batches)
                    except StopIteration:
                        break
                    placed = self._stage(batch)
                    self._send(_Ahead(batch, placed, self._streams.ready()))
        except StopIteration as error:  # not the loader's: in the loop it would look like its end
            self._error = RuntimeError("[prefetch] features raised StopIteration.")
            self._error.__cause__ = error
        except BaseException as error:
            self._error = error
        finally:
            self._end(self._found)

    def _send(self, ahead: _Ahead[BatchT]) -> None:
        """To the other threads or, where nothing has to be waited for, to the loop: threads that take turns with it
        would cost it more time than the work."""
        with self._lock:
            overtakes = self._between > 0
        waits = ahead.placed is not None and ahead.placed.waits
        self._put(self._found if overtakes or waits else self._ready, ahead)

    def _bring(self, ahead: _Ahead[BatchT]) -> None:
        """Place the rows of a batch that waits for nothing."""
        ahead.is_placed = True
        self._work(ahead, lambda placed: placed.read())
        self._work(ahead, lambda placed: placed.place(lambda: False))

    def _may_go_on(self) -> bool:
        with self._lock:
            self._taken.wait_for(lambda: self._is_closed or self._ahead < self._depth)
            self._ahead += 1
            return not self._is_closed

    def _put(self, where: _Line[BatchT], ahead: _Ahead[BatchT]) -> None:
        with self._lock:
            if not self._is_closed:
                where.batches.append(ahead)
                self._between += (where is self._found) - (ahead.is_between and where is self._ready)
                ahead.is_between = where is not self._ready
                where.came.notify()
                return
        ahead.release()  # nobody will look

    def _end(self, where: _Line[BatchT]) -> None:
        with self._lock:
            where.has_ended = True
            where.came.notify()

    def _read_all(self) -> None:
        """Read what is found. Batches are in the next line from their begin on, or one that is read sooner than another
        would overtake it."""
        found, read = self._found, self._read
        while True:
            with self._finding:
                with self._lock:
                    found.came.wait_for(lambda: found.batches or found.has_ended or self._is_closed)
                    if self._is_closed or not found.batches:
                        break
                    ahead = found.batches.popleft()
                    read.batches.append(ahead)
                self._work(ahead, lambda placed: placed.find())
            if self._may_read(ahead):
                self._work(ahead, lambda placed: placed.read())
            with self._lock:
                ahead.is_read = True
                read.came.notify()
        with self._lock:
            self._readers -= 1
            found.came.notify()  # another reader may wait for what will not come
        if not self._readers:
            self._end(read)

    def _place_all(self) -> None:
        """Place what is read."""
        read = self._read
        while True:
            with self._lock:
                read.came.wait_for(
                    lambda: (
                        (read.batches and read.batches[0].is_read)
                        or (read.has_ended and not read.batches)
                        or self._is_closed
                    )
                )
                if self._is_closed or not read.batches:
                    break
                ahead = read.batches.popleft()
                self._tried.notify_all()  # the next one is the first now
            self._work(ahead, lambda placed: placed.place(self._may_wait))
            ahead.is_placed = True
            self._put(self._ready, ahead)
            with self._lock:
                self._tried.notify_all()
        self._end(self._ready)

    def _may_read(self, ahead: _Ahead[BatchT]) -> bool:
        """Wait while many rows are read and have no place, which are outside of any budget; False once it is closed."""

        def has_memory() -> bool:
            placed = ahead.placed
            return self._is_closed or placed is None or placed.may_read(self._read.batches[0] is ahead)

        with self._lock:
            self._tried.wait_for(has_memory)
            return not self._is_closed

    def _work(self, ahead: _Ahead[BatchT], work: Callable[[Staging], None]) -> None:
        placed = ahead.placed
        if placed is None:  # it failed before, or whoever closes has released it
            return
        try:
            work(placed)
        except BaseException as error:
            # What is wrong is the lookup's to say, in the loop, where somebody can do something about it.
            ahead.release()
            if not isinstance(error, Exception) and threading.current_thread() not in self._threads:
                raise  # whoever interrupts the loop means it

    def _may_wait(self) -> bool:
        """Wait for batches before this one to let their rows go, unless the loop waits for this one."""
        with self._lock:
            if self._is_closed or (self._is_awaited and not self._ready.batches):
                return False
            self._room.wait(_LOOK_SECONDS)
            return not self._is_closed


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
        run = _Run(iter(self._loader), self._stage, self._depth, list(devices))
        try:
            while True:
                try:
                    batch = run.next()
                except StopIteration:
                    return
                yield batch
        finally:
            run.close()

    def _stage(self, batch: BatchT) -> Staging | None:
        found = batch if self._features is None else self._features(batch)
        each = list(found) if isinstance(found, (list, tuple)) else [found] * len(self._bags)
        if len(each) != len(self._bags):
            raise InputError(
                f"[prefetch] features: wanted a KeyedJaggedTensor, or a list with one for each of the "
                f"{len(self._bags)} collections; got {len(each)}."
            )
        for features in each:
            if not callable(getattr(features, "lengths", None)):
                raise InputError(
                    f"[prefetch] features: wanted the KeyedJaggedTensor that a collection will be called with; got "
                    f"{type(features).__name__}. Pass prefetch(..., features=a function that finds it in a batch)."
                )
        parts: list[Staging] = []
        try:
            for bags, features in zip(self._bags, each, strict=True):
                with suppress(ShoalError):  # the lookup will meet it too, and say so where it can be mended
                    if (part := bags.stage(features)) is not None:
                        parts.append(part)
        except BaseException:
            for part in parts:
                part.release()
            raise
        return _Together(parts) if parts else None


def prefetch(
    loader: Iterable[BatchT], bags: Any, features: Callable[[BatchT], Any] | None = None, depth: int = 2
) -> Prefetch[BatchT]:
    """The loader's batches, in order, with their rows brought to the top tier of `bags` ahead of the loop.

    bags: a collection, or a list of several.
    features: finds a batch's KeyedJaggedTensor, the one that the collections will be called with, or a list with one
        for each; by default the batch is it.
    depth: batches that are on their way at a time, and at most eight are read at a time, so it should be as many steps
        as a read takes, and one more. Their rows hold places in memory; where all of it is held, they wait outside of
        its budget (`ahead_bytes` in `stats()`). Once they take a quarter of it, only the next batch is read.

    The loader runs in a thread, ahead of the loop: one that draws from torch's global generator draws before the loop
    does. Give it a generator of its own.

    For collections on a GPU, batches of the host are moved there, in place. The loader runs in a thread, and its work
    on the GPU on a stream of its own; the loop's stream waits for the batch it is given.
    """
    several = list(bags) if isinstance(bags, (list, tuple)) else [bags]
    if not several or not all(callable(getattr(one, "stage", None)) for one in several):
        raise ConfigError(
            f"[prefetch] bags: wanted an EmbeddingBagCollection or EmbeddingCollection, or several; got {bags!r}."
        )
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ConfigError(f"[prefetch] depth: wanted an integer >= 1; got {depth!r}.")
    if features is not None and not callable(features):
        raise ConfigError(f"[prefetch] features: wanted a function of a batch; got {features!r}.")
    if not isinstance(loader, Iterable):
        raise ConfigError(f"[prefetch] loader: wanted an iterable of batches; got {loader!r}.")
    return Prefetch(loader, several, features, depth)
