import re
from pathlib import Path

import pytest

import examples
from examples.demo import main

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def movielens(tmp_path):
    path = tmp_path / "u.data"
    path.write_text("".join(f"{i % 17}\t{i % 23}\t{1 + i % 5}\t{i * 3600}\n" for i in range(2000)))
    return path


@pytest.fixture
def criteo(tmp_path):
    path = tmp_path / "train.tsv"
    line = "\t".join(["{label}", *["{i}"] * 13, *["{i:08x}"] * 26]) + "\n"
    path.write_text("".join(line.format(label=int(i % 3 == 0), i=i % 50) for i in range(1500)))
    return path


def report(capsys):
    """The lines of the table's body."""
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]


def test_the_click_stream_is_trained_on_and_reported(tmp_path, capsys):
    assert main(["--steps", "48", "--seed", "1", "--out", str(tmp_path / "new" / "out")]) == 0
    lines = report(capsys)
    assert len(lines) == 12 + 1
    assert "second half" in lines[-1]
    picture = tmp_path / "new" / "out" / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", ["criteo", "movielens"])
def test_real_data_gets_the_same_report(kind, request, tmp_path, capsys):
    path = request.getfixturevalue(kind)
    assert main([f"--{kind}", str(path), "--out", str(tmp_path)]) == 0
    assert "second half" in report(capsys)[-1]
    assert (tmp_path / "demo.png").exists()


def test_a_bad_file_is_an_error_in_one_line(tmp_path, criteo, capsys):
    with criteo.open("a") as file:
        file.write("nonsense\n")
    assert main(["--criteo", str(criteo), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"demo: {criteo}, line 1501: wanted 40 fields")
    assert error.count("\n") == 1
    assert main(["--movielens", str(tmp_path / "absent"), "--out", str(tmp_path)]) == 2
    assert "absent: cannot be read: No such file" in capsys.readouterr().err
    assert main(["--out", str(criteo)]) == 2
    assert str(criteo) in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--steps", "x"], ["--seed", "-1"], ["--criteo", "a", "--movielens", "b"], ["--no"]]
)
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: demo" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_gives_the_numbers_of_the_readme(tmp_path, capsys):
    assert main(["--out", str(tmp_path)]) == 0
    ours, theirs, gain = (float(cell) for cell in report(capsys)[-1].strip("│").split("│")[-3:])
    said = re.search(r"AUC is ([\d.]+), against ([\d.]+)\s.*?: \.(\d+)\s+more", README.read_text(), re.DOTALL)
    assert (f"{ours:.2f}", f"{theirs:.2f}", f"{gain:.2f}") == (said[1], said[2], f"0.{said[3]}")


def test_examples_stay_short():
    files = list(Path(examples.__file__).parent.glob("*.py"))
    assert len(files) > 5
    for path in files:
        assert len(path.read_text().splitlines()) < 150, path
