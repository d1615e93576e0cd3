"""Call a function when the backward of a module begins.

    def after_forward(module, args, result):
        on_first_gradient(tensors_in(result, "block 0"), function)

    module.register_forward_hook(after_forward)

torch's own full backward hook makes a view of each result, which its caller cannot change in place
(`y += x`).
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


def with_bases(tensors: list[Tensor]) -> list[Tensor]:
    """`y += x` gives a view y another node in autograd's graph. The node of its base remains."""
    return tensors + [y._base for y in tensors if y._base is not None]


def with_gradient(tree) -> list[Tensor]:
    """The tensors of a tree, and their bases, that have gradients."""
    tensors = [y for y in tree_leaves(tree) if isinstance(y, Tensor)]
    return [y for y in with_bases(tensors) if y.requires_grad]


def on_first_gradient(tensors: list[Tensor], function: Callable, but: set | None = None) -> bool:
    """Call function(gradient) in each backward when the first gradient of these tensors has come.
    Returns whether one will. but: nodes in the graph of the module's inputs; what it returns
    unchanged tells nothing of its backward."""
    tensors = [y for y in with_bases(tensors) if y.grad_fn and y.grad_fn not in (but or ())]
    if not tensors or not torch.is_grad_enabled():
        return False
    register_multi_grad_hook(tensors, function, mode="any")
    return True
