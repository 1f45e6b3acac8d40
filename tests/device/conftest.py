import pytest
import torch


def pytest_collection_modifyitems(items):
    """With a GPU these tests need it, and scripts/gpu runs them; without one Triton interprets."""
    if torch.cuda.is_available():
        for item in items:
            if "device" in item.path.parent.name:
                item.add_marker(pytest.mark.gpu)
