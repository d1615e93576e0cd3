"""What learning from pairs of answers needs (finetune/preference.py): which tokens, which pairs,
whose gradient."""

import sequence_parallel
from course.mutations import bug, replaces
from finetune import preference

DPO = dict(command="preference.py", tp=2, method="dpo", dropout=0.0)
REWARD = dict(command="preference.py", tp=2, method="reward", dropout=0.0)


@bug(2, DPO, first="step 1: gradient of head.norm")
def padding_in_the_answer():
    """What stands behind the end of an answer is a part of it, up to the end of the row."""
    sums = preference.sum_over_answers
    preference.sum_over_answers = lambda y, mask: sums(y, mask.cumsum(1) > 0)


@bug(2, DPO, first="step 1: loss")
@replaces(preference, "dpo_loss")
def no_reference(chosen, rejected, *reference_and_beta, original=preference.dpo_loss):
    """DPO's rewards are log-probabilities alone; those before training are not subtracted."""
    return original(chosen, rejected, 0, 0, reference_and_beta[-1])


@bug(2, REWARD, first="step 1: loss")
def halves_for_pairs():
    """The first half of the rows is taken for chosen, the second for rejected; they alternate."""
    preference.pairs_of = lambda rows: rows.chunk(2)


@bug(2, REWARD | dict(sequence_parallel=True), first="step 1: gradient of head.value.weight")
def value_gradient_of_every_rank():
    """The gradient of gathered values is summed over ranks that have the same loss."""
    preference.grad_of_shard = lambda grad, group: sequence_parallel.start_scatter(grad, group)()
