"""docs/formats.md is right: the native core and the reference give every test vector that it prints."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from support.batches import kjt

import shoal
from shoal import _native
from shoal.config import Optimizer
from shoal.ops.birth import reference as birth
from shoal.ops.hash_ids import reference as hash_ids
from shoal.ops.update import reference as update
from shoal.optim import counts_of, numbers_of
from shoal.records.frames import FrameHeader, Kind

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "formats.md").read_text()
WORD = 2**64 - 1
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def vectors(name: str) -> list[dict[str, str]]:
    """The lines of the table behind `<!-- vectors: name -->`, by column; an empty cell is an empty string."""
    found = re.search(rf"<!-- vectors: {re.escape(name)} -->\n((?:\|.*\n)+)", TEXT)
    assert found, f"docs/formats.md has no table of vectors called {name!r}"
    header, _, *lines = (
        [cell.strip().strip("`") for cell in line.strip("|\n").split("|")] for line in found[1].splitlines()
    )
    assert lines, f"docs/formats.md: the table {name!r} is empty"
    return [dict(zip(header, line, strict=True)) for line in lines]


def each(name: str):
    return pytest.mark.parametrize("given", vectors(name), ids=lambda given: " ".join(given.values()))


def integer(text: str) -> int:
    return int(text, 0)


def single(text: str) -> torch.Tensor:
    """A hexadecimal float as [1] float32, which holds it exactly."""
    value = torch.tensor([float.fromhex(text)], dtype=torch.float64)
    assert value.float().double().equal(value), f"{text} is no float32"
    return value.float()


def bits(values: torch.Tensor) -> int:
    """The bits of one 16-bit float."""
    return int(values.view(torch.int16)) & 0xFFFF


def test_every_table_of_vectors_is_checked_here():
    printed = set(re.findall(r"<!-- vectors: (.+) -->", TEXT))
    checked = set(re.findall(r"""(?:each|vectors)\("([^"]+)"\)""", Path(__file__).read_text()))
    assert printed == checked


@each("mix64")
def test_mix64(given):
    x, wanted = integer(given["x"]), integer(given["mix64(x)"])
    assert birth.mix64(x) == wanted
    # Natively it shows through a bucket: modulo 2^64 - 1 it is itself, but for the one word that no vector gives.
    out = torch.empty(1, dtype=torch.int64)
    _native.buckets(torch.tensor([x - 2**64 if x >= 2**63 else x]), WORD, out)
    assert int(out) & WORD == wanted


@each("name hash")
def test_name_hash(given):
    wanted = integer(given["name_hash"])
    assert birth.name_hash(given["name"]) == wanted
    assert _native.name_hash(given["name"]) == wanted


@each("string id")
def test_string_id(given):
    data = bytes.fromhex(given["bytes"])
    assert hash_ids.xxh64(data) == integer(given["hash"])
    assert hash_ids.id_of(data) == integer(given["id"])
    assert shoal.hash_ids([data]).tolist() == [integer(given["id"])]
    assert integer(given["id"]) % 2**64 == integer(given["hash"])
    if given["string"]:
        assert given["string"].encode() == data
        assert shoal.hash_ids([given["string"]]).tolist() == [integer(given["id"])]


@each("unsigned id")
def test_unsigned_id(given):
    assert shoal.hash_ids(torch.tensor([integer(given["uint64"])], dtype=torch.uint64)).tolist() == [
        integer(given["id"])
    ]


@each("bucket")
def test_bucket(given):
    key, buckets, wanted = (integer(given[name]) for name in ("key", "buckets", "bucket"))
    assert birth.bucket_of(key, buckets) == wanted
    out = torch.empty(1, dtype=torch.int64)
    _native.buckets(torch.tensor([key]), buckets, out)
    assert int(out) == wanted


@each("streams")
def test_streams(given):
    seed, hashed = integer(given["seed"]), _native.name_hash(given["name"])
    wanted = integer(given["birth stream"])
    assert birth.birth_stream(seed, given["name"]) == wanted
    assert _native.birth_stream(seed, hashed) == wanted
    wanted = integer(given["rounding stream"])
    assert birth.rounding_stream(seed, given["name"]) == wanted
    assert _native.rounding_stream(seed, hashed) == wanted


