"""Exercise 12: the bytes of activations in one layer.                              (25 minutes)

Count what backward needs of one GPT layer, as the paper does: LayerNorm, attention with explicit
scores, an MLP with 4h inside and GELU, dropout. Activations have 16 bits, so 2 bytes; a mask of
dropout has 1 byte. s tokens, b sequences, h hidden, a heads.

    attention   input of Q, K, V 2 sbh · Q and K 4 sbh · V 2 sbh · softmax 2 as²b · its mask as²b
                after dropout 2 as²b · input of the output matrix 2 sbh · mask of dropout sbh
    MLP         input of the first matrix 2 sbh · input of GELU 8 sbh
                input of the second matrix 8 sbh · mask of dropout sbh
    LayerNorm   two inputs, 2 sbh each

Add it up: 34 sbh + 5 a s² b. Now t tensor-parallel ranks. What belongs to a rank's own heads or
columns is divided by t: Q, K, V, everything with s², the input of the output matrix, the input of
GELU, and the input of the second matrix. What stands outside the two regions is whole on every
rank: the two LayerNorms, the two masks with sbh, and the inputs of the two first matrices. Sequence
parallelism divides that by t as well.

    selective    core attention is recomputed: nothing with s² is kept
    full         the layer's input is kept, 2 sbh, and nothing else: whole on every rank, or with
                 sequence parallelism its shard

On paper first: how many of the 34 are divided by t? Which is larger for s = 2048, h = 6144, a = 64:
34 sbh or 5 a s² b?

Read         the first 35 lines of recompute.py; exercise 4
Paper        Korthikanti et al., arXiv 2205.05198, sections 4.1 and 4.2, table 2
Not yet      `layer_bytes` in recompute.py
Check        python -m course.exercises.check 12      --hint: a hint, one more at each call
Par          what autograd keeps of a real layer is within 2% of the formula
"""


def layer_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes of activations that one layer keeps on one rank. recompute: none, selective, full."""
    raise NotImplementedError(
        "Three groups: what is divided by t, what only sequence parallelism divides, and what has "
        "s². Check by hand: s = b = h = a = t = 1 gives 39."
    )
