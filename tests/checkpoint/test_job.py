"""Ranks of one job that write to one path, and all who may."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import shoal
from shoal.errors import CheckpointError, ShoalError

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
    # At once: one of them is refused, whoever it is.
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
