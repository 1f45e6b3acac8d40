"""Logs that a stranger made: links, pipes, devices, holes and folders where files belong, and files of other users. All
that comes of them is a ShoalError that names the file; what is outside of the log stays as it is."""

import os
import shutil
import stat
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.forged import Forged
from support.limits import little_memory
from support.shapes import GIANT, SHAPES, Outside
from support.sweeps import examples
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.errors import CheckpointError, ShoalError, StorageError
from shoal.interop.parquet import export_parquet, parquet_to_log
from shoal.interop.safetensors import export_safetensors
from shoal.log import RepairWarning, gather
from shoal.log.files import MOST_MANIFEST_BYTES, Files
from shoal.log.manifest import read_manifest, write_manifest
from shoal.log.snapshot import Snapshot

SOME = settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def made():
    return shoal.EmbeddingBagCollection([shoal.Table("t", 2, optimizer=shoal.SGD())], seed=0)


class Strange:
    """A small log with a file of each kind, what dead writers and repairs leave, a file to import, and its places."""

    def __init__(self, folder):
        self.path = folder / "log"
        self.parquet = folder / "rows.parquet"
        bags = made()
        with pytest.MonkeyPatch.context() as patch, shoal.ChangeLog(self.path, segment=1) as log:
            patch.setattr(gather, "random_states", dict)  # most of a small commit
            for version in range(1, 5):
                bags.table("t").assign([version], torch.ones(1, 2))
                log.commit(bags, dense=torch.nn.Linear(1, 1) if version % 2 else None)
                if version == 2:
                    log.compact()
        export_parquet(self.path, self.parquet, table="t", progress=False)
        self.names = sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*"))
        # What is there at times only.
        self.names += ["WRITER.json", "MANIFEST.json.tmp", "WRITER.json.tmp", "set-aside", "set-aside/0001.tmp"]
        self.names += ["set-aside/0001.tmp/segments", "snapshots/x", f"snapshots/{4:020}", f"snapshots/{4:020}.tmp"]
        self.names += [f"snapshots/{4:020}.compact.tmp", f"segments/{5:020}.seg", f"segments/{1:020}.seg.tmp"]
        self.names += [f"dense/{5:020}.safetensors", f"dense/{9:020}.safetensors", f"snapshots/{2:020}/x"]


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    return Strange(tmp_path_factory.mktemp("strange"))


def follow(path, _):
    with shoal.open_log(path) as log:
        for one in log.tail(1):
            list(one.changes())
        version = log.at(log.version)
        version.dense()
        list(version.rows("t"))
        log.verify()


def command(*arguments):
    def run(path, strange):
        filled = [str(one(path) if callable(one) else one) for one in arguments]
        result = CliRunner().invoke(app, filled)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        if result.exit_code and str(path) not in result.output:
            raise AssertionError(result.output)

    return run


def write(path, _):
    bags = made()
    with shoal.ChangeLog(path, segment=1, retain=1) as log:
        bags.table("t").assign([9], torch.ones(1, 2))
        log.commit(bags, dense=torch.nn.Linear(1, 1))
        log.compact()
        log.rollback(log.version, bags)


def repair(path, _):
    shoal.ChangeLog(path, repair=True).close()


def where(path):
    return path


READS = {
    "load": lambda path, _: shoal.load(path, made(), dense=torch.nn.Linear(1, 1), progress=False),
    "recover": lambda path, _: shoal.recover(path, made(), progress=False),
    "follow": follow,
    "inspect": command("inspect", where),
    "verify": command("verify", where),
    "export": lambda path, _: export_safetensors(path, path.parent / "x.safetensors", table="t", progress=False),
    "export changes": lambda path, _: export_parquet(
        path, path.parent / "x.parquet", table="t", since=2, progress=False
    ),
}
WRITES = {
    "write": write,
    "save": lambda path, _: shoal.save(path, made(), progress=False),
    "compact": command("compact", where, "--retain", 1),
    "repair": repair,
    "shoal repair": command("repair", where),
    "import": lambda path, strange: parquet_to_log(strange.parquet, path, table="t", progress=False),
}


def tampers():
    """One to three places of a log, each with what is put there."""
    one = st.tuples(st.integers(0, 10**6), st.sampled_from(sorted(SHAPES)))
    return st.lists(one, min_size=1, max_size=3)


