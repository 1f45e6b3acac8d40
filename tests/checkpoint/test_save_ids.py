"""Parts that several ranks saved are loaded together if they are of one save, and of no two."""

import json
import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from support.forged import Forged

import shoal
from shoal.errors import CheckpointError, InputError

RANKS = 2


def bags_of(rank, value):
    """The even keys, or the odd ones."""
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 1, optimizer=None)], seed=0)
    bags.table("t").assign([rank, rank + 2], torch.full((2, 1), float(value)))
    return bags


def loaded(path):
    bags = bags_of(0, 0.0)
    commit = shoal.load(path, bags)
    return commit.step, bags.table("t").lookup([0, 1, 2, 3]).flatten().tolist()


def save(path, rank, value, step, **options):
    return shoal.save(path, bags_of(rank, value), step=step, rank=rank, ranks=RANKS, **options)


def test_parts_of_two_runs_with_one_step_are_not_one_checkpoint(tmp_path):
    for rank in range(RANKS):
        save(tmp_path, rank, 5, 5, save_id="run 1, step 5")
    assert loaded(tmp_path) == (5, [5.0] * 4)
    save(tmp_path, 0, 61, 6, save_id="run 1, step 6")  # rank 1 dies
    with pytest.raises(CheckpointError, match="rank 0 saved step 6"):
        loaded(tmp_path)
    save(tmp_path, 1, 62, 6, save_id="run 2, step 6")  # rank 0 dies
    with pytest.raises(CheckpointError, match="parts of one save; rank 0 saved step 6 with the id run 1, step 6"):
        loaded(tmp_path)
    for rank in (1, 0):
        save(tmp_path, rank, 7, 6, save_id="run 3, step 6")
    assert loaded(tmp_path) == (6, [7.0] * 4)


def test_equal_steps_and_versions_of_two_saves_are_refused(tmp_path):
    save(tmp_path / "one", 0, 1, 1, save_id="one")
    save(tmp_path / "two", 1, 2, 1, save_id="two")
    os.rename(tmp_path / "two" / "rank-00001-of-00002", tmp_path / "one" / "rank-00001-of-00002")
    with pytest.raises(CheckpointError, match=r"parts of one save; rank 0 .* with the id one and rank 1 with two"):
        loaded(tmp_path / "one")


def test_ranks_that_are_not_known_to_be_of_one_job_give_an_id(tmp_path):
    with pytest.raises(InputError, match=r"save_id: wanted a str that the 2 ranks share.*torch\.distributed"):
        save(tmp_path / "x", 0, 1, 1)
    assert not (tmp_path / "x").exists()
    for wrong in ("", 3, b"x", "a\nb", "x" * 129):
        with pytest.raises(InputError, match="save_id: wanted a printable str"):
            save(tmp_path / "x", 0, 1, 1, save_id=wrong)
    assert shoal.save(tmp_path / "alone", bags_of(0, 1)) == 1  # one process needs none


@pytest.mark.parametrize("mixed", [False, True])
def test_parts_without_ids_are_told_by_step_and_version(tmp_path, mixed):
    """As they were saved when parts had none."""
    for rank in range(RANKS):
        save(tmp_path, rank, 5, 5, save_id="x")
    for rank in range(RANKS):
        if rank == 0 or not mixed:
            part = Forged(tmp_path / f"rank-{rank:05}-of-00002")
            part.write_snapshot(lambda value: value["commit"].pop("save"))
    if mixed:
        with pytest.raises(CheckpointError, match="with the id None and rank 1 with x"):
            loaded(tmp_path)
    else:
        assert loaded(tmp_path) == (5, [5.0] * 4)
    text = (tmp_path / "rank-00001-of-00002" / "snapshots" / f"{1:020}" / "SNAPSHOT.json").read_bytes()
    assert ("save" in json.loads(text.rpartition(b"\ncrc32c")[0])["commit"]) == mixed


def begin(rank, folder, number):
    dist.init_process_group("gloo", init_method=f"file://{folder}/init{number}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)


def first_run(rank, folder):
    begin(rank, folder, 1)
    save(folder / "saved", rank, 5, 5)
    dist.barrier()
    assert loaded(folder / "saved") == (5, [5.0] * 4)
    dist.barrier()
    # The same step again: another save.
    if rank == 0:
        save(folder / "saved", rank, 55, 5)
        with pytest.raises(CheckpointError):
            loaded(folder / "saved")
    dist.barrier()
    if rank == 1:
        save(folder / "saved", rank, 55, 5)
    dist.barrier()
    assert loaded(folder / "saved") == (5, [55.0] * 4)
    # A rank that fails counts it, as all do when they save again.
    if rank == 1:
        with pytest.raises(InputError, match="event_time"):
            save(folder / "saved", rank, 5, 6, event_time="x")
    else:
        save(folder / "saved", rank, 5, 6)
    dist.barrier()
    save(folder / "saved", rank, 56, 6)
    dist.barrier()
    assert loaded(folder / "saved") == (6, [56.0] * 4)
    dist.barrier()
    dist.destroy_process_group()
    save(folder / "saved", rank, 7, 7)  # each still knows its job
    if rank == 0:
        save(folder / "saved", rank, 81, 8)
    os._exit(0)  # rank 1 dies


def second_run(rank, folder):
    begin(rank, folder, 2)
    if rank == 1:
        save(folder / "saved", rank, 82, 8)
    dist.barrier()
    os._exit(0)  # rank 0 dies


def third_run(rank, folder):
    begin(rank, folder, 3)
    save(folder / "saved", rank, 83, 8)
    dist.barrier()
    os._exit(0)


def test_ranks_of_a_job_agree_without_waiting_and_two_jobs_never(tmp_path):
    multiprocessing.spawn(first_run, (tmp_path,), nprocs=RANKS)
    with pytest.raises(CheckpointError, match="at one step"):
        loaded(tmp_path / "saved")
    multiprocessing.spawn(second_run, (tmp_path,), nprocs=RANKS)
    with pytest.raises(CheckpointError):  # 81 is of the first run, and 82 of the second
        loaded(tmp_path / "saved")
    multiprocessing.spawn(third_run, (tmp_path,), nprocs=RANKS)
    assert loaded(tmp_path / "saved") == (8, [83.0] * 4)
