"""What all tests share: the cache of compiled code, shortened runs, tests for `make test-all`, time
per file."""

import gc
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import shortened
import torch

from course import ranks

# torch.compile keeps code on the disk under a key without the processor's vector width: after a run
# with 16 lanes, one with 8 (ATEN_CPU_CAPABILITY=avx2) took the code for 16 and computed other
# dropout masks.
KIND = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
CACHE = os.path.join(tempfile.gettempdir(), f"torchinductor-{os.getuid()}-{KIND}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", CACHE)
# until all is imported (pytest_collection_finish): little of it is garbage
gc.disable()
# ranks and commands begin with all of this imported
ranks.preload(
    *("pytest", "train", "run.checkpoint_slices", "context_parallel", "fp8", "kernels", "moe"),
    *("prompt_tuning", "parity", "processes", "inference.cli", "matplotlib.pyplot"),
    # It imports torchao, which initialises CUDA where there is a GPU.
    *([] if torch.cuda.is_available() else ["transformers.modeling_utils"]),
)


@pytest.fixture(autouse=True)
def _shortened(monkeypatch):
    shortened.shorten(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _handlers():
    """Commands that run in this process set their own handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _products():
    """Commands that train in this process may choose the library that multiplies (base/cpu.py)."""
    yield
    torch.set_float32_matmul_precision("highest")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="repetitions too (make test-all)")


def pytest_collection_modifyitems(config, items):
    """Leave out repetitions: more sizes, seeds and layouts of what another test covers."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("repetition")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("repetition")]


def pytest_collection_finish():
    """What is imported stays: later collections, of which tests cause many, skip it."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Seconds of each file, so that a test that grows slow is seen."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.split("::")[0]).name] += report.duration
    terminalreporter.section("seconds of each file")
    for name, total in seconds.most_common():
        terminalreporter.write_line(f"{total:7.1f}  {name}")
