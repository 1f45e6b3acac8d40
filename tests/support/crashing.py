"""Writers that are killed, or whose power fails, at random moments, and what their logs hold afterwards; and compactors
that are killed while a writer runs.

python -m support.crashing FOLDER kill|power|compactor ROUNDS SEED

Each round forks a writer, kills it with SIGKILL after a while, and forks a reader that opens the log and compares it
with what the writer had said and with the training that it knows by heart. Forks, since a new interpreter for each
would take longer than the round. A compactor runs the command `shoal compact`, again and again.
"""

import errno
import os
import random
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path

import torch

import shoal
import shoal.log  # once, for all children
from shoal import _native
from shoal.checkpoint import load  # noqa: F401
from shoal.cli.app import app
from shoal.errors import StorageError
from shoal.log.files import Files
from shoal.log.verify import verify
from support.logged import assert_rows, made, rows_of, train

KEYS = 60


def steps_of(version):
    """The steps that a version's training has behind the one before."""
    return range(version * 2, version * 2 + 2)


def advance(bags, version):
    """The training of one version; some rows are erased."""
    train(bags, steps_of(version), keys=KEYS)
    if version % 3 == 0:
        bags.table("a").erase(bags.table("a").keys()[::4])


def write(folder, scenario, said, fsync="each", most=10_000, pause=0.0, rng=True):
    """Commit up to a version, with a pause behind each, and say what was acknowledged, with a line that says how."""
    os.write(said, fsync.encode() + b"\n")
    bags = made()
    model = torch.nn.Linear(3, 2)
    if scenario == "save":
        for version in range(1, most):
            advance(bags, version)
            model.weight.data.fill_(version)
            assert shoal.save(folder, bags, dense=model, step=version) == version
            os.write(said, b"%d\n" % version)
    options = {"rotate": {"segment": 4000}, "compact": {"segment": 8000, "retain": 1}}.get(scenario, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = shoal.ChangeLog(folder, fsync=fsync, rng=rng, **options)
    found = shoal.recover(folder, bags, dense=model)
    for version in range(1 if found is None else found.version + 1, most):
        advance(bags, version)
        model.weight.data.fill_(version)
        assert log.commit(bags, step=version, dense=model) == version
        os.write(said, b"%d\n" % version)
        if scenario == "compact" and version % 2 == 0:
            log.compact()
        time.sleep(pause)


def write_until_power_cut(folder, scenario, said, seed):
    """Commit for a while, until a call of the operating system fails; then the power does, too."""
    choose = random.Random(seed)
    # Commit frames of one sector, which a cut often leaves whole without the rows before them.
    rng = choose.random() >= 0.5
    _native.record_power_cut(folder)
    kinds = [_native.FileCall.write, _native.FileCall.sync, _native.FileCall.rename, _native.FileCall.sync_directory]
    _native.inject_fault(choose.choice(kinds), folder, errno.EIO, after=choose.randrange(120), times=10**6)
    with suppress(StorageError):
        write(
            folder,
            scenario,
            said,
            fsync=choose.choice(["each", "interval", "never"]),
            most=choose.randrange(2, 30),
            rng=rng,
        )
    _native.clear_faults()
    _native.cut_power(seed)
    os._exit(0)


def compact(folder, said):
    """Run `shoal compact FOLDER` until the process is killed, and say when each one begins."""
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    while True:
        os.write(said, b".")
        assert not app(["compact", folder, "--retain", "1"], standalone_mode=False)
        time.sleep(0.001)


def look(folder, acknowledged):
    """While its writer runs: the log is sound and has what was acknowledged."""
    bags, model = made(), torch.nn.Linear(3, 2)
    found = shoal.recover(folder, bags, dense=model)
    assert found.version >= acknowledged
    assert_is(bags, model, found)
    report = verify(Files(folder))
    assert report.is_sound, report.problems


def assert_is(bags, model, found):
    """Rows and weights are those of a commit, or of none."""
    version = 0 if found is None else found.version
    wanted = made()
    for one in range(1, version + 1):
        advance(wanted, one)
    assert_rows(bags, rows_of(wanted))
    if version:
        assert found.step == version
        assert bool((model.weight == version).all())


def check(folder, acknowledged, kept, says=None):
    """The log holds the versions that must have been kept, and at most one that was not acknowledged; its rows are
    those of its version. Says which version it holds in the end."""
    bags, model = made(), torch.nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log = shoal.ChangeLog(folder)
    report = log.verify()
    assert report.is_sound, report.problems
    found = shoal.recover(folder, bags, dense=model)
    version = 0 if found is None else found.version
    assert log.version == version
    assert kept <= version <= acknowledged + 1, (kept, acknowledged, version)
    assert_is(bags, model, found)
    # It can be written to again, and what is written then is there.
    for one in (version + 1, version + 2):
        advance(bags, one)
        model.weight.data.fill_(one)
        assert log.commit(bags, dense=model, step=one) == one
    log.close()
    again = made()
    found = shoal.recover(folder, again)
    assert found.version == found.step == version + 2
    assert_rows(again, rows_of(bags))
    if says is not None:
        os.write(says, b"%d" % found.version)


def in_child(call, *arguments):
    """Run it in a fork, and give its exit code."""
    child = os.fork()
    if child == 0:
        try:
            call(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def one_round(folder, kind, number, choose):
    scenario = ("commit", "rotate", "compact", "save")[number % 4]
    path = str(Path(folder, f"{number}"))
    acknowledged = kept = 0
    # Killed, or without power; then opened again, and the same again.
    for _life in range(1 if scenario == "save" else 2):
        says, said = os.pipe()
        if kind == "power":
            child = in_child(write_until_power_cut, path, scenario, said, choose.randrange(2**32))
        else:
            child = in_child(write, path, scenario, said)
        os.close(said)
        output = os.read(says, 1 << 20)  # it has begun
        if kind == "kill":
            time.sleep(choose.random() * choose.choice([0.01, 0.1, 0.3]))
            os.kill(child, signal.SIGKILL)
        while more := os.read(says, 1 << 20):
            output += more
        os.close(says)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-signal.SIGKILL if kind == "kill" else 0), f"round {number} ({scenario}): {code}"
        how, *lines = output.split(b"\n")[:-1]
        acknowledged = int(lines[-1]) if lines else acknowledged
        if kind == "kill" or how == b"each":
            kept = acknowledged
        says, said = os.pipe()
        code = os.waitstatus_to_exitcode(os.waitpid(in_child(check, path, acknowledged, kept, said), 0)[1])
        assert code == 0, f"round {number} ({scenario}): {acknowledged} versions were acknowledged"
        os.close(said)
        acknowledged = kept = int(os.read(says, 100))
        os.close(says)


def one_round_of_compactors(folder, number, choose):
    scenario = ("rotate", "commit", "compact")[number % 3]  # of the last, the writer compacts too
    path = str(Path(folder, f"{number}"))
    says, said = os.pipe()
    # Pauses: who looks trains all versions again.
    writer = in_child(write, path, scenario, said, "each", 10_000, 0.03)
    os.close(said)
    output = b""
    while output.count(b"\n") < 3:  # it has committed
        output += os.read(says, 1 << 20)
    for _kill in range(3):
        begins, begun = os.pipe()
        compactor = in_child(compact, path, begun)
        os.close(begun)
        for _begun in range(choose.randrange(1, 4)):
            os.read(begins, 1)
        time.sleep(choose.random() * choose.choice([0.005, 0.02, 0.05]))
        os.kill(compactor, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(compactor, 0)[1])
        assert code == -signal.SIGKILL, f"round {number} ({scenario}): shoal compact: {code}"
        os.close(begins)
        output += os.read(says, 1 << 20)  # the writer goes on
        code = os.waitstatus_to_exitcode(os.waitpid(in_child(look, path, last_of(output)), 0)[1])
        assert code == 0, f"round {number} ({scenario}): {last_of(output)} versions were acknowledged"
    os.kill(writer, signal.SIGKILL)
    while more := os.read(says, 1 << 20):
        output += more
    os.close(says)
    code = os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1])
    assert code == -signal.SIGKILL, f"round {number} ({scenario}): the writer: {code}"
    code = os.waitstatus_to_exitcode(os.waitpid(in_child(check, path, last_of(output), last_of(output)), 0)[1])
    assert code == 0, f"round {number} ({scenario}): {last_of(output)} versions were acknowledged"


def last_of(output):
    """The version that a writer acknowledged last."""
    return int(output.split(b"\n")[-2])


def main():
    folder, kind, rounds, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    shoal.set_num_threads(1)
    # What torch imports when it is first needed is imported once.
    advance(warm := made(), 1)
    dense = torch.nn.Linear(3, 2)
    dense.weight.data.fill_(1)
    shoal.save(str(Path(folder, "warm")), warm, dense=dense, step=1)
    check(str(Path(folder, "warm")), acknowledged=1, kept=1)
    choose = random.Random(seed)
    for number in range(rounds):
        if kind == "compactor":
            one_round_of_compactors(folder, number, choose)
        else:
            one_round(folder, kind, number, choose)
    print(f"{rounds} rounds")


if __name__ == "__main__":
    main()
