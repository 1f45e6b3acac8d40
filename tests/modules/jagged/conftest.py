import pytest
import torch

from shoal.modules.jagged import KeyedJaggedTensor


@pytest.fixture
def kjt():
    """a: [1, 2] [3]; b: [] [4]."""
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3, 4]), torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([2, 1, 0, 1])
    )
