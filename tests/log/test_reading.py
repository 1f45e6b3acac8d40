"""Reading a log, also while others write and compact it."""

import threading

import pyarrow.parquet as pq
import pytest
import torch
from support.logged import made, train

import shoal
from shoal.errors import NotFoundError
from shoal.interop.parquet import export_parquet
from shoal.log.files import Files
from shoal.log.snapshot import buckets_of
from shoal.log.summary import summarize


def test_dense_weights_of_versions_that_are_gone_are_not_missed(tmp_path):
    bags, model = made(), torch.nn.Linear(2, 2)
    with shoal.ChangeLog(tmp_path / "log", segment="30KiB", retain=1) as log:
        for step in range(11):
            train(bags, [step], keys=20)
            log.commit(bags, dense=model)
            if step in (5, 9):
                log.compact()
        report = log.verify()
        assert report.is_sound, report.problems
        for file in sorted((tmp_path / "log" / "dense").iterdir()):
            content = file.read_bytes()
            file.unlink()
            assert not log.verify().is_sound
            file.write_bytes(content)


@pytest.mark.threads
def test_readers_beside_compaction(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 4)])
    over, failed = threading.Event(), []
    with shoal.ChangeLog(tmp_path / "log", fsync="never", segment="8KiB", retain=1) as log:
        bags.table("t").assign(range(50), torch.zeros(50, 4))
        log.commit(bags)

        def compact():
            try:
                while not over.is_set():
                    log.compact()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=compact)
        thread.start()
        try:
            for step in range(60):
                bags.table("t").assign(range(step, step + 10), torch.full((10, 4), float(step)))
                log.commit(bags)
                report = log.verify()
                assert report.is_sound, report.problems
                assert summarize(Files(str(tmp_path / "log"))).newest == log.version
                assert export_parquet(tmp_path / "log", tmp_path / "x.parquet", table="t") == len(bags.table("t"))
                assert max(pq.read_table(tmp_path / "x.parquet")["row"].to_pylist()) == [float(step)] * 4
        finally:
            over.set()
            thread.join()
    assert not failed


def test_tables_that_are_not_there_and_rows_of_some_buckets(tmp_path):
    bags = made()
    with shoal.ChangeLog(tmp_path / "log") as log:
        train(bags, range(3))
        log.commit(bags)
        log.compact()
        train(bags, range(3, 5))
        log.commit(bags)
        version = log.at(2)
        for read in (version.rows, next(log.tail(1)).changes):
            with pytest.raises(NotFoundError, match="'a', 'b', 'c'; got 'typo'"):
                list(read("typo"))
        found = torch.cat([rows.keys for rows in version.rows("a", 100, 900)])
        keys = bags.table("a").keys()
        buckets = buckets_of(keys, 4096)
        assert torch.equal(found.sort().values, keys[(buckets >= 100) & (buckets < 900)])
