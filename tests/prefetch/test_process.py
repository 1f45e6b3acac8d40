"""A process that ends or forks while a loop's threads run."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.threads
ENDING = """
import os, signal, sys, threading, torch, shoal
from shoal.storage import MemoryStorage
from shoal.table.host.staging import HostStaging
module = sys.modules["shoal.prefetch.run"]

class Remote(MemoryStorage):
    answers, hangs, changed, was_read = True, threading.Event(), threading.Condition(), set()
    def read(self, keys):
        if not Remote.answers:
            Remote.hangs.set()
            threading.Event().wait()
        answer = super().read(keys)
        with Remote.changed:
            Remote.was_read.update(keys.tolist())
            Remote.changed.notify()
        return answer

tables = [shoal.Table(name, 8, tiers=[shoal.Dram("28KiB"), Remote]) for name in ("a", "b")]
bags = shoal.EmbeddingBagCollection(tables)
def batch(n):
    return shoal.KeyedJaggedTensor(["a", "b"], torch.arange(80) + 80 * n, lengths=torch.tensor([40, 40]))
loop = iter(shoal.prefetch([batch(n) for n in range(40)], bags, depth=3))
for _ in range(20):
    bags(next(loop))
"""


def ends(program, seconds=300):
    return subprocess.run([sys.executable, "-W", "ignore", "-c", ENDING + program], timeout=seconds).returncode


def test_a_process_ends_though_a_storage_does_not_answer():
    # What the next step needs is read; what comes after it is being read for ever.
    program = """
module._JOIN_SECONDS = 0.2
with Remote.changed:
    Remote.changed.wait_for(lambda: set(range(80 * 20, 80 * 21)) <= Remote.was_read)
Remote.answers = False
next(loop)
Remote.hangs.wait()
sys.exit(3)
"""
    assert ends(program) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_a_loop_alone():
    """Its locks may be held by threads that the child does not have."""
    program = """
run = next(iter(module._running))
held, may_go = threading.Event(), threading.Event()
def hold():
    with run._lock:
        held.set()
        may_go.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(120)
    try:
        next(loop)
    except shoal.errors.ForkError:
        loop.close()
        sys.exit(7)
    sys.exit(1)
_, ended = os.waitpid(child, 0)
may_go.set()
thread.join()
bags(next(loop))
sys.exit(os.waitstatus_to_exitcode(ended) & 0xFF)
"""
    assert ends(program) == 7
