"""Jagged and keyed tensors, with the names and methods of TorchRec's, so that code moves by changing the import.

    KeyedJaggedTensor   keys ["a", "b"], stride 2:   a: [1, 2] [3]     b: [] [4]
                        values  [1, 2, 3, 4]         key by key, and in a key sample by sample
                        lengths [2, 1, 0, 1]         one per bag; offsets [0, 2, 3, 3, 4] say the same
    JaggedTensor        one key's share of it: values, and lengths or offsets
    KeyedTensor         keys ["a", "b"], length_per_key [2, 3]: a dense [stride, 5] tensor whose columns have names

Shapes and types are checked here. Contents are not (lengths that are negative or do not sum to the values), because
looking at them would stall a GPU and break a compiled graph; the lookup checks them. The methods that must know the
contents on the host say that they wait for the device, and check what they see.

Lengths and offsets are computed from each other when asked for, in the type of the one that was given. Where both are
given they must agree; on CPU, outside of compiled graphs, that is checked at once.

Tensors are not copied, and what was computed from them is kept: do not change them in place after construction.
"""

from shoal.modules.jagged.jagged_tensor import JaggedTensor
from shoal.modules.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from shoal.modules.jagged.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
