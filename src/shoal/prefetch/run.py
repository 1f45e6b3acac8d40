"""One pass over a loader, whose batches find their rows in the top tier.

One thread takes batches from the loader, up to `depth` ahead of the loop. I/O threads read the rows that are not in
the top tier, for several batches at a time, so that `depth` hides a storage's latency. To find out which rows these
are, and to place them once they are read, is the work of:
- the loop, in host memory, when it asks for its next batch. Both steps use all of its threads for a moment, and save
  the lookup the same time; another thread at that time would take a core from one of them, and the others would wait
  for it. If rows must leave memory first, and be written, a thread places.
- threads, for a device, which they wait for.
Prefetch places rows and does nothing else: with and without it a run is the same, bit for bit. A batch that could not
be placed, because there was no room or a disk failed, is handed on too: its lookup brings the rows itself, or raises
the error. The first failure of a storage gives a warning: with a storage that always fails in these threads, prefetch
would do nothing, and no error would say so.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Generic, TypeVar

import torch

from shoal.config import get_num_threads
from shoal.errors import ForkError
from shoal.prefetch.failures import Failures
from shoal.prefetch.queue import Queue, QueuedBatch
from shoal.prefetch.streams import LoaderStreams
from shoal.table import Staging

BatchT = TypeVar("BatchT")

# A thread that waits for room looks for it this often.
_LOOK_SECONDS = 0.02
# The most batches whose rows are read at a time.
_MOST_IO_THREADS = 8
# A close waits this long for the loader's thread, and less for the others, since they may wait for a lock that the
# closing thread holds: they end when they can, and release their batches.
_JOIN_SECONDS = 10.0
_JOIN_OTHERS_SECONDS = 1.0


_running: "weakref.WeakSet[Run[Any]]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End all threads: one that returns from the core during the interpreter's shutdown would end the process."""
    for run in list(_running):
        run.close()
        run.await_threads(_JOIN_SECONDS)


