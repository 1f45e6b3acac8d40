"""Ranks of one job that write to one path, and those that may."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import shoal
from shoal.errors import CheckpointError, ShoalError
from shoal.log import job
from shoal.table import JobRank

RANKS = 2


def bags_of(rank):
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 2)])
    bags.table("t").assign([rank], torch.full((1, 2), float(rank)))
    return bags


def run(rank, folder, number):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init{number}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    bags = bags_of(rank)
    writer = number % RANKS  # another rank in each job: a later one is not refused
    if rank == writer:
        for step in range(2):  # nor is the same rank
            shoal.save(folder / "saved", bags, step=step)
        with shoal.ChangeLog(folder / "log") as log:
            log.commit(bags)
    dist.barrier()
    if rank != writer:
        advice = r"rank \d wrote it, and this is rank \d.*rank= and ranks=.*one rank only"
        with pytest.raises(CheckpointError, match=advice):
            shoal.save(folder / "saved", bags)
        with pytest.raises(CheckpointError, match=advice):
            shoal.ChangeLog(folder / "log")
        with shoal.open_log(folder / "log") as log:
            assert log.version == number + 1
    shoal.save(folder / f"own-{rank}", bags)
    shoal.save(folder / "together", bags, step=number, rank=rank, ranks=RANKS)
    dist.barrier()
    # At once: one of them is refused.
    done = torch.zeros(RANKS)
    try:
        shoal.save(folder / f"race-{number}", bags)
        done[rank] = 1
        time.sleep(0.1)
    except ShoalError as error:
        assert "rank= and ranks=" in "\n".join([str(error), *getattr(error, "__notes__", ())])
    dist.all_reduce(done)
    assert done.sum() == 1
    dist.barrier()
    dist.destroy_process_group()


def refuse(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    bags = bags_of(rank)
    if rank == 1:
        with pytest.raises(ShoalError, match="metadata"):
            shoal.save(folder / "saved", bags, metadata={"a": object()})
        with pytest.raises(ShoalError, match="dense"):
            shoal.save(folder / "saved", bags, dense=3)
        with pytest.raises(ShoalError, match="version 1, offset"):
            shoal.ChangeLog(folder / "damaged")
        shoal.ChangeLog(folder / "log").close()
    dist.barrier()
    if rank == 0:
        shoal.save(folder / "saved", bags)
        with pytest.warns(shoal.log.RepairWarning), shoal.ChangeLog(folder / "damaged", repair=True) as log:
            log.commit(bags)
        with shoal.ChangeLog(folder / "log") as log:
            log.commit(bags)
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_was_refused_does_not_keep_others_out(tmp_path):
    bags = bags_of(0)
    with shoal.ChangeLog(tmp_path / "damaged") as log:
        log.commit(bags)
        log.commit(bags)
    (segment,) = (tmp_path / "damaged" / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    data[64 + 20] ^= 1
    segment.write_bytes(data)
    multiprocessing.spawn(refuse, (tmp_path,), nprocs=RANKS)


def save_alone_afterwards(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=RANKS)
    bags = bags_of(rank)
    if rank == 0:
        shoal.save(folder / "saved", bags)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        shoal.save(folder / "own", bags)
    else:
        with pytest.raises(CheckpointError, match="rank 0 wrote it, and this is rank 1"):
            shoal.save(folder / "saved", bags)


def test_a_process_knows_its_rank_when_the_group_is_gone(tmp_path):
    multiprocessing.spawn(save_alone_afterwards, (tmp_path,), nprocs=RANKS)


def test_a_process_that_is_another_rank_of_a_second_group_goes_on_with_its_log(tmp_path, monkeypatch):
    """As with two groups that use one store."""

    def save_as(rank, process):
        monkeypatch.setattr(job, "this_rank", lambda: JobRank("job", rank, process))
        return shoal.save(tmp_path / "saved", bags_of(rank))

    assert save_as(0, "first") == 1
    assert save_as(1, "first") == 2
    with pytest.raises(CheckpointError, match="rank 1 wrote it, and this is rank 0"):
        save_as(0, "second")


def restart(rank, folder, attempt, port):
    os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"] = "run", str(attempt)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(f"group{attempt}", store), rank=rank, world_size=RANKS)
    if rank == (attempt + 1) % RANKS:
        # As torchrun's, whose store is the same in all attempts.
        dist.distributed_c10d._world.pg_map[dist.distributed_c10d._get_default_group()] = ("gloo", store)
        shoal.save(folder / "saved", bags_of(rank))
    dist.barrier()
    os._exit(0)


def test_workers_that_torchrun_started_again_are_another_job(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        multiprocessing.spawn(restart, (tmp_path, attempt, store.port), nprocs=RANKS)
    rows = bags_of(7)
    assert shoal.load(tmp_path / "saved", rows).version == 2


def test_a_path_that_another_rank_of_the_job_wrote_is_refused(tmp_path):
    for number in range(2):
        multiprocessing.spawn(run, (tmp_path, number), nprocs=RANKS)
        rows = shoal.EmbeddingBagCollection([shoal.Table("t", 2)])
        shoal.load(tmp_path / "saved", rows)
        assert rows.table("t").keys().tolist() == [number % RANKS]
    shoal.save(tmp_path / "saved", bags_of(5))  # alone, behind a job


@pytest.mark.parametrize("inside", [False, True])
def test_a_path_that_is_a_file_is_refused(tmp_path, inside):
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / "x" if inside else tmp_path / "file"
    for call in (shoal.save, shoal.load, shoal.recover, lambda path, _bags: shoal.ChangeLog(path)):
        with pytest.raises(CheckpointError, match=r"wanted a folder; 'file' is a file. Name another path"):
            call(path, bags_of(0))
    assert (tmp_path / "file").read_text() == "mine"
