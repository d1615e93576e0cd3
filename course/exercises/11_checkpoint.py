"""Exercise 11: checkpointing, compute activations again instead of keeping them.   (30 minutes)

Backward needs the activations of forward, and autograd keeps them: in each layer of a GPT 34 s b h
+ 5 a s² b bytes (exercise 12), more than anything else in training. A checkpointed layer keeps only
its input, 2 s b h bytes, and runs a second time in backward:

    forward      x --layer, not recorded--> y          kept: x
    backward     x --layer, recorded------> y again;   back through this recording with ∂L/∂y

Autograd does not record inside the forward of an autograd.Function. In backward you switch it on,
with torch.enable_grad(), and run the function again. Two traps:

- The input of the second run must be a copy that begins a graph of its own, x.detach() with
  requires_grad. Otherwise backward goes on into the layers before, and then does so again.
- The parameters inside are no arguments. They get their gradients only if you call
  output.backward(grad) on the second run's output.

Arguments are tensors and other things. Only tensors that needed a gradient get one; for everything
else backward returns None.

Read         the first 35 lines of recompute.py
Paper        Chen et al., arXiv 1604.06174; Korthikanti et al., arXiv 2205.05198, section 5
Not yet      `_Checkpoint` in recompute.py
Check        python -m course.exercises.check 11      --hint: a hint, one more at each call
Par          0 bytes are kept beside the arguments; the function runs once in forward and once in
             backward
"""

import torch
from torch import Tensor


class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *args):
        raise NotImplementedError(
            "Keep `function` and the arguments on ctx, and return function(*args). (A framework "
            "would use ctx.save_for_backward for tensors; plain attributes do here.)"
        )

    @staticmethod
    def backward(ctx, grad):
        """One gradient for `function`, which is None, and one for each argument.

        ctx.needs_input_grad[1 + i] says whether argument i needed a gradient.
        """
        raise NotImplementedError(
            "Detach the tensors among the arguments, with requires_grad_ where one is needed; run "
            "the function while recording; output.backward(grad); return the copies' .grad."
        )


def checkpoint(function, *args) -> Tensor:
    """function(*args), a tensor. Only the arguments are kept for backward."""
    return Checkpoint.apply(function, *args)
