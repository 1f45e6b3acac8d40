"""The examples of docs/from-torchrec.md run as pasted, in their order."""

import re
from pathlib import Path

import pytest
import support.theirs  # noqa: F401  (it skips this file without TorchRec)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-torchrec.md"


@pytest.mark.filterwarnings("ignore")  # of weights without keys, of one process, and TorchRec's own
def test_the_examples_run_as_pasted_one_after_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ran: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/from-torchrec.md, example {number}", "exec"), ran)
    assert len(blocks) == 7
