import gzip
import re

import pytest
import torch

from examples.fields import ReadError
from examples.readers import Criteo, MovieLens


def criteo_line(label="1", counts="", categories=""):
    return "\t".join([label, *(counts.split(",") + [""] * 13)[:13], *(categories.split(",") + [""] * 26)[:26]]) + "\n"


def movielens_lines(ratings, separator):
    return "".join(separator.join(map(str, rating)) + "\n" for rating in ratings)


RATINGS = [(1, 10, 3.5, 86_400), (2, 11, 4.0, 0), (3, 10, 5, 43_200)]


def test_criteo_fields_become_labels_counts_and_ids(tmp_path):
    path = tmp_path / "day.tsv"
    path.write_text(criteo_line("1", "7,,-2", "68fd1e64,,ffffffff") + criteo_line("0", "", ",80e26c9b"))
    source = Criteo(path, max_steps=10)
    (batch,) = source
    assert source.steps == 1
    assert batch.labels.tolist() == [1, 0]
    assert batch.dense.shape == (2, 13)
    torch.testing.assert_close(batch.dense[:, :3], torch.tensor([[8.0, 1.0, 1.0], [1.0, 1.0, 1.0]]).log())
    assert batch.ids["C1"].values().tolist() == [0x68FD1E64]
    assert batch.ids["C1"].lengths().tolist() == [1, 0]
    assert batch.ids["C2"].values().tolist() == [0x80E26C9B]
    assert batch.ids["C2"].lengths().tolist() == [0, 1]
    assert batch.ids["C3"].values().tolist() == [0xFFFFFFFF]
    assert batch.ids["C26"].lengths().tolist() == [0, 0]


def test_criteo_is_read_again_from_a_gzipped_file_and_up_to_max_steps(tmp_path):
    path = tmp_path / "day.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(criteo_line("0", str(i), f"{i:x}") for i in range(25))
    whole, part = Criteo(path, max_steps=10, batch=10), Criteo(path, max_steps=2, batch=10)
    assert [len(batch.labels) for batch in whole] == [10, 10, 5]
    assert whole.steps == 3
    assert part.steps == 2
    assert torch.cat([batch.ids["C1"].values() for batch in part]).tolist() == list(range(20))
    assert torch.cat([batch.ids["C1"].values() for batch in part]).tolist() == list(range(20))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1\t2\t3\n", "wanted 40 fields separated by tabs (label, 13 counts, 26 categories); got 3"),
        ("\n", "got 1"),
        (criteo_line("2"), "wanted 0 or 1 as the label; got '2'"),
        (criteo_line("0", ",x"), "wanted an integer or nothing as count I2; got 'x'"),
        (
            criteo_line("0", "", ",,xyz"),
            "wanted a hexadecimal number of up to 15 digits or nothing as category C3; got",
        ),
        (criteo_line("0", "", "0123456789abcdef"), "category C1"),
    ],
)
def test_a_bad_criteo_line_is_named_with_what_was_wanted(tmp_path, line, message):
    path = tmp_path / "day.tsv"
    path.write_text(criteo_line() + line)
    with pytest.raises(ReadError, match=re.escape(f"{path}, line 2: ") + ".*" + re.escape(message)):
        list(Criteo(path, max_steps=10))


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for reader in (Criteo, MovieLens):
        with pytest.raises(ReadError, match=r"absent: cannot be read: No such file"):
            reader(tmp_path / "absent", max_steps=10)
        with pytest.raises(ReadError, match=r"cannot be read: Is a directory"):
            reader(tmp_path, max_steps=10)
        (tmp_path / "empty").touch()
        with pytest.raises(ReadError, match="wanted"):
            reader(tmp_path / "empty", max_steps=10)
        (tmp_path / "torn.gz").write_bytes(gzip.compress(criteo_line().encode() * 1000)[:-20])
        with pytest.raises(ReadError, match=r"torn\.gz"):
            reader(tmp_path / "torn.gz", max_steps=10)
        (tmp_path / "binary").write_bytes(bytes(range(256)))
        with pytest.raises(ReadError, match="binary, line 1"):
            list(reader(tmp_path / "binary", max_steps=10))


@pytest.mark.parametrize(("separator", "header"), [(",", "userId,movieId,rating,timestamp\n"), ("\t", ""), ("::", "")])
def test_movielens_ratings_come_in_the_order_they_were_given(tmp_path, separator, header):
    path = tmp_path / "ratings"
    path.write_text(header + movielens_lines(RATINGS, separator))
    source = MovieLens(path, max_steps=10, batch=2)
    first, second = source
    assert source.steps == 2
    assert first.ids["user"].values().tolist() == [2, 3]
    assert first.ids["movie"].values().tolist() == [11, 10]
    assert first.labels.tolist() == [1, 1]
    assert second.labels.tolist() == [0]
    assert (first.time, second.time) == (0, 1)
    assert second.dense.shape == (1, 4)
    assert MovieLens(path, max_steps=1, batch=2).steps == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,3\n", "wanted 4 fields separated by ',' (userId,movieId,rating,timestamp); got 3"),
        ("u,2,3,4\n", "wanted an integer of 64 bits as userId; got 'u'"),
        (f"1,{2**63},3,4\n", "as movieId"),
        ("1,2,nan,4\n", "wanted a number from 0 to 5 as rating; got 'nan'"),
        ("1,2,3,today\n", "as timestamp; got 'today'"),
    ],
)
def test_a_bad_rating_is_named_with_what_was_wanted(tmp_path, line, message):
    path = tmp_path / "ratings.csv"
    path.write_text("userId,movieId,rating,timestamp\n1,2,3,4\n" + line)
    with pytest.raises(ReadError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(message)):
        MovieLens(path, max_steps=10)


def test_a_csv_with_another_header_is_refused(tmp_path):
    path = tmp_path / "movies.csv"
    path.write_text("movieId,title,genres\n1,Toy Story (1995),Adventure\n")
    with pytest.raises(ReadError, match=r"line 1: wanted a csv with the header .*; got 'movieId,title,genres'"):
        MovieLens(path, max_steps=10)
    path.write_text("userId,movieId,rating,timestamp\n")
    with pytest.raises(ReadError, match="wanted ratings below the header; got none"):
        MovieLens(path, max_steps=10)
