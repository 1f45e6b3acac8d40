"""Pytree nodes, which can be arguments and results of torch.export, functional transforms and tree_map."""

from collections.abc import Callable
from typing import Any

import torch

from shoal.torch_private import GetAttrKey, KeyEntry, register_pytree_node


def register(
    kind: type[Any],
    names: tuple[str, ...],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make a class a node whose leaves are its attributes `names`.

    A context is None or a list, not a tuple, because it must come back equal from JSON.
    """

    def flatten_with_keys(node: Any) -> tuple[list[tuple[KeyEntry, Any]], Any]:
        leaves, context = flatten(node)
        return [(GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], context

    register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"shoal.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    # torch.export.save keeps the example inputs, and torch.load reads only classes that it is told are plain data.
    torch.serialization.add_safe_globals([kind])