class Run(Generic[BatchT]):
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
        self._lock = threading.RLock()  # a garbage collection may close the run in the thread that holds it
        # Batches that came, are found, read and ready: each queue is filled from the one before. The loop takes from
        # the first and the last.
        loops = threading.Condition(self._lock)
        self._came: Queue[BatchT] = Queue(loops)
        self._found: Queue[BatchT] = Queue(threading.Condition(self._lock))
        self._read: Queue[BatchT] = Queue(threading.Condition(self._lock))
        self._ready: Queue[BatchT] = Queue(loops)
        self._taken = threading.Condition(self._lock)  # by the loop
        self._room = threading.Condition(self._lock)  # rows can be placed, or the loop waits
        self._tried = threading.Condition(self._lock)  # to place a batch's rows
        self._ahead = 0  # batches that were taken from the loader, and not by the loop
        self._between = 0  # of these, those that are not ready
        self._unfound = 0  # of these, those that the loop is to find
        self._on_way = 0  # of all, those that are found, read or ready
        self._is_found_by_loop = False  # if so, one more batch may wait to be found
        self._alive: set[QueuedBatch[BatchT]] = set()  # batches that are not released
        self._in_use: QueuedBatch[BatchT] | None = None
        self._is_awaited = self._is_placing = self._is_closed = False
        self._error: BaseException | None = None
        self._failures = Failures()
        self._io_threads = min(depth, _MOST_IO_THREADS)
        self._finding = threading.Lock()  # held by an I/O thread: batches are found in their order
        self._process = os.getpid()
        works = [("load", self._load_all), *[("read", self._read_all)] * self._io_threads, ("place", self._place_all)]
        _running.add(self)
        self._threads = [
            threading.Thread(target=work, name=f"shoal-prefetch-{name}", daemon=True) for name, work in works
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # for instance too many threads: those that started would wait for ever
            self.close()
            raise

    @property
    def _queues(self) -> "tuple[Queue[BatchT], ...]":
        return self._came, self._found, self._read, self._ready

    # ---- the loop's side

    def next(self) -> BatchT:
        """Returns the next batch. At the end raises StopIteration, or what the loader raised."""
        if not self._is_own():
            raise ForkError(
                f"[prefetch] this loop belongs to process {self._process}, and so do its threads; this is its forked "
                f"child {os.getpid()}. Begin another one here."
            )
        self._let_go()
        self._work_until_ready()
        self._failures.warn_once()
        with self._lock:
            if not self._ready.batches:
                if self._error is not None:
                    raise self._error
                raise StopIteration
            given = self._in_use = self._ready.batches.popleft()
            self._ahead -= 1
            self._on_way -= 1
            self._taken.notify()
            coming = [staged for staged in self._ready.batches if not staged.is_placed]
        self._streams.hand_over(given.batch, given.ready)
        for staged in coming:
            self._bring(staged)
        while work := self._take_work():
            work()
        return given.batch

    def _work_until_ready(self) -> None:
        """Find and place rows until a batch is ready, or all have been taken."""
        with self._lock:
            self._is_awaited = True
            self._room.notify()
        while True:
            with self._lock:
                work = None
                while not (self._ready.batches or self._ready.has_ended or (work := self._take_work())):
                    self._ready.came.wait()
                if work is None:
                    self._is_awaited = False
                    return
            work()

    def _take_work(self) -> Callable[[], None] | None:
        """Returns work that the loop can do for coming batches, the next ones first; None if there is none."""
        with self._lock:
            if self._is_to_be_placed(by_loop=True):
                return partial(self._place_into_room, self._take_read())
            if self._came.batches and self._on_way < self._depth:
                self._on_way += 1
                return partial(self._find, self._came.batches.popleft())
        return None

    def _find(self, staged: QueuedBatch[BatchT]) -> None:
        def find(staging: Staging) -> None:
            staging.find(get_num_threads())
            staged.is_for_loop = staging.in_loop and staging.has_room()

        self._work(staged, find)
        with self._lock:
            self._put(self._found, staged)
            self._unfound -= 1
            self._end_if_all_are_found()

    def _place_into_room(self, staged: QueuedBatch[BatchT]) -> None:
        """Place rows, if no others have to leave for them. Otherwise the thread places them, as it may wait."""
        has_room = True

        def place(staging: Staging) -> None:
            nonlocal has_room
            has_room = staging.place_into_room(get_num_threads())

        self._work(staged, place)
        if has_room:
            self._end_placing(staged)
            return
        with self._lock:
            staged.is_for_loop = self._is_placing = False
            self._read.batches.appendleft(staged)
            self._wake_placing()

    def close(self) -> None:
        """End the run, wherever it is."""
        if not self._is_own():
            return
        with self._lock:
            self._is_closed = True
            for waited in (self._taken, self._room, self._tried, *(line.came for line in self._queues)):
                waited.notify_all()
        try:
            self._join(self._threads[0], _JOIN_SECONDS)
            self.await_threads(_JOIN_OTHERS_SECONDS)
        finally:
            self._let_go()
            # All of them, also one that the loop was working on when an interrupt came.
            for staged in tuple(self._alive):
                staged.release()
            self._streams.close()

    def await_threads(self, seconds: float) -> None:
        """Wait until all threads have ended, but at most so long."""
        if not self._is_own():
            return
        end = time.monotonic() + seconds
        for thread in self._threads:
            self._join(thread, max(end - time.monotonic(), 0.0))

    def _is_own(self) -> bool:
        """Whether this process made the run. In a forked child a thread of the parent may hold a lock for ever."""
        return os.getpid() == self._process

    @staticmethod
    def _join(thread: threading.Thread, seconds: float) -> None:
        # Garbage collection may run this in any of the threads. A thread that did not start cannot be joined.
        if thread is not threading.current_thread() and thread.is_alive():
            thread.join(seconds)

    def _let_go(self) -> None:
        if self._in_use is not None:
            self._in_use.release()
            self._alive.discard(self._in_use)
            self._streams.take_back(self._in_use.batch)
            self._in_use = None

    # ---- the threads' side

    def _load_all(self) -> None:
        try:
            with self._streams.current():
                while self._may_go_on():
                    try:
                        batch = next(self._batches)
                    except StopIteration:
                        break
                    staging = self._stage(batch)
                    self._send(QueuedBatch(batch, staging, self._streams.ready()))
        except StopIteration as error:  # not the loader's: in the loop it would look like its end
            self._error = RuntimeError("[prefetch] features raised StopIteration.")
            self._error.__cause__ = error
        except BaseException as error:
            self._error = error
        finally:
            with self._lock:
                self._came.has_ended = True
                self._end_if_all_are_found()

    def _end_if_all_are_found(self) -> None:
        if self._came.has_ended and not self._unfound:
            self._end(self._found)

    def _send(self, staged: QueuedBatch[BatchT]) -> None:
        """Queue a batch to be found and read. If nothing has to be waited for, queue it for the loop: threads that take
        turns with the loop would cost it more time than the work."""
        staging = staged.staging
        waits = staging is not None and staging.waits
        with self._lock:
            self._alive.add(staged)
            is_for_loop = self._unfound > 0 or (staging is not None and staging.in_loop)
            self._is_found_by_loop |= is_for_loop
            if not waits and not self._between:  # it overtakes no batch
                self._on_way += 1
                self._put(self._ready, staged)
                return
            self._between += 1
            staged.is_between = True
            self._unfound += is_for_loop
            self._on_way += not is_for_loop
            self._put(self._came if is_for_loop else self._found, staged)

    def _bring(self, staged: QueuedBatch[BatchT]) -> None:
        """Place the rows of a batch that waits for nothing."""
        staged.is_placed = True
        self._work(staged, lambda staging: staging.read())
        self._work(staged, lambda staging: staging.place(lambda: False))

    def _may_go_on(self) -> bool:
        with self._lock:
            self._taken.wait_for(lambda: self._is_closed or self._ahead < self._depth + self._is_found_by_loop)
            self._ahead += 1
            return not self._is_closed

    def _put(self, where: Queue[BatchT], staged: QueuedBatch[BatchT]) -> None:
        with self._lock:
            if not self._is_closed:
                where.batches.append(staged)
                if where is self._ready and staged.is_between:
                    self._between -= 1
                where.came.notify()
                return
        staged.release()  # it will not be looked up

    def _end(self, where: Queue[BatchT]) -> None:
        with self._lock:
            where.has_ended = True
            where.came.notify()

    def _read_all(self) -> None:
        """Find and read rows. A batch enters the next queue before it is read: otherwise one that is read faster would
        overtake another."""
        found, read = self._found, self._read
        while True:
            with self._finding:
                with self._lock:
                    found.came.wait_for(lambda: found.batches or found.has_ended or self._is_closed)
                    if self._is_closed or not found.batches:
                        break
                    staged = found.batches.popleft()
                    read.batches.append(staged)
                self._work(staged, lambda staging: staging.find(1))
            if self._may_read(staged):
                self._work(staged, lambda staging: staging.read())
            with self._lock:
                staged.is_read = True
                self._wake_placing()
        with self._lock:
            self._io_threads -= 1
            found.came.notify()  # another I/O thread may wait, and no batch will come
        if not self._io_threads:
            self._end(read)

    def _place_all(self) -> None:
        """Place the rows that were read, unless the loop places them."""
        read = self._read

        def is_over() -> bool:
            return self._is_closed or (read.has_ended and not read.batches and not self._is_placing)

        while True:
            with self._lock:
                read.came.wait_for(lambda: is_over() or self._is_to_be_placed(by_loop=False))
                if is_over():
                    break
                staged = self._take_read()
            self._work(staged, lambda staging: staging.place(self._may_wait))
            self._end_placing(staged)
        self._end(self._ready)

    def _is_to_be_placed(self, by_loop: bool) -> bool:
        """Whether the first batch in the queue of read ones is to be placed now, by the loop or by a thread. One at a
        time: otherwise one would overtake another."""
        if self._is_placing or not self._read.batches:
            return False
        first = self._read.batches[0]
        return first.is_read and first.is_for_loop == by_loop

    def _take_read(self) -> QueuedBatch[BatchT]:
        """Take the first batch whose rows are read. REQUIRES: the lock is held, and the batch is to be placed."""
        self._is_placing = True
        staged = self._read.batches.popleft()
        self._tried.notify_all()  # the next one is the first now
        return staged

    def _wake_placing(self) -> None:
        """Wake the loop or the thread, whichever places the first batch that is read. REQUIRES: the lock is held."""
        (self._ready if self._is_to_be_placed(by_loop=True) else self._read).came.notify()

    def _end_placing(self, staged: QueuedBatch[BatchT]) -> None:
        with self._lock:
            staged.is_placed = True
            self._put(self._ready, staged)
            self._is_placing = False
            self._tried.notify_all()
            self._wake_placing()

    def _may_read(self, staged: QueuedBatch[BatchT]) -> bool:
        """Wait while many rows are read and not placed: no budget counts them. Returns False once the run is closed.
        Earlier batches count theirs first: otherwise all would be read at the same time."""

        def has_memory() -> bool:
            staging = staged.staging
            if self._is_closed or staging is None:
                return True
            before = takewhile(lambda one: one is not staged, self._read.batches)
            return all(one.is_counted for one in before) and staging.may_read(self._read.batches[0] is staged)

        with self._lock:
            self._tried.wait_for(has_memory)
            if (staging := staged.staging) is not None:
                staging.expect()
            staged.is_counted = True
            self._tried.notify_all()
            return not self._is_closed

    def _work(self, staged: QueuedBatch[BatchT], work: Callable[[Staging], None]) -> None:
        staging = staged.staging
        if staging is None:  # an earlier step failed, or close() released it
            return
        try:
            work(staging)
        except BaseException as error:
            # The lookup raises it too, in the loop, where the user can handle it.
            staged.release()
            if not isinstance(error, Exception) and threading.current_thread() not in self._threads:
                raise  # an interrupt is meant for the loop
            if not self._is_closed:
                self._failures.add(error)

    def _may_wait(self) -> bool:
        """Wait for earlier batches to release their rows, unless the loop waits for this one."""
        with self._lock:
            if self._is_closed or (self._is_awaited and not self._ready.batches):
                return False
            self._room.wait(_LOOK_SECONDS)
            return not self._is_closed
