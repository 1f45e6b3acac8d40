"""Writers and compactions that are killed while both work."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


def crash(folder, kind, rounds, seed):
    done = subprocess.run(
        [sys.executable, "-m", "support.crashing", str(folder), kind, str(rounds), str(seed)],
        env={
            "PYTHONPATH": f"{TESTS}:{':'.join(sys.path)}",
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{rounds} rounds" in done.stdout


@pytest.mark.timeout(600)
def test_killed_writers_lose_nothing_that_they_acknowledged(tmp_path):
    crash(tmp_path, "kill", 20, seed=1)  # 35 kills


@pytest.mark.timeout(600)
def test_writers_whose_power_fails_lose_nothing_that_was_on_the_disk(tmp_path):
    crash(tmp_path, "power", 12, seed=1)  # 21 cuts


@pytest.mark.timeout(600)
def test_compactions_that_are_killed_beside_a_writer_lose_nothing(tmp_path):
    crash(tmp_path, "compactor", 3, seed=1)  # 9 kills


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["kill", "power", "compactor"])
@pytest.mark.parametrize("seed", range(2, 7))
def test_many_writers_that_died(tmp_path, kind, seed):
    crash(tmp_path, kind, 35 if kind == "compactor" else 100, seed)  # of them, each kills 3
