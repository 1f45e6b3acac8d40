from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """With a GPU the tests of this folder need it, and scripts/gpu runs them; without one Triton interprets."""
    if torch.cuda.is_available():
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.gpu)
