"""AdamW in one launch: the update of many parameters, in one pass over their bytes.

One launch for each small parameter would take longer than its update. So the kernel gets a table of
addresses, with a row for each parameter. It takes lists, so cuda_kernels.py has no signature of it.
"""

import functools
import math

import torch
from torch import Tensor

from base.cuda_kernels import check, launch, operation, query


# The addresses of gradient sums change from step to step, and recur. Each type of parameter needs
# two entries for each set of addresses.
@functools.lru_cache(maxsize=64)
def on_device(numbers: tuple, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of numbers, copied only when they change, without waiting for the copy. For one
    stream of a device, and not while a CUDA graph is captured."""
    t = torch.tensor(numbers, dtype=dtype)
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t


@operation(
    "adamw(Tensor(a!)[] weights, Tensor(b!)[] lows, Tensor(c!)[] masters, Tensor[] gradients,"
    " Tensor(d!)[] exp_avgs, Tensor(e!)[] exp_avg_sqs, float[] decays, Tensor control,"
    " float lr, float beta1, float beta2, float eps) -> ()"
)
def adamw_update(
    weights, lows, masters, gradients, exp_avgs, exp_avg_sqs, decays, control, lr, beta1, beta2, eps
):
    """The torch operation of `adamw`. Lists of None are empty here."""
    w = weights[0]
    nones = [None] * len(weights)
    state = torch.float32 if masters else torch.bfloat16
    gradients = [g.contiguous() for g in gradients]
    columns = dict(
        weight=(weights, w.dtype),
        low=(lows or nones, torch.int16),
        # A float weight is its own master.
        master=(masters or (nones if lows else weights), torch.float32),
        gradient=(gradients, torch.float32),
        exp_avg=(exp_avgs, state),
        exp_avg_sq=(exp_avg_sqs, state),
    )
    for name, (tensors, dtype) in columns.items():
        for t, weight in zip(tensors, weights):
            check_state(f"adamw: {name}", t, weight, dtype)
    check("adamw: control", control, w, torch.float32, (3,))
    if len(decays) != len(weights) or bool(lows) == (w.dtype != torch.bfloat16 or bool(masters)):
        raise ValueError("adamw: lows or decays do not belong to these weights; see kernels.adamw")
    if w.device.type == "meta":
        return
    table = []
    blocks = 0
    for of_parameter in zip(*(tensors for tensors, _ in columns.values())):
        n = of_parameter[0].numel()
        table += [0 if t is None else t.data_ptr() for t in of_parameter]
        table += [n, blocks]
        blocks += -(-n // query("adamw_elements", w))
    if blocks:
        tables = on_device(tuple(table), torch.int64, w.device)
        decays = on_device(tuple(decays), torch.float32, w.device)
        options = lr, beta1, beta2, eps, math.log(beta1), math.log(beta2)
        launch("adamw", w, tables, decays, control, len(weights), blocks, bool(lows), *options)
    for t in (*weights, *lows, *masters, *exp_avgs, *exp_avg_sqs):
        torch.autograd.graph.increment_version(t)


def check_state(subject: str, t: Tensor | None, weight: Tensor, dtype: torch.dtype) -> None:
    if t is not None:
        check(subject, t, weight, dtype, weight.shape)
        if not t.is_contiguous():
            raise ValueError(f"{subject} is not contiguous, and it is changed in place")


def adamw(weights, lows, masters, *others) -> None:
    """optimizer.AdamW's update of many parameters of one type, in place, in one launch and one pass
    over their bytes (arXiv 1711.05101, algorithm 2).

    weight      low      master     exp_avg, exp_avg_sq
    bf16        int16    None       bf16                   the master is split into weight and low
    float32     None     None       bf16                   the weight is the master
    16 bits     None     float32    float32                the master is beside the weight

    Arguments: lists of these, of gradients in float32 and of weight decays, with an entry for each
    parameter; control: float32 [3] on the device: a factor of the gradients, the number of this
    update from 1 on, 0 to skip it; lr, beta1, beta2, eps. Raises ValueError.
    """
    lows, masters = ([t for t in tensors if t is not None] for tensors in (lows, masters))
    adamw_update(weights, lows, masters, *others)