def tampered(strange, folder, tampers, outside):
    """A copy of the log with them."""
    path = folder / "log"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(strange.path, path)
    for place, shape in tampers:
        name = place if isinstance(place, str) else strange.names[place % len(strange.names)]
        # Below what another one put there, which may lead outside, or in a circle (a RuntimeError before Python 3.13).
        with suppress(OSError, RuntimeError):
            if (path / name).parent.resolve().is_relative_to(path.resolve()):
                SHAPES[shape](path / name, outside)
    return path


def refused_or_done(call, path, strange):
    """Run it. All that it raises is Shoal's, and names a file of the log."""
    with warnings.catch_warnings(), little_memory():
        warnings.simplefilter("ignore")
        try:
            call(path, strange)
        except ShoalError as error:
            assert str(path) in str(error), error


@pytest.fixture
def outside(tmp_path):
    return Outside(tmp_path)


@pytest.mark.parametrize("name", READS)
@SOME
@given(tampers=tampers())
@example([("MANIFEST.json", "a pipe")])
@example([("MANIFEST.json", "a link to a device")])
@example([("MANIFEST.json", "a hole")])
@example([("segments", "a link to a folder")])
def test_reading_touches_nothing(strange, tmp_path, outside, name, tampers):
    path = tampered(strange, tmp_path, tampers, outside)
    before = contents(path)
    refused_or_done(READS[name], path, strange)
    outside.assert_untouched()
    assert contents(path) == before  # and changes no file of the log


def contents(path):
    """All that is in a log, without what links lead to. Holes are not read."""
    told = {}
    for one in path.rglob("*"):
        found = one.lstat()
        is_read = stat.S_ISREG(found.st_mode) and found.st_size < GIANT
        told[one] = found.st_mode, found.st_size, found.st_mtime_ns, one.read_bytes() if is_read else None
    return told


@pytest.mark.parametrize("name", WRITES)
@SOME
@given(tampers=tampers())
@example([("dense", "a link to a folder")])
@example([("snapshots/x", "a link to a folder")])
@example([(f"snapshots/{4:020}.compact.tmp", "a link to a folder")])
@example([("LOCK", "a link to a file")])
@example([("HEAD", "a link to a file")])
@example([("COMPACT", "a link to a file")])
@example([("MANIFEST.lock", "a link to a file")])
@example([("set-aside", "a link to a folder")])
@example([(f"segments/{4:020}.seg", "a file that ends with a hole")])
def test_writing_touches_nothing_outside(strange, tmp_path, outside, name, tampers):
    path = tampered(strange, tmp_path, tampers, outside)
    refused_or_done(WRITES[name], path, strange)
    outside.assert_untouched()


LINKS = [shape for shape in SHAPES if shape.startswith("a link")]


@pytest.mark.parametrize("shape", [*LINKS, "a pipe", "a socket"])
def test_each_place_of_a_log_is_refused_by_name_before_anything_changes(strange, tmp_path, outside, shape):
    told = shape.partition(" to ")[0].removesuffix(" up")
    for name in strange.names:
        if name.startswith("set-aside/") or name == f"segments/{1:020}.seg.tmp" or name == f"snapshots/{2:020}/x":
            continue  # seen when it is used
        path = tampered(strange, tmp_path, [(name, shape)], outside)
        before = contents(path)
        with pytest.raises(StorageError) as caught:
            shoal.ChangeLog(path)
        assert f"{path / name}] wanted a " in str(caught.value) and f"got {told}" in str(caught.value), name
        assert contents(path) == before, name


def test_parts_of_ranks_are_below_what_the_user_named(tmp_path, outside):
    for rank in range(2):
        shoal.save(tmp_path / "saved", made(), rank=rank, ranks=2, step=1, save_id="one", progress=False)
    shoal.load(tmp_path / "saved", made(), progress=False)
    part = tmp_path / "saved" / "rank-00001-of-00002"
    part.rename(tmp_path / "elsewhere")
    part.symlink_to(tmp_path / "elsewhere")
    before = contents(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="rank-00001-of-00002] wanted a folder; got a link to "):
        shoal.load(tmp_path / "saved", made(), progress=False)
    with pytest.raises(StorageError, match="rank-00001-of-00002] wanted a folder; got a link to "):
        shoal.save(tmp_path / "saved", made(), rank=1, ranks=2, step=2, save_id="two", progress=False)
    for name in ("inspect", "verify", "compact", "repair"):
        result = CliRunner().invoke(app, [name, str(tmp_path / "saved")])
        assert result.exit_code == 1 and "wanted a folder; got a link to " in result.output, name
    assert contents(tmp_path / "elsewhere") == before
    shoal.recover(part, made(), progress=False)  # the user's own path, this time


