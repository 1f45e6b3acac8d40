"""The commands: what they print, what they leave behind, and how they fail."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from support.exchange import assert_same_table, committed
from support.logged import made
from typer.testing import CliRunner

import shoal
from shoal.cli.app import app
from shoal.log.compact import compacting
from shoal.log.files import Files

TESTS = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    path = tmp_path_factory.mktemp("logged") / "log"
    return path, committed(path)


def run(*arguments):
    return CliRunner().invoke(app, [str(one) for one in arguments])


def done(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("ending", ["parquet", "safetensors"])
def test_export_and_import(tmp_path, logged, ending):
    path, bags = logged
    file = tmp_path / f"x.{ending}"
    said = done("export", path, "--table", "b", "--to", file)
    assert said == f"{file}: {len(bags.table('b'))} rows of table 'b'\n"
    said = done("import", file, "--to", tmp_path / "made", "--table", "b")
    assert said == f"{tmp_path}/made: version 1 has table 'b' from {file}\n"
    other = made()
    shoal.load(tmp_path / "made", other, tables=["b"])
    assert_same_table(other.table("b"), bags.table("b"))
    done(
        "import", file, "--to", tmp_path / "renamed", "--table", "x", "--dtype", "float32", "--buckets", 8, "--seed", 1
    )
    third = shoal.EmbeddingBagCollection([shoal.Table("x", 16, optimizer=None, buckets=8)])
    shoal.load(tmp_path / "renamed", third)
    keys = bags.table("b").keys()
    assert torch.equal(third.table("x").lookup(keys), bags.table("b").lookup(keys))


def test_export_of_a_part(tmp_path, logged):
    path, _ = logged
    done("export", path, "--table", "a", "--to", tmp_path / "x.parquet", "--min-score", 3)
    assert min(pq.read_table(tmp_path / "x.parquet")["score"].to_pylist()) == 3
    said = done("export", path, "--table", "a", "--to", tmp_path / "x.parquet", "--since", 1)
    assert "changes of table 'a'" in said
    assert set(pq.read_table(tmp_path / "x.parquet")["op"].to_pylist()) == {"put", "delete"}
    done("export", path, "--table", "a", "--to", tmp_path / "x.parquet", "--version", 1)
    assert max(pq.read_table(tmp_path / "x.parquet")["score"].to_pylist()) == 2


def test_inspect(logged, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path, bags = logged
    said = done("inspect", path)
    assert "versions 1 to 3" in said
    for wanted in ("bfloat16", "exp_avg[16], exp_avg_sq[16], count[1]", '{"day": "monday"}', "7.5", "scores of c"):
        assert wanted in said, said
    assert f"{len(bags.table('a'))}" in said
    assert "█" in said
    assert "scores of" not in done("inspect", path, "--no-scores")


def test_inspect_as_json(logged):
    path, bags = logged
    (found,) = json.loads(done("inspect", path, "--json"))["logs"]
    assert (found["path"], found["oldest"], found["newest"]) == (str(path), 1, 3)
    assert [(one["name"], one["rows"]) for one in found["tables"]] == [(n, len(bags.table(n))) for n in "abc"]
    for table in found["tables"]:
        assert sum(bar["rows"] for bar in table["scores"]) == table["rows"]
    assert [one["version"] for one in found["snapshots"]] == [2]
    assert [(one["first"], one["last"]) for one in found["segments"]] == [(1, 3)]
    assert [(one["version"], one["step"]) for one in found["commits"]] == [(3, 3), (2, 2), (1, 1)]
    assert found["commits"][0]["event_time"] == 7.5
    assert found["commits"][1]["tables"]["b"]["deletes"] == 7
    (found,) = json.loads(done("inspect", path, "--json", "--commits", 1, "--no-scores"))["logs"]
    assert [one["version"] for one in found["commits"]] == [3]
    assert found["tables"][0]["scores"] is None


def test_a_log_without_a_commit_and_a_checkpoint_of_ranks(tmp_path):
    shoal.ChangeLog(tmp_path / "log").close()
    assert "nothing was committed yet" in done("inspect", tmp_path / "log")
    (found,) = json.loads(done("inspect", tmp_path / "log", "--json"))["logs"]
    assert found["newest"] is None
    assert "nothing to compact" in done("compact", tmp_path / "log")
    for rank in range(2):
        shoal.save(tmp_path / "parts", made(), rank=rank, ranks=2, save_id="x")
    assert len(json.loads(done("inspect", tmp_path / "parts", "--json"))["logs"]) == 2
    assert done("verify", tmp_path / "parts").count("as it was written") == 2


def test_names_and_metadata_are_no_markup(tmp_path):
    bags = shoal.EmbeddingBagCollection([shoal.Table("[red]x[/]", 2)])
    with shoal.ChangeLog(tmp_path / "log") as log:
        log.commit(bags, metadata={"a": "[/]\x1b[31m"})
    said = done("inspect", tmp_path / "log")
    assert "[red]x[/]" in said
    assert "\x1b" not in said


def test_verify(tmp_path):
    committed(tmp_path / "log")
    assert "as it was written" in done("verify", tmp_path / "log")
    (found,) = json.loads(done("verify", tmp_path / "log", "--json"))["logs"]
    assert found["sound"] and (found["snapshots"], found["commits"], found["problems"]) == (1, 3, [])
    file = next((tmp_path / "log" / "snapshots").rglob("00001.arrow"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    result = run("verify", tmp_path / "log")
    assert result.exit_code == 1
    assert "checksum is wrong" in result.stdout
    result = run("verify", tmp_path / "log", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["logs"][0]["sound"]


def test_compact(tmp_path):
    bags = committed(tmp_path / "log")
    assert done("compact", tmp_path / "log", "--retain", 1) == f"{tmp_path}/log: snapshot of version 3\n"
    assert done("compact", tmp_path / "log") == f"{tmp_path}/log: there is nothing to compact\n"
    with compacting(Files(str(tmp_path / "log"))):
        assert done("compact", tmp_path / "log") == f"{tmp_path}/log: another process is compacting it now\n"
    (found,) = json.loads(done("inspect", tmp_path / "log", "--json"))["logs"]
    assert found["oldest"] in (1, 3)
    assert [one["version"] for one in found["snapshots"]] == [3]
    other = made()
    shoal.recover(tmp_path / "log", other)
    assert_same_table(other.table("a"), bags.table("a"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nothing"), "[checkpoint nothing] wanted a checkpoint or a log"),
        (("verify", "nothing"), "wanted a checkpoint or a log"),
        (("compact", "nothing"), "wanted a checkpoint or a log"),
        (("inspect", "FILE"), "wanted a folder; 'FILE' is a file. Name another path."),
        (("verify", "FILE"), "wanted a folder; 'FILE' is a file"),
        (("compact", "FILE"), "wanted a folder; 'FILE' is a file"),
        (("repair", "FILE"), "wanted a folder; 'FILE' is a file"),
        (("repair", "FILE/below"), "wanted a folder; 'FILE' is a file"),
        (("export", "FILE", "--table", "a", "--to", "x.parquet"), "wanted a folder; 'FILE' is a file"),
        (("export", "FILE", "--table", "a", "--to", "x.safetensors"), "wanted a folder; 'FILE' is a file"),
        (("export", "LOG", "--table", "x", "--to", "x.parquet"), "got 'x'"),
        (("export", "LOG", "--table", "a", "--to", "x.parquet", "--since", "9"), "since: wanted a version up to 3"),
        (("export", "LOG", "--table", "a", "--to", "no/x.parquet"), "no/x.parquet"),
        (("import", "nothing.parquet", "--table", "a", "--to", "made"), "wanted a file to import"),
    ],
)
def test_errors_are_their_own_text_and_1(tmp_path, monkeypatch, logged, arguments, message):
    monkeypatch.chdir(tmp_path)
    if any(one.startswith("FILE") for one in arguments):
        Path("FILE").write_text("no log")
    result = run(*(logged[0] if one == "LOG" else one for one in arguments))
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert all(path.name == "FILE" for path in tmp_path.iterdir())


def test_changes_that_are_in_a_snapshot_alone(tmp_path):
    for _ in range(2):
        shoal.save(tmp_path / "saved", made())
    export = ("export", tmp_path / "saved", "--table", "a", "--to", tmp_path / "x.parquet", "--since")
    for since in (0, 1):
        result = run(*export, since)
        assert result.exit_code == 1
        assert f"since: wanted a version from 2 to 2, as versions up to 2 are in a snapshot alone; got {since}. " in (
            result.stderr
        )
        assert "Leave it out" in result.stderr
    assert "0 changes" in done(*export, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("inspect",),
        ("export", "LOG", "--to", "x.parquet"),
        ("export", "LOG", "--table", "a", "--to", "x.csv"),
        ("export", "LOG", "--table", "a", "--to", "x.parquet", "--since", "1", "--min-score", "1"),
        ("export", "LOG", "--table", "a", "--to", "x.safetensors", "--since", "1"),
        ("import", "x.csv", "--table", "a", "--to", "made"),
        ("compact", "LOG", "--retain", "0"),
    ],
)
def test_wrong_usage_is_2(tmp_path, monkeypatch, logged, arguments):
    monkeypatch.chdir(tmp_path)
    result = run(*(logged[0] if one == "LOG" else one for one in arguments))
    assert result.exit_code == 2
    assert "Usage" in result.stderr


WRITER = """
    import sys
    sys.path.insert(0, sys.argv[2])
    import shoal
    from support.logged import made, train

    bags = made()
    with shoal.ChangeLog(sys.argv[1], fsync="never", segment=200_000) as log:
        train(bags, range(3))
        log.commit(bags)
        print("begun", flush=True)
        for step in range(3, 100_000):
            train(bags, [step % 50], keys=500)
            bags.table("a").erase(bags.table("a").keys()[:3])
            log.commit(bags, step=step)
            if step % 8 == 0 and not open(sys.argv[1] + ".go").read():
                break
    shoal.save(sys.argv[1] + ".last", bags)
"""


@pytest.mark.timeout(600)
def test_commands_while_another_process_commits(tmp_path):
    log = tmp_path / "log"
    Path(f"{log}.go").write_text("go")
    program = [sys.executable, "-c", textwrap.dedent(WRITER), str(log), str(TESTS)]
    writer = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "begun\n"
        command = [sys.executable, "-m", "shoal.cli", "compact", str(log)]  # of its own, as from a shell
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        assert "snapshot of version" in ran.stdout
        for arguments in (
            ["inspect", log, "--json"],
            ["export", log, "--table", "a", "--to", tmp_path / "x.parquet"],
            ["compact", log],
            ["verify", log],
        ):
            said = done(*arguments)
            assert writer.poll() is None, "it wrote all the while"
            if arguments[0] == "compact":
                assert "snapshot of version" in said
    finally:
        Path(f"{log}.go").write_text("")
        writer.wait(500)
        writer.stdout.close()
    assert writer.returncode == 0
    assert pq.read_metadata(tmp_path / "x.parquet").num_rows > 0
    found, wanted = made(), made()
    shoal.recover(log, found)
    shoal.load(f"{log}.last", wanted)
    for name in "abc":
        assert_same_table(found.table(name), wanted.table(name))
