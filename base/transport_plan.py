"""A balanced transport plan, by which the router `sinkhorn` of moe.py sends tokens to experts
(S-BASE, arXiv 2202.01169, section 3.1): a matrix of n tokens by E experts, whose rows sum to 1/n
and whose columns sum to 1/E.

    plan = diag(d0) exp(logits / temperature) diag(d1)      d0, d1 scale rows and columns in turn
"""

from torch import Tensor


def scale_rows_and_columns(kernel: Tensor, tolerance: float, max_iterations: int):
    """Sinkhorn's iteration for n tokens and E experts: d0, d1 for which diag(d0) kernel diag(d1)
    has rows that sum to 1/n and columns that sum to 1/E.

    Scales rows, then columns, until the mean error of the loads is at most `tolerance` of the even
    load, or after `max_iterations`. Columns are then exact, rows nearly. kernel: [n, E], large
    where a token fits an expert. Returns (d0 [n], d1 [E], whether d1 stayed within the range of a
    float).

    The host reads the error after each iteration. A GPU runs `potentials_in_fixed_time` instead.
    """
    n, e = kernel.shape
    d1 = kernel.new_ones(e)
    for _ in range(max_iterations):
        d0 = 1 / n / (kernel @ d1)
        # The load of each expert, divided by the even share.
        load = (e * d1 * (kernel.t() @ d0)).clamp(min=1e-100)
        d1 = d1 / load
        # `not ... >` also ends the loop where a number is NaN.
        if not (1 - load).abs().mean() > tolerance:
            break
        if d1.log().abs().amax() > 200:
            return d0, d1, False
    return d0, d1, True


def balance(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, max_iterations: int = 1000
) -> tuple[Tensor, Tensor]:
    """The transport plan d0 C d1 with C = exp(logits / temperature) (arXiv 2202.01169, section
    3.1).

    f is a bias per expert (the dual potentials): popular experts get a negative one, until the
    loads are even.

    - Cooling: at a low temperature the iteration is slow, so it begins at 1 and is halved.
    - After each temperature d1 is added to f, as now * log d1. So the next temperature starts from
      what is known. The same is done when d1 leaves the range of a float.
    - Only differences within a row matter, so its largest entry is set to 0.
    - A token that the plan splits 6 to 4 goes to one expert; a lower temperature splits fewer
      tokens. Equal tokens go to the same expert at any temperature.

    logits: [n, E]; temperature: at most 1; max_iterations: at one temperature, and also the limit
    for the number of temperatures.
    Returns (transport plan, float64 [n, E]; f [E]). Each row of logits + f is ordered as the plan,
    also where the plan is too small for a float.
    """
    logits = logits.double()
    f = logits.new_zeros(logits.shape[1])
    now = 1.0
    for _ in range(max_iterations):
        z = (logits + f) / now
        kernel = (z - z.amax(1, keepdim=True)).exp()
        d0, d1, in_range = scale_rows_and_columns(kernel, tolerance, max_iterations)
        f = f + now * d1.log()
        if in_range and now <= temperature:
            break
        if in_range:
            now = max(now / 2, temperature)
    return d0.unsqueeze(1) * kernel * d1, f


# Iterations at each temperature, enough for the tolerance of SinkhornRouter (tests/test_moe.py).
FIXED_ITERATIONS = 32


def potentials_in_fixed_time(logits: Tensor, temperature: float) -> Tensor:
    """The potentials f of `balance`, by a fixed number of iterations at each temperature, so that
    the host need not wait for a GPU to learn whether an iteration was the last.

    A softmax scales the rows, and f itself is updated instead of d1. With d1 = exp(Δf /
    temperature) it is the same iteration, and no value leaves the range of a float32.
    logits: [N, E] -> [E]
    """
    e = logits.shape[1]
    f = logits.new_zeros(e)
    now = 2.0
    while now > temperature:
        now = max(now / 2, temperature)
        for _ in range(FIXED_ITERATIONS):
            # The load of each expert, divided by the even share.
            load = e * ((logits + f) / now).softmax(1).mean(0)
            f = f - now * load.clamp(min=1e-30).log()
    return f


def sinkhorn(
    logits: Tensor, temperature: float = 1.0, tolerance: float = 1e-4, max_iterations: int = 1000
) -> Tensor:
    """The balanced plan of `balance`. logits: [N, E], of any size. Returns [N, E], float64."""
    return balance(logits, temperature, tolerance, max_iterations)[0]
