"""RocksDB: a database in place of the store, with direct reads and a block cache of its own."""

import pathlib

from torch import Tensor

from benchmarks.peers import ROCKSDB

if ROCKSDB.is_installed:
    from rocksdict import BlockBasedOptions, Cache, DBCompressionType, Options, Rdict, WriteBatch


class Rocks:
    """Rows by key, as bytes. Compacted once they are all in: a read is then one block."""

    name = "rocksdb"

    def __init__(self, directory: pathlib.Path, cache_bytes: int) -> None:
        blocks = BlockBasedOptions()
        blocks.set_block_cache(Cache(cache_bytes))
        blocks.set_block_size(4096)
        blocks.set_bloom_filter(10.0, False)
        options = Options(raw_mode=True)
        options.set_block_based_table_factory(blocks)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(DBCompressionType.none())
        self._db = Rdict(str(directory), options)

    @staticmethod
    def _names(keys: Tensor) -> list[bytes]:
        return [key.to_bytes(8, "big", signed=True) for key in keys.tolist()]

    def write(self, keys: Tensor, rows: Tensor) -> None:
        data, wide = rows.numpy().tobytes(), rows.shape[1]
        batch = WriteBatch(raw_mode=True)
        for number, name in enumerate(self._names(keys)):
            batch.put(name, data[number * wide : (number + 1) * wide])
        self._db.write(batch)

    def settle(self) -> None:
        self._db.flush()
        self._db.compact_range(None, None)

    def read(self, keys: Tensor) -> list[bytes]:
        """REQUIRES: each key has a row."""
        found: list[bytes] = self._db.get(self._names(keys))
        return found

    def close(self) -> None:
        self._db.close()
