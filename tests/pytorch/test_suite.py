"""PyTorch's own tests of torch.distributed: whatever passes on Gloo passes here.

`gloo.json` has what passes on Gloo, by world size, as `suite.py gloo W` prints it: 90 tests with 2 and with 3 ranks, 93
with 4, the same with torch 2.13.0 and 2.15.0. In .ci/run 2 and 3 ranks have every fourth test each, and 4 those three;
the newest release has another half with 2 ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
PASSES = {int(world): names for world, names in json.loads((HERE / "gloo.json").read_text()).items()}

newest, exhaustive = pytest.mark.newest, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("world", "names"),
    [
        pytest.param(2, PASSES[2][0::4], id="2-quarter"),
        pytest.param(3, PASSES[3][2::4], id="3-quarter"),
        pytest.param(4, [name for name in PASSES[4] if name not in PASSES[3]], id="4-only"),
        pytest.param(2, PASSES[2][1::2], id="2-other-half", marks=[newest, exhaustive]),
        pytest.param(2, PASSES[2], id="2", marks=exhaustive),
        pytest.param(3, PASSES[3], id="3", marks=exhaustive),
        pytest.param(4, PASSES[4], id="4", marks=exhaustive),
    ],
)
def test_torch_tests_that_pass_on_gloo_pass_on_paceline(world: int, names: list[str]) -> None:
    command = [sys.executable, str(HERE / "suite.py"), "paceline", str(world), *(f"^{name}$" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert ended["passed"] == names, f"failed {ended['failed']}, skipped {ended['skipped']}\n{done.stderr}"