def test_links_that_the_user_names_lead_on(tmp_path, monkeypatch):
    (tmp_path / "disk" / "runs").mkdir(parents=True)
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    (tmp_path / "newest").symlink_to("data/runs/log")
    monkeypatch.chdir(tmp_path)
    bags = made()
    for number, path in enumerate(("data/runs/log", "newest", "data/../data/runs/log", tmp_path / "newest"), 1):
        with shoal.ChangeLog(path, segment=1) as log:
            bags.table("t").assign([number], torch.ones(1, 2))
            assert log.commit(bags) == number
            log.compact()
        assert shoal.load(path, made(), progress=False).version == number
        assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 0
    assert export_parquet("newest", "data/x.parquet", table="t", progress=False) == 4
    (tmp_path / "own.parquet").symlink_to("data/x.parquet")
    assert parquet_to_log("own.parquet", "data/imported", table="t", progress=False) == 1
    assert sorted(os.listdir("disk")) == ["imported", "runs", "x.parquet"]


def test_a_hole_after_the_last_commit_stays_one(strange, tmp_path):
    path = shutil.copytree(strange.path, tmp_path / "log")
    segment = max(path.glob("segments/*"))
    os.truncate(segment, 60 << 20)
    assert not CliRunner().invoke(app, ["verify", str(path)]).exception
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        (kept,) = log.repairs[0].folder.rglob("*.seg*")
        assert kept.stat().st_size > 50 << 20 and kept.stat().st_blocks * 512 < 1 << 20
        assert log.version == 4 and log.verify().is_sound


def test_a_segment_that_is_all_holes_is_refused_before_it_is_read(strange, tmp_path):
    """Of 1 TiB, which would take an hour to read, and more disk than there is."""
    path = shutil.copytree(strange.path, tmp_path / "log")
    os.truncate(max(path.glob("segments/*")), 1 << 40)
    for name in ("verify", "inspect"):
        result = CliRunner().invoke(app, [name, str(path)])
        assert result.exit_code == 1 and "and holes" in " ".join(result.output.split()), name
    with pytest.raises(StorageError, match="and holes"):
        shoal.load(path, made(), progress=False)
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        (kept,) = log.repairs[0].folder.rglob("*.seg*")
        assert kept.stat().st_size == 1 << 40 and kept.stat().st_blocks * 512 < 1 << 20
        assert log.verify().is_sound


@pytest.mark.parametrize("size", [60 << 20, 1 << 32])
def test_a_repair_keeps_whole_commits_before_a_hole_of_any_size(tmp_path, size):
    """As a power cut may leave one, where the end of a large commit came to the disk and what was before it did not."""
    bags, path = made(), tmp_path / "log"
    with shoal.ChangeLog(path) as log:
        for version in (1, 2):
            bags.table("t").assign([version], torch.ones(1, 2))
            assert log.commit(bags) == version
    segment = max(path.glob("segments/*"))
    with open(segment, "r+b") as opened:
        opened.seek(size)
        opened.write(b"an end")
    with pytest.warns(RepairWarning), shoal.ChangeLog(path, repair=True) as log:
        assert log.version == 2 and log.verify().is_sound
    found = made()
    shoal.load(path, found, progress=False)
    assert found.table("t").keys().sort().values.tolist() == bags.table("t").keys().sort().values.tolist()


# ---- small files with much in them


