"""shoal.hash_ids: the same id for a string in every container, integers as they are, and nothing that has no id."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.batches import kjt

import shoal
from shoal.errors import InputError
from shoal.ops.hash_ids.reference import id_of, xxh64

ODD = [
    "",
    "a",
    "a\0b",
    "née",
    "表",
    "😀 \U0010ffff",
    "x" * 31,
    "x" * 32,
    "x" * 33,
    "é" * 100,
    "\x7f\x80\u07ff\u0800\uffff",
]
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=70), max_size=30)
BYTES = st.lists(st.binary(max_size=140), max_size=30)


def ids(given):
    made = shoal.hash_ids(given)
    assert made.dtype == torch.int64
    assert made.dim() == 1
    assert made.is_contiguous()
    return made.tolist()


def test_what_pandas_makes_of_a_series_has_its_ids():
    series = pd.Series(["b", "a", "b", "c"], dtype="str")
    wanted = [id_of(text) for text in "bac"]
    for one in (series, series.astype("string"), series.astype("category"), series.astype(object)):
        assert ids(one.unique()) == wanted
        assert ids(one.drop_duplicates().values) == wanted
    assert ids(pd.Categorical([3, 1, 3])) == [3, 1, 3]
    assert ids(pd.Series([3, 1]).array) == ids(pd.array([3, 1], dtype="Int64")) == [3, 1]
    assert ids(pd.array([2**64 - 1], dtype="UInt64")) == [-1]


def signed(hashed):
    return hashed - 2**64 if hashed >= 2**63 else hashed


@pytest.mark.parametrize(
    ("text", "hashed"),
    [
        # of xxHash's own documentation and tests, and of Go's github.com/cespare/xxhash
        ("", 0xEF46DB3751D8E999),
        ("a", 0xD24EC4F1A98C6E5B),
        ("as", 0x1C330FB2D66BE179),
        ("asd", 0x631C37CE72A97393),
        ("asdf", 0x415872F599CEA71E),
        ("abc", 0x44BC2CF5AD770999),
        ("Call me Ishmael. Some years ago--never mind how long precisely-", 0x02A2E85470D6FD96),
    ],
)
def test_published_values(text, hashed):
    assert xxh64(text.encode()) == hashed
    assert ids([text]) == ids([text.encode()]) == [signed(hashed)]


def text_containers(texts):
    """The same strings in everything that holds strings."""
    chunks = pa.chunked_array([pa.array(texts[:1], pa.string()), pa.array(texts[1:], pa.string())], pa.string())
    sliced = pa.array(["before", "x", *texts, "behind"], pa.large_string()).slice(2, len(texts))
    encoded = [text.encode() for text in texts]
    return {
        "list": list(texts),
        "tuple": tuple(texts),
        "mixed": [text.encode() if at % 2 else text for at, text in enumerate(texts)],
        "bytes": encoded,
        "object array": np.array(texts, dtype=object),
        "object array with steps": np.array([one for text in texts for one in (text, "?")], dtype=object)[::2],
        "StringDType": np.array(texts, dtype=np.dtypes.StringDType()),
        "object series": pd.Series(texts, dtype=object),
        "series": pd.Series(texts, dtype="str"),
        "nullable series": pd.Series(texts, dtype="string"),
        "arrow series": pd.Series(texts, dtype=pd.ArrowDtype(pa.string())),
        "category": pd.Series(texts, dtype="category"),
        "series with an index": pd.Series(texts, index=range(7, 7 + len(texts)), dtype="str"),
        "index": pd.Index(texts, dtype="str"),
        "values": pd.Series(texts, dtype="str").values,
        "array": pd.Series(texts, dtype="str").array,
        "array of objects": pd.Series(texts, dtype=object).array,
        "array of nullable strings": pd.Series(texts, dtype="string").array,
        "array of an index": pd.Index(texts, dtype="str").array,
        "array of Arrow": pd.Series(texts, dtype=pd.ArrowDtype(pa.string())).array,
        "sliced array": pd.Series(["before", *texts], dtype="str").array[1:],
        "Categorical": pd.Categorical(texts),
        "array of categories": pd.Series(texts, dtype="category").array,
        "string": pa.array(texts, pa.string()),
        "large_string": pa.array(texts, pa.large_string()),
        "string_view": pa.array(texts, pa.string_view()),
        "binary": pa.array(encoded, pa.binary()),
        "large_binary": pa.array(encoded, pa.large_binary()),
        "binary_view": pa.array(encoded, pa.binary_view()),
        "dictionary": pa.array(texts, pa.string()).dictionary_encode(),
        "dictionary of large strings": pa.array(texts, pa.large_string()).dictionary_encode(),
        "sliced": sliced,
        "sliced dictionary": sliced.dictionary_encode(),
        "slice of a dictionary": pa.array(["before", *texts], pa.string()).dictionary_encode().slice(1),
        "sliced view": pa.array(["before", *texts], pa.string_view()).slice(1),
        "chunks": chunks,
        "chunked dictionary": chunks.dictionary_encode(),
    }


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_a_string_has_one_id_in_every_container(texts):
    wanted = [id_of(text) for text in texts]
    for name, container in text_containers(texts).items():
        assert ids(container) == wanted, name


@pytest.mark.parametrize("name", text_containers(ODD))
def test_odd_strings(name):
    assert ids(text_containers(ODD)[name]) == [id_of(text) for text in ODD]


@pytest.mark.parametrize("name", text_containers([]))
def test_nothing_in_every_container(name):
    assert ids(text_containers([])[name]) == []


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_fixed_width_strings_end_before_their_padding(texts):
    array = np.array(texts, dtype="U")
    wanted = [id_of(text.rstrip("\0")) for text in texts]
    big = array.astype(array.dtype.newbyteorder(">"))
    assert ids(array) == ids(big) == wanted
    assert ids(array[::-1]) == wanted[::-1]
    assert ids(array.repeat(3)[1::3]) == wanted
    assert ids(np.array(array.tolist(), dtype="U80")) == wanted


@settings(deadline=None, max_examples=60)
@given(BYTES)
def test_bytes(given):
    wanted = [id_of(one) for one in given]
    padded = [id_of(one.rstrip(b"\0")) for one in given]
    array = np.array(given, dtype="S")
    assert ids(given) == ids(pd.Series(given, dtype=object)) == ids(pa.array(given, pa.binary())) == wanted
    assert ids(array) == ids(array.repeat(2)[::2]) == padded
    assert ids(array[::-1]) == padded[::-1]


def test_fixed_size_binary_keeps_its_nuls():
    array = pa.array([b"a\0\0", b"abc", b"\0\0\0"], pa.binary(3))
    assert ids(array) == [id_of(b"a\0\0"), id_of(b"abc"), id_of(b"\0\0\0")]
    assert ids(array[1:]) == [id_of(b"abc"), id_of(b"\0\0\0")]


def test_strings_without_width():
    assert ids(np.zeros(3, dtype=np.dtype([("s", "S0")]))["s"]) == [id_of("")] * 3
    assert ids(np.zeros(3, dtype=np.dtype([("s", "U0")]))["s"]) == [id_of("")] * 3


def test_many_strings_on_any_number_of_threads():
    texts = [f"user-{n * n}" for n in range(50_000)]
    wanted = [id_of(text) for text in texts[::1000]]
    column, fixed = pa.array(texts), np.array(texts)
    before = shoal.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 5):
            shoal.set_num_threads(threads)
            made += [shoal.hash_ids(column), shoal.hash_ids(fixed), shoal.hash_ids(fixed.astype("S"))]
    finally:
        shoal.set_num_threads(before)
    assert made[0][::1000].tolist() == wanted
    assert all(torch.equal(one, made[0]) for one in made)
    assert len(made[0].unique()) == len(texts)


INTEGERS = [0, 1, 2**63 - 1, 2**63, 2**64 - 1]
SAME_BITS = [0, 1, 2**63 - 1, -(2**63), -1]


@pytest.mark.parametrize(
    "given",
    [
        np.array(INTEGERS, dtype=np.uint64),
        np.array(INTEGERS, dtype=">u8"),
        np.array(INTEGERS, dtype=np.uint64).repeat(2)[::2],
        np.array(INTEGERS[::-1], dtype=np.uint64)[::-1],
        np.ma.masked_array(np.array(INTEGERS, dtype=np.uint64), mask=[False] * 5),
        torch.tensor(INTEGERS, dtype=torch.uint64),
        pd.Series(INTEGERS, dtype="uint64"),
        pd.Series(INTEGERS, dtype="UInt64"),
        pd.Series(INTEGERS, dtype="uint64").astype("category"),
        pd.Series(INTEGERS, dtype=pd.ArrowDtype(pa.uint64())),
        pa.array(INTEGERS, pa.uint64()),
        pa.array([7, *INTEGERS, 7], pa.uint64()).slice(1, 5),
        pa.chunked_array([pa.array(INTEGERS[:2], pa.uint64()), pa.array(INTEGERS[2:], pa.uint64())]),
        pa.array(INTEGERS, pa.uint64()).dictionary_encode(),
    ],
    ids=lambda given: type(given).__name__,
)
def test_uint64_keeps_its_bits(given):
    assert ids(given) == SAME_BITS


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("kind", ["int", "uint"])
def test_other_integers_keep_their_value(kind, bits):
    if (kind, bits) == ("uint", 64):
        return
    name = f"{kind}{bits}"
    values = [0, 5, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if kind == "int" else [0, 5, 2**bits - 1]
    for held in (
        np.array(values, dtype=name),
        np.array(values, dtype=np.dtype(name).newbyteorder(">")),
        torch.tensor(values, dtype=getattr(torch, name)),
        pd.Series(values, dtype=name),
        pd.Series(values, dtype=name.replace("uint", "UInt") if kind == "uint" else name.title()),
        pa.array(values, getattr(pa, name)()),
        pa.array([1, *values], getattr(pa, name)()).slice(1),
    ):
        assert ids(held) == values


def test_arrays_that_are_not_to_be_written_to_are_copied():
    array = np.arange(3)
    array.flags.writeable = False
    made = shoal.hash_ids(array)
    made += 1
    column = pa.array([1, 2, 3])
    shoal.hash_ids(column).add_(1)
    assert array.tolist() == [0, 1, 2]
    assert column.to_pylist() == [1, 2, 3]


def test_ids_go_into_tables():
    bags = shoal.EmbeddingBagCollection([shoal.Table("user", 3)])
    users = shoal.hash_ids(["anna", "bob", "anna"])
    bags(shoal.KeyedJaggedTensor(["user"], users, lengths=torch.tensor([1, 2])))
    assert sorted(bags.table("user").keys().tolist()) == sorted({id_of("anna"), id_of("bob")})


@pytest.mark.parametrize(
    "given",
    [
        ["a", "b", "c", None],
        ["a", "b", b"c", float("nan"), None],
        ("a", "b", "c", pd.NA, 7),
        np.array(["a", "b", "c", np.nan], dtype=object),
        np.ma.masked_array(["a", "b", "c", "d"], mask=[False, False, False, True]),
        np.ma.masked_array([1, 2, 3, 4], mask=[False, False, False, True]),
        pd.Series(["a", "b", "c", None], dtype=object),
        pd.Series(["a", "b", "c", None], dtype="str"),
        pd.Series(["a", "b", "c", pd.NA], dtype="string"),
        pd.Series(["a", "b", "c", None], dtype="category"),
        pd.Series([1, 2, 3, None], dtype="Int64"),
        pd.array([1, 2, 3, None], dtype="Int64"),
        pd.Categorical(["a", "b", "c", None]),
        pd.Series(["a", "b", "c", None], dtype="str").array,
        pd.Series(["a", "b", "c", None], dtype=object).array,
        pa.array(["a", "b", "c", None]),
        pa.array(["?", "a", "b", "c", None, None], pa.string_view()).slice(1),
        pa.array([1, 2, 3, None], pa.uint64()),
        pa.chunked_array([["a", "b"], ["c", None]]),
        pa.chunked_array([["a", "b"], ["c", None]]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([1, 1, 1, 0]), pa.array([None, "a"])),
        pa.chunked_array(
            [
                pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array(["a"])),
                pa.DictionaryArray.from_arrays(pa.array([1, 0]), pa.array([None, "a"])),
            ]
        ),
    ],
    ids=lambda given: type(given).__name__,
)
def test_nulls_are_refused_with_their_place(given):
    with pytest.raises(InputError, match=r"\[hash_ids\] wanted an id in every place; got a null at 3\."):
        shoal.hash_ids(given)


def test_a_column_of_nulls():
    with pytest.raises(InputError, match="null at 0"):
        shoal.hash_ids(pa.array([None, None]))
    assert ids(pa.array([])) == []
    assert ids(pa.chunked_array([], pa.string())) == []
    assert ids(pa.chunked_array([], pa.uint64())) == []


def test_a_null_that_no_index_points_to_is_none():
    assert ids(pa.DictionaryArray.from_arrays(pa.array([1, 1]), pa.array([None, "a"]))) == [id_of("a")] * 2


@pytest.mark.parametrize(
    "given",
    [
        ["a", "b\ud800"],
        ["a", "\udfff", None],
        np.array(["a", "b\ud800"], dtype=object),
        np.array(["a", "b\udc00"], dtype="U"),
        np.array(["a", "b\udc00"], dtype=">U4"),
        pd.Series(["a", "b\ud800"], dtype=object),
        pd.Series(["a", "b\ud800"], dtype=object).array,
    ],
)
def test_lone_surrogates_are_refused_with_their_place(given):
    with pytest.raises(InputError, match=r"strings that have UTF-8; the one at 1 has a lone surrogate\. .*bytes"):
        shoal.hash_ids(given)


def test_what_is_above_the_last_code_point_is_called_so():
    points = np.array([[ord("a"), 0], [ord("b"), 0x110000], [0xD800, 0]], dtype=np.uint32)
    text = points.view("U2").reshape(-1)
    with pytest.raises(InputError, match=r"the one at 1 has the code point 0x110000, and the last one is 0x10ffff\."):
        shoal.hash_ids(text)
    with pytest.raises(InputError, match="the one at 1 has a lone surrogate"):
        shoal.hash_ids(text[[0, 2]])


@pytest.mark.parametrize("strings", [["x"], ("x", "y"), [b"x"], np.array(["x"]), np.array([b"x"])])
def test_strings_in_place_of_ids_are_told_of_it(strings):
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 4)])
    with pytest.raises(InputError, match=r"shoal.hash_ids makes int64 of strings\."):
        shoal.KeyedJaggedTensor(["a"], strings, lengths=torch.tensor([len(strings)]))
    with pytest.raises(InputError, match=r"shoal.hash_ids makes int64 of strings\."):
        bags.table("a").lookup(strings)
    with pytest.raises(InputError, match=r"values: wanted a tensor; got list\.$"):
        shoal.KeyedJaggedTensor(["a"], [1], lengths=torch.tensor([1]))


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("abc", r"several ids; got one str\. Write \['abc'\]"),
        (b"abc", "several ids; got one bytes"),
        (["a", 3], r"str or bytes; got int at 1\. Integers go into a tensor"),
        ([1, 2], "str or bytes; got int at 0"),
        (["a", 1.5], "got float at 1"),
        (["a", ["b"]], "got list at 1"),
        ([True], "got bool at 0"),
        (7, "wanted a list of str or bytes, .* got int"),
        (None, "got NoneType"),
        ({"a": 1}, "got dict"),
        (iter(["a"]), "got list_iterator"),
        (torch.tensor([1.0]), "tensor of integers; got torch.float32"),
        (torch.tensor([True]), "tensor of integers; got torch.bool"),
        (torch.tensor([[1]]), r"one dimension; got the shape \(1, 1\)\. Use .reshape\(-1\)"),
        (torch.tensor(1), r"one dimension; got the shape \(\)"),
        (np.array([["a"]]), r"one dimension; got the shape \(1, 1\)"),
        (np.array([1.0]), "strings, bytes or integers; got float64"),
        (np.array([True]), "got bool"),
        (np.array(["2020-01-01"], dtype="M8[D]"), "got datetime64"),
        (np.array([1, "a"], dtype=object), "str or bytes; got int at 0"),
        (pd.Series([1.0]), "got Arrow's double"),
        (pd.Series([True]), "got Arrow's bool"),
        (pd.Series([["a"]]), "got list at 0"),
        (pd.Series(pd.to_datetime(["2020-01-01"])), "got Arrow's timestamp"),
        (pd.Series([1j]), "wanted a Series of strings, bytes or integers; got complex128"),
        (pd.Series([1.5]).array, "got float64"),
        (pd.array([1.5], dtype="Float64"), "got Arrow's double"),
        (pd.arrays.SparseArray([1, 2]), "wanted a SparseArray of strings, bytes or integers; got Sparse"),
        (pd.DataFrame({"a": ["b"]}), "got a DataFrame. Give one column"),
        (pa.array([1.0]), "got Arrow's double"),
        (pa.array([True]), "got Arrow's bool"),
        (pa.array([["a"]]), "got Arrow's list<"),
        (pa.array([{"a": "b"}]), "got Arrow's struct<"),
        (pa.array([1.0]).dictionary_encode(), "got Arrow's dictionary<values=double"),
        (pa.chunked_array([], pa.float32()), "got Arrow's float"),
        (pa.table({"a": ["b"]}), "got (Arrow's struct|Table)"),
        (pa.array([0, 5], pa.date32()), "got Arrow's date32"),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_has_no_id_is_refused(given, wrong):
    with pytest.raises(InputError, match=r"\[hash_ids\] .*" + wrong):
        shoal.hash_ids(given)


def broken(kind, offsets, data=b"abcdef"):
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(np.array(offsets)), pa.py_buffer(data)])


@pytest.mark.parametrize("offsets", [[0, 2, 1], [0, 100, 6], [0, -2, 3], [0, 2**40, 6]])
def test_offsets_that_point_elsewhere_are_refused(offsets):
    with pytest.raises(InputError, match="offsets ascend within its data"):
        shoal.hash_ids(broken(pa.large_string(), offsets))


def test_a_dictionary_without_a_value_is_refused():
    indices, values = pa.array([0, 9]), pa.array(["a"])
    array = pa.DictionaryArray.from_arrays(indices, values, safe=False)
    with pytest.raises(InputError, match="a value for every index"):
        shoal.hash_ids(array)


HINT = r"\.view\(torch\.int64\).*shoal\.hash_ids"
UNSIGNED = torch.tensor([1, 2], dtype=torch.uint64)


def test_a_batch_of_uint64_is_told_of_hash_ids():
    with pytest.raises(InputError, match=HINT):
        shoal.KeyedJaggedTensor(["a"], UNSIGNED, lengths=torch.tensor([2]))
    bags = shoal.EmbeddingBagCollection([shoal.Table("a", 2)])
    batch = kjt({"a": [[1, 2]]})
    batch._values = UNSIGNED
    with pytest.raises(InputError, match=HINT):
        bags(batch)
    with pytest.raises(InputError) as lengths:
        shoal.KeyedJaggedTensor(["a"], torch.tensor([1, 2]), lengths=torch.tensor([2], dtype=torch.uint64))
    assert "hash_ids" not in str(lengths.value)


def test_keys_of_uint64_and_strings_are_told_of_hash_ids():
    table = shoal.EmbeddingBagCollection([shoal.Table("a", 2)]).table("a")
    with pytest.raises(InputError, match=HINT):
        table.lookup(UNSIGNED)
    with pytest.raises(InputError, match=r"shoal\.hash_ids makes int64 of strings"):
        table.lookup(["anna"])


# Polars is imported in the tests alone: under TSAN its import ends the process.


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_a_string_has_the_same_id_in_a_series_of_polars(texts):
    polars = pytest.importorskip("polars")
    for more in ([], ODD):
        wanted = [id_of(text) for text in texts + more]
        for dtype in (polars.String, polars.Categorical):
            assert ids(polars.Series(texts + more, dtype=dtype)) == wanted


def test_integers_and_nulls_in_a_series_of_polars():
    polars = pytest.importorskip("polars")
    assert ids(polars.Series(INTEGERS, dtype=polars.UInt64)) == SAME_BITS
    with pytest.raises(InputError, match=r"\[hash_ids\] wanted an id in every place; got a null at 3\."):
        shoal.hash_ids(polars.Series(["a", "b", "c", None]))
