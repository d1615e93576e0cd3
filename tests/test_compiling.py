"""base/compiling.py: what compiled code calls as it is, in a process that began without the
compiler."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys
from functools import partial
import torch
from base import compiling

traced = []

@compiling.left_out
def outside(x):
    traced.append(torch.compiler.is_compiling())
    return x + 1

class Block(torch.nn.Module):
    def forward(self, x):
        return 2 * outside(x) if torch.compiler.is_compiling() else outside(x)

assert "torch._dynamo" not in sys.modules
# no C++: this is about who is traced
torch.compile = partial(torch.compile, backend="eager")
block = Block()
assert block(torch.zeros(1)) == 1
{without}
compiling.apply([block])
assert block(torch.zeros(1)) == 2, "the block is not compiled"
assert traced == [False, False], traced
"""


@pytest.mark.parametrize("without, status", [("", 0), ("compiling._LEFT_OUT.clear()", 1)])
def test_what_is_left_out_is_not_traced(without, status):
    """And where nothing is left out, it is."""
    program = PROGRAM.format(without=without)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert status == 0 or "AssertionError: [False, True]" in done.stderr, done.stderr