@each("philox")
def test_philox(given, isa):
    stream, key, block, word3 = (integer(given[name]) for name in ("stream", "key", "block", "counter word 3"))
    words = [integer(given[f"out {word}"]) for word in range(4)]
    counter = [key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF, block, word3]
    assert birth.philox(stream, torch.tensor([counter])).tolist() == [words]
    if word3 == 0 and block < 1000:  # a birth, whose uniform draw shows the high 24 bits
        dim = 4 * (block + 1)
        drawn = first_row(_native.Init(_native.InitKind.uniform, 0.0, 1.0, stream), key, dim)[-4:]
        assert (drawn * 2**24).tolist() == [word >> 8 for word in words]


def first_row(init: _native.Init, key: int, dim: int) -> torch.Tensor:
    out = torch.empty(1, dim)
    rows = _native.DramStore(dim, _native.Dtype.float32, 0).rows
    _native.read_weights(rows, init, torch.tensor([key]), torch.tensor([-1], dtype=torch.int32), out, 1)
    return out[0]


def check_first_row(given: dict[str, str], init: shoal.Uniform | shoal.Normal) -> None:
    seed, name, element = integer(given["seed"]), given["name"], integer(given["element"])
    keys, wanted = torch.tensor([integer(given["key"])]), single(given["weight"])
    table = shoal.EmbeddingBagCollection([shoal.Table(name, element + 1, init=init)], seed=seed).table(name)
    assert torch.equal(birth.first_rows(init, seed, name, keys, element + 1)[0, element:], wanted)
    assert torch.equal(table.lookup(keys)[0, element:], wanted)


@each("uniform")
def test_uniform_rows(given, isa):
    check_first_row(given, shoal.Uniform(float(given["low"]), float(given["high"])))


@each("normal")
def test_normal_rows(given, isa):
    check_first_row(given, shoal.Normal(float(given["mean"]), float(given["std"])))


@each("knots")
def test_knots(given):
    knot, tail = integer(given["knot"]), integer(given["tail"])
    assert torch.equal(_native.normal_table()[knot : knot + 1], single(given["z"]))
    if tail < 2**31:
        assert torch.equal(birth.unit_normal(torch.tensor([tail])), single(given["z"]))


def test_the_script_writes_the_table_that_is_built_in():
    script = runpy.run_path(str(ROOT / "scripts" / "normal_table"))
    knots, built = script["knots"](), _native.normal_table()
    assert len(knots) == len(built) == 1665
    for given in vectors("knots"):
        assert knots[integer(given["knot"])] == integer(given["tail"])
    computed = [-script["NormalDist"]().inv_cdf((tail + 0.5) / 2**32) for tail in knots]
    assert torch.tensor(computed, dtype=torch.float64).float().equal(built)


@each("unit normal")
def test_unit_normal(given):
    assert torch.equal(birth.unit_normal(torch.tensor([integer(given["word"])])), single(given["z"]))


@pytest.mark.parametrize("dtype", DTYPES)
@each("nearest")
def test_nearest(given, dtype, isa):
    value, wanted = single(given["float32"]), integer(given[dtype])
    assert bits(value.to(DTYPES[dtype])) == wanted
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 1, dtype=dtype)])
    bags.table("t").assign([1], value[:, None])
    assert bits(bags.state_dict()["embedding_bags.t.weight"]) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@each("stochastic")
