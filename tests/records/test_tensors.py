"""Tensors in the safetensors format, both ways against the package of that name."""

import json
import mmap
import struct

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.made_rows import bits_of

from shoal.errors import InputError, StorageError
from shoal.records import tensors

DTYPES = [*tensors._DTYPES.values()]
shapes = st.lists(st.integers(0, 4), max_size=4)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__")


@pytest.fixture(scope="module")
def package():
    """For tests alone: a machine without a network may not have it."""
    return pytest.importorskip("safetensors.torch")


def random_tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,), dtype=torch.uint8).bool().view(shape)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


made = st.dictionaries(names, st.builds(random_tensor, st.sampled_from(DTYPES), shapes), max_size=6)
metadata = st.dictionaries(names, st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=3)


def joined(encoded: tuple[bytes, list[memoryview]]) -> bytes:
    return b"".join([encoded[0], *encoded[1]])


def assert_equal(found, wanted):
    assert set(found) == set(wanted)
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        assert found[name].shape == wanted[name].shape
        assert bits_of(found[name]).equal(bits_of(wanted[name]))


@given(made, metadata)
def test_tensors_come_back_bit_for_bit(given, texts):
    found, found_texts = tensors.decode(joined(tensors.encode(given, texts)), "here")
    assert list(found) == list(given)
    assert_equal(found, given)
    assert found_texts == texts


@given(made, metadata)
def test_the_package_reads_what_we_write(package, given, texts):
    # Its torch part lacks F8_E8M0, which its core has.
    given = {name: tensor for name, tensor in given.items() if tensor.dtype != torch.float8_e8m0fnu}
    assert_equal(package.load(joined(tensors.encode(given, texts))), given)


@given(made, metadata)
def test_we_read_what_the_package_writes(package, given, texts):
    written = package.save(given, texts or None)
    found, found_texts = tensors.decode(written, "here")
    assert_equal(found, given)
    assert found_texts == texts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_the_format(package, dtype):
    given = {
        "a": random_tensor(dtype, [3, 5]),
        "scalar": random_tensor(dtype, []),
        "empty": random_tensor(dtype, [0, 2]),
    }
    assert_equal(tensors.decode(joined(tensors.encode(given, {})), "here")[0], given)
    assert_equal(tensors.decode(package.save(given), "here")[0], given)


def test_the_bytes_are_where_the_tensors_are():
    given = {"a": torch.randn(100), "b": torch.zeros(7, dtype=torch.uint8), "c": torch.randn(9, dtype=torch.float64)}
    header, pieces = tensors.encode(given, {})
    assert [pa.py_buffer(piece).address for piece in pieces] == [given[name].data_ptr() for name in "cab"]
    data = joined((header, pieces))
    memory = pa.py_buffer(data)
    for tensor in tensors.decode(data, "here")[0].values():
        assert memory.address <= tensor.data_ptr() < memory.address + memory.size


def test_read_only_memory_is_looked_at_without_a_copy_or_a_warning(tmp_path):
    given = {"a": torch.randn(100)}
    path = tmp_path / "dense.safetensors"
    path.write_bytes(joined(tensors.encode(given, {})))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        found, _ = tensors.decode(memoryview(mapped), "here")
        assert_equal(found, given)
        del found


def test_memory_lives_as_long_as_its_tensors():
    wanted = torch.randn(1000)
    header, pieces = tensors.encode({"a": wanted.clone()}, {})
    found, _ = tensors.decode(joined((header, pieces)), "here")
    filling = [torch.full((1000,), 7.0) for _ in range(20)]
    assert found["a"].equal(wanted)
    assert b"".join(pieces) == bytes(wanted.numpy())
    del filling


def test_views_are_written_as_what_they_show():
    base = torch.arange(24.0).view(4, 6)
    given = {
        "transposed": base.t(),
        "step": base[:, ::2],
        "row": base[1],
        "same": base,
        "again": base,
        "expanded": torch.ones(1).expand(5),
        "conj": torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64).conj(),
        "imag": torch.tensor([1 + 2j], dtype=torch.complex64).conj().imag,
        "parameter": torch.nn.Parameter(base),
    }
    found, _ = tensors.decode(joined(tensors.encode(given, {})), "here")
    for name, tensor in given.items():
        assert found[name].equal(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, dtype=torch.complex128),
        torch.eye(3).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.float4_e2m1fn_x2)
        if hasattr(torch, "float4_e2m1fn_x2")
        else torch.zeros(2).to_sparse(),
    ],
)
def test_tensors_that_the_format_lacks_are_refused(tensor):
    with pytest.raises(InputError, match=r"^\[tensors\] 'layer\.w': wanted a dense tensor of"):
        tensors.encode({"layer.w": tensor}, {})