BOMBS = {"lists": "[],", "lists in lists": "[[]],", "objects": "{},", "entries": '{"a":{}},'}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("size", [3 << 20, 64 << 20])
def test_a_manifest_takes_no_more_memory_than_tables_explain(strange, tmp_path, kind, size):
    path = shutil.copytree(strange.path, tmp_path / "log")
    body = b'{"tables": [' + (BOMBS[kind] * (size // len(BOMBS[kind]))).encode().rstrip(b",") + b"]}"
    sealed = body + f"\ncrc32c {shoal._native.crc32c(body):08x}\n".encode()
    (path / "MANIFEST.json").write_bytes(sealed)
    for call in (*READS.values(), *WRITES.values()):
        refused_or_done(call, path, strange)
    with little_memory(), pytest.raises(StorageError, match=r"MANIFEST\.json\] wanted at most"):
        read_manifest(Files(path))


def test_the_list_of_a_snapshot_takes_no_more_memory_than_its_rows_explain(strange, tmp_path):
    for size in (3 << 20, 64 << 20):
        path = shutil.copytree(strange.path, tmp_path / f"log{size}")
        forged = Forged(path)
        name = next(path.glob("snapshots/*/SNAPSHOT.json"))
        body = b'{"tables": [' + b"[]," * (size // 3) + b"[]]}"
        sealed = body + f"\ncrc32c {shoal._native.crc32c(body):08x}\n".encode()
        name.write_bytes(sealed)
        os.truncate(name.with_name("00000.arrow"), GIANT)  # a hole explains nothing
        forged.manifest["snapshots"][-1]["crc32c"] = shoal._native.crc32c(sealed)
        forged.write_manifest()
        files = Files(path)
        manifest = read_manifest(files)
        with little_memory(), pytest.raises(StorageError, match=r"SNAPSHOT\.json\] wanted at most"):
            Snapshot(files, manifest.snapshots[-1], manifest.layouts)
        for call in (*READS.values(), *WRITES.values()):
            refused_or_done(call, path, strange)


def test_a_manifest_that_readers_would_refuse_is_not_written(strange, tmp_path):
    files = Files(shutil.copytree(strange.path, tmp_path / "log"))
    before = read_manifest(files)
    many = replace(before, segments=tuple(range(1, 500_000)))
    with pytest.raises(StorageError, match=f"at most {MOST_MANIFEST_BYTES} bytes; .* 499999 segments"):
        write_manifest(files, many)
    assert read_manifest(files) == before
    tables = [replace(before.layouts[0], name=f"table number {number}") for number in range(8000)]
    write_manifest(files, replace(before, layouts=(*before.layouts, *tables)))
    assert len(read_manifest(files).layouts) == 8001


# ---- files of other users

OTHER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")


def owned(path, name):
    os.chown(path / name, OTHER, -1, follow_symlinks=False)
    return path


@needs_root
@pytest.mark.parametrize("name", WRITES)
def test_files_of_another_user_are_written_to_with_trust_alone(strange, tmp_path, name):
    names = [one for one in strange.names if (strange.path / one).exists()]
    for number, place in enumerate([".", *names]):
        path = owned(shutil.copytree(strange.path, tmp_path / str(number)), place)
        before = contents(path)
        if name in ("compact", "shoal repair"):
            arguments = [name.removeprefix("shoal "), str(path)]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 1 and "--trust" in result.output and str(OTHER) in result.output
            assert contents(path) == before
            assert CliRunner().invoke(app, [*arguments, "--trust"]).exit_code == 0
            continue
        with pytest.raises(CheckpointError) as caught:
            WRITES[name](path, strange)
        said = str(caught.value)
        assert str(path / place) in said and f"user {OTHER}" in said and "trust=True (--trust)" in said
        assert contents(path) == before


@needs_root
def test_reading_needs_no_trust_and_trust_is_enough(strange, tmp_path):
    path = shutil.copytree(strange.path, tmp_path / "log")
    for one in (path, *path.rglob("*")):
        os.chown(one, OTHER, -1)
    for read in READS.values():
        read(path, strange)
    bags = made()
    with shoal.ChangeLog(path, trust=True) as log:
        bags.table("t").assign([9], torch.ones(1, 2))
        log.commit(bags)
    with pytest.raises(CheckpointError, match="trust=True"):
        shoal.save(path, bags, progress=False)
    assert shoal.save(path, bags, trust=True, progress=False) == 6
    assert parquet_to_log(strange.parquet, path, table="t", progress=False, trust=True) == 7
    command("import", strange.parquet, "--to", where, "--table", "t", "--trust")(path, strange)
    assert shoal.ChangeLog(path, mode="r").version == 8
    shoal.ChangeLog(path, repair=True, trust=True).close()
    (path / "LOCK").unlink()
    (path / "LOCK").symlink_to(strange.parquet)
    with pytest.raises(StorageError, match="LOCK] wanted a file; got a link to"):
        shoal.ChangeLog(path, trust=True)


@needs_root
def test_an_empty_folder_is_begun_in_by_its_owner(tmp_path):
    (tmp_path / "own").mkdir()
    shoal.ChangeLog(tmp_path / "own").close()
    (tmp_path / "theirs").mkdir()
    owned(tmp_path, "theirs")
    with pytest.raises(CheckpointError, match=f"theirs belongs to user {OTHER}"):
        shoal.ChangeLog(tmp_path / "theirs")
    assert os.listdir(tmp_path / "theirs") == []
    shoal.ChangeLog(tmp_path / "theirs" / "log").close()  # a folder of one's own


@pytest.mark.parametrize("trust", [1, None, "yes"])
def test_trust_is_a_flag(tmp_path, trust):
    with pytest.raises(shoal.errors.ConfigError, match="trust: wanted True or False"):
        shoal.ChangeLog(tmp_path / "log", trust=trust)
    assert not Path(tmp_path / "log").exists()
