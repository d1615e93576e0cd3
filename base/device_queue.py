"""Exchange data between host and device in a training step, without waiting.

A GPU processes a queue that the host fills. It idles when the queue is empty, after the host has
waited for a result. So the host waits for no result within a step. A copy from ordinary (pageable)
memory waits too; one from pinned memory does not.

    host      | fill step 1 | fill step 2 | read 1 | fill step 3 | read 2 | ..
    device        | step 1          | step 2          | step 3          | ..

    to_device    copies a batch from pinned memory, while the device runs the step before
    number       makes a number of the host a tensor
    to_host      copies a step's results to pinned memory; complete once a later Moment has passed
    Moment       a place in the queue: the host can wait for it, and time it

A CPU has no queue: tensors are ready at once, and nothing here changes the computation. Tests check
on the meta device, and with CUDA's own warnings on a GPU, that nothing waits.

Not covered: a separate stream for the copies of batches. They take microseconds of a step.
"""

import time

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    device = torch.device(device)
    if device.type == "cuda":
        # A copy of a tensor that is not contiguous would go through pageable memory.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def number(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A scalar on the device, filled there. torch.tensor(value, device=..) would copy it from
    pageable memory."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host. The copy is complete once a Moment made after it has passed."""
    return tensor.to("cpu", non_blocking=True)


class Moment:
    """A place in the device's queue. It has passed when all operations before it are done."""

    def __init__(self, device: torch.device):
        self.event = None
        if device.type == "cuda":
            # With `blocking` the host sleeps while it waits.
            self.event = torch.cuda.Event(enable_timing=True, blocking=True)
            self.event.record()
        self.time = time.perf_counter()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        """Seconds between two moments on the device's clock. Both must have passed."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1000
        return self.time - earlier.time