def test_names_and_metadata_that_the_format_lacks_are_refused():
    with pytest.raises(InputError, match="__metadata__"):
        tensors.encode({"__metadata__": torch.zeros(1)}, {})
    with pytest.raises(InputError, match="wanted a name"):
        tensors.encode({1: torch.zeros(1)}, {})
    with pytest.raises(InputError, match="wanted a str"):
        tensors.encode({}, {"a": 1})
    with pytest.raises(InputError):
        tensors.encode({"\ud800": torch.zeros(1)}, {})


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str = "U8", shape: object = (4,), begin: object = 0, end: object = 4) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


FOUR = bytes(4)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        struct.pack("<Q", 1),
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        struct.pack("<Q", 0),
        file_of(b"[]"),
        file_of(b" {}"),
        file_of(b"{"),
        file_of(b"\xff"),
        file_of({}, b"x"),
        file_of(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}", FOUR),
        file_of({"a": entry(), "b": entry()}, FOUR),
        file_of({"a": entry(), "b": entry(begin=2, end=6)}, bytes(6)),
        file_of({"a": entry(), "b": entry(begin=6, end=10)}, bytes(10)),
        file_of({"a": entry(begin=1, end=5)}, bytes(5)),
        file_of({"a": entry()}, bytes(3)),
        file_of({"a": entry()}, bytes(5)),
        file_of({"a": entry(end=3)}, FOUR),
        file_of({"a": entry(begin=4, end=0)}, FOUR),
        file_of({"a": entry(begin=-4, end=0)}, FOUR),
        file_of({"a": entry(begin=2**64, end=2**64 + 4)}, FOUR),
        file_of({"a": entry(begin=0.0)}, FOUR),
        file_of({"a": entry(begin=False)}, FOUR),
        file_of({"a": entry(begin="0")}, FOUR),
        file_of({"a": entry(shape=[-4])}, FOUR),
        file_of({"a": entry(shape=[2, -2])}, FOUR),
        file_of({"a": entry(shape=[4.0])}, FOUR),
        file_of({"a": entry(shape=[True, 4])}, FOUR),
        file_of({"a": entry(shape=4)}, FOUR),
        file_of({"a": entry(shape=None)}, FOUR),
        file_of({"a": entry(shape=[1] * 65)}, b"x"),
        file_of({"a": entry(shape=[2**32, 2**32], end=0)}),
        file_of({"a": entry(shape=[2**62, 2**62, 0], end=0)}),
        file_of({"a": entry(shape=[2**63, 0], end=0)}),
        file_of({"a": entry(dtype="F64", shape=[2**61], end=0)}),
        file_of({"a": entry(shape=[10**4000] * 50, end=0)}),
        file_of({"a": entry(dtype="U9")}, FOUR),
        file_of({"a": entry(dtype="F4", shape=[8])}, FOUR),
        file_of({"a": entry(dtype=None)}, FOUR),
        file_of({"a": entry(dtype=["U8"])}, FOUR),
        file_of({"a": {**entry(), "more": 1}}, FOUR),
        file_of({"a": {"dtype": "U8", "shape": [4]}}, FOUR),
        file_of({"a": {**entry(), "data_offsets": [0, 2, 4]}}, FOUR),
        file_of({"a": None}, FOUR),
        file_of({"a": entry(dtype="BOOL")}, b"\x00\x01\x02\x00"),
        file_of({"__metadata__": {"a": 1}}),
        file_of({"__metadata__": []}),
        file_of({"__metadata__": None}),
        file_of(b'{"a":' * 100_000),
        file_of(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ],
)
def test_hostile_files_are_refused(data):
    with pytest.raises(StorageError, match=r"^\[dense\b") as caught:
        tensors.decode(data, "dense")
    assert len(str(caught.value)) < 1500


def test_tensors_off_their_alignment_are_refused():
    header = json.dumps({"a": entry("F32", [1], 1, 5), "b": entry("U8", [1], 0, 1)}).encode()
    header += b" " * (-len(header) % 8)
    with pytest.raises(StorageError, match="wanted F32 at a multiple of 4 bytes"):
        tensors.decode(file_of(header, bytes(5)), "here")
    odd = json.dumps({"a": entry("F32", [1])}).encode()
    odd += b" " * (-len(odd) % 8 + 1)
    with pytest.raises(StorageError, match="wanted F32 at a multiple of 4 bytes"):
        tensors.decode(file_of(odd, FOUR), "here")
    data = joined(tensors.encode({"a": torch.zeros(3)}, {}))
    with pytest.raises(InputError, match="at a multiple of 8"):
        tensors.decode(memoryview(b"x" + data)[1:], "here")
