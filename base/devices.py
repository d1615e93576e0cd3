"""How much memory a device has."""

import os

import torch


def memory(device: str, ranks_on_machine: int) -> int:
    """Bytes that one rank can have: its GPU's memory, or its share of the machine's with swap."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("SwapTotal"):
                    # in KiB
                    total += 1024 * int(line.split()[1])
    except OSError:
        # another kernel: count no swap
        pass
    return total // ranks_on_machine
