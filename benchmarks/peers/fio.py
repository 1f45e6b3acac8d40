"""fio: the speed of the disk itself, with the same direct I/O at the same depth."""

import json
import pathlib
import subprocess


def run(file: pathlib.Path, mode: str, block: str, depth: int, size: int, seconds: float) -> dict[str, float]:
    """Returns requests and bytes a second of one job on one file."""
    done = subprocess.run(
        [
            "fio", "--name=job", f"--filename={file}", f"--rw={mode}", f"--bs={block}", f"--iodepth={depth}",
            f"--size={size}", f"--runtime={1000 * seconds:.0f}ms", "--time_based", "--direct=1", "--ioengine=io_uring",
            "--output-format=json", "--randrepeat=0",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    half = job["read" if "read" in mode else "write"]
    return {"requests": half["iops"], "bytes": half["bw_bytes"]}
