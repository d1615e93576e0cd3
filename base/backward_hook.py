"""Call a function when the backward of a module begins.

    def after_forward(module, args, result):
        on_first_gradient(tensors_in(result, "block 0"), function)

    module.register_forward_hook(after_forward)

torch's own full backward hook makes a view of each result, so that a caller cannot change it in
place.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves


def tensors_in(result, name: str) -> list[Tensor]:
    """The tensors in what a module has returned: a tree of tuples, dicts and so on. Raises
    TypeError, with the name of the module, if none is seen in an object of another type."""
    leaves = tree_leaves(result)
    tensors = [y for y in leaves if isinstance(y, Tensor)]
    unknown = [y for y in leaves if not isinstance(y, (Tensor, int, float, str, type(None)))]
    if unknown and not tensors:
        raise TypeError(
            f"{name} returns a {type(unknown[0]).__name__}, in which no tensor is seen; return a"
            " tuple or a dict, or register the type in torch.utils._pytree"
        )
    return tensors


def on_first_gradient(tensors: list[Tensor], function: Callable) -> bool:
    """Call function(gradient) in each backward when the first gradient of these tensors has come.
    Returns whether one will."""
    # A view that is changed in place, by `y += x`, gets another place in the graph. Its base keeps
    # its own.
    tensors = tensors + [y._base for y in tensors if y._is_view()]
    tensors = [y for y in tensors if y.grad_fn]
    if not tensors or not torch.is_grad_enabled():
        return False
    register_multi_grad_hook(tensors, function, mode="any")
    return True
