"""Modules: collections of tables, and the tensors that go in and come out."""

from shoal.modules.bags import EmbeddingBagCollection
from shoal.modules.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shoal.modules.sequences import EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