def test_stochastic(given, dtype):
    value, word = single(given["float32"]), torch.tensor([integer(given["word"])])
    assert bits(update.stochastic_round(value, word, DTYPES[dtype])) == integer(given[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@each("rounding")
def test_rounding(given, dtype, isa):
    seed, key, step, element, word = (integer(given[name]) for name in ("seed", "key", "step", "element", "word"))
    name, value, wanted = given["name"], single(given["float32"]), integer(given[dtype])
    stream = birth.rounding_stream(seed, name) ^ birth.mix64(step >> 32)
    assert int(birth.words(stream, torch.tensor([key]), element + 1, step)[0, element]) == word
    assert bits(update.stochastic_round(value, torch.tensor([word]), DTYPES[dtype])) == wanted

    table = shoal.Table(name, element + 1, dtype=dtype, optimizer=shoal.Assign())
    bags = shoal.EmbeddingBagCollection([table], seed=seed)
    at_step = bags.state_dict() | {f"embedding_bags.{name}.step": torch.tensor(step)}
    bags.load_state_dict(at_step)
    bags(kjt({name: [[key]]})).values().backward(value.expand(1, element + 1))
    assert bits(bags.state_dict()[f"embedding_bags.{name}.weight"][0, element:]) == wanted


def columns() -> dict[str, list[tuple[str, str, float]]]:
    """(column, width, born as) by optimizer; a line without an optimizer belongs to the one above."""
    by_optimizer: dict[str, list[tuple[str, str, float]]] = {}
    optimizer = ""
    for line in vectors("columns"):
        optimizer = line["optimizer"] or optimizer
        listed = by_optimizer.setdefault(optimizer, [])
        if line["column"]:
            listed.append((line["column"], line["width"], float(line["born as"])))
    return by_optimizer


@pytest.mark.parametrize(("optimizer", "listed"), columns().items(), ids=list(columns()))
def test_state_columns(optimizer, listed):
    dim = 3
    made = eval(optimizer, vars(shoal))
    wanted = [(name, dim if width == "dim" else int(width), born) for name, width, born in listed]
    assert [(column.name, column.width, column.initial) for column in made.columns(dim)] == wanted


def test_every_optimizer_has_its_columns_listed():
    public = {name: getattr(shoal, name) for name in shoal.__all__}
    optimizers = {name for name, one in public.items() if isinstance(one, type) and issubclass(one, Optimizer)}
    assert {optimizer.split("(")[0] for optimizer in columns()} == optimizers


@each("counts")
def test_counts(given):
    number, count = integer(given["updates"]), single(given["count"])
    assert torch.equal(counts_of(torch.tensor([number])), count)
    assert numbers_of(count).tolist() == [number]


def test_an_update_makes_a_count_the_next_one():
    given = vectors("counts")
    numbers = [integer(line["updates"]) for line in given]
    before = counts_of(torch.tensor([max(number - 1, 0) for number in numbers]))[:, None]
    bags = shoal.EmbeddingBagCollection([shoal.Table("t", 1, optimizer=shoal.Adam())])
    keys = list(range(len(given)))
    bags.table("t").assign(keys, torch.zeros(len(keys), 1))
    bags.load_state_dict({**bags.state_dict(), "embedding_bags.t.state.count": before})
    bags(kjt({"t": [keys[1:]]})).values().sum().backward()
    wanted = torch.cat([single(line["count"]) for line in given])
    assert torch.equal(bags.state_dict()["embedding_bags.t.state.count"].flatten(), wanted)


@pytest.mark.parametrize("dtype", ["float32", *DTYPES])
@pytest.mark.parametrize(
    ("collection", "prefix", "pooling"),
    [(shoal.EmbeddingBagCollection, "embedding_bags", "sum"), (shoal.EmbeddingCollection, "embeddings", "none")],
)
def test_state_dict(collection, prefix, pooling, dtype):
    keys = [5, -3, 2**62, 0]
    table = shoal.Table("t", 3, pooling=pooling, dtype=dtype, optimizer=shoal.Adam())
    module = torch.nn.ModuleDict({"part": collection([table])})
    module["part"].table("t").assign(keys, torch.ones(4, 3))
    sizes = {"n": len(keys), "dim": 3}
    wanted = {}
    for line in vectors("state dict"):
        of_type = dtype if line["dtype"] == "table's" else line["dtype"]
        for column in table.columns if "<column>" in line["entry"] else [None]:
            shape = [part for part in line["shape"].strip("[]").split(", ") if part]
            width = {} if column is None else {"width": column.width}
            entry = line["entry"].replace("<column>", "" if column is None else column.name)
            wanted[f"part.{prefix}.t.{entry}"] = (
                [{**sizes, **width, "1": 1}[part] for part in shape],
                getattr(torch, of_type),
            )
    saved = module.state_dict()
    assert {name: (list(entry.shape), entry.dtype) for name, entry in saved.items()} == wanted
    assert saved[f"part.{prefix}.t.weight_id"].flatten().tolist() == sorted(keys)


def test_uniform_can_give_its_upper_bound():
    """As the page says of the last addition."""
    u = torch.tensor(2.0**24 - 1) * 2.0**-24
    assert torch.tensor(1.0) + u * torch.tensor(2.0 - 1.0) == 2.0


@each("frame header")
def test_frame_header(given):
    names = ("kind", "table", "version", "rows", "payload bytes", "payload CRC")
    kind, table, version, rows, payload_bytes, payload_crc = (integer(given[name]) for name in names)
    header = FrameHeader(Kind(kind), table, version, rows, payload_bytes, payload_crc)
    assert header.pack().hex() == given["header"]
    assert FrameHeader.unpack(bytes.fromhex(given["header"]), "formats.md") == header
