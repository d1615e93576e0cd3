"""What all tests share: one cache of compiled code for each kind of processor."""

import os
import tempfile

import torch

# torch.compile keeps code on the disk under a key without the processor's vector width: after a run
# with 16 lanes, one
# with 8 (ATEN_CPU_CAPABILITY=avx2) took the code for 16 and computed other dropout masks.
kind = torch.backends.cpu.get_cpu_capability().replace(" ", "-")
folder = os.path.join(tempfile.gettempdir(), f"torchinductor-{os.getuid()}-{kind}")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
