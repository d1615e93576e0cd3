"""The loss on held-out text, under every layout."""

import torch
import torch.distributed as dist

from gpt import Context


@torch.no_grad()
def evaluate(trainer, dataset, sequences: int) -> float:
    """Mean loss over the first `sequences` samples of a held-out dataset."""
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)

    def add(batch, y):
        total.add_(trainer.task.total_loss(y, batch))

    run_forward(trainer, list(evaluation_batches(trainer, dataset, sequences)), add)
    for group in (trainer.groups.replicas, trainer.groups.pp):
        if group:
            dist.all_reduce(total, group=group)
    return total.item() / max(1, trainer.task.loss_count(dataset, range(sequences)))


@torch.no_grad()
def run_forward(trainer, batches: list, result) -> None:
    """Run batches of one size forward, as in inference. The rank that has the head hands each to
    result(batch, y), y [b, s]: what the head gives for its targets."""
    training = trainer.stages[0].training
    s = batches[0].tokens.shape[1]
    # under context parallelism each rank has a part of the sequence
    batches = [trainer.own_tokens(batch) for batch in batches]
    for stage in trainer.stages:
        # routers take raw logits
        stage.eval()
    if trainer.schedule is None:
        for batch in batches:
            context = Context(documents=batch.documents)
            y = trainer.model(batch.tokens, batch.targets, context)
            result(batch, y)
    else:
        trainer.model.evaluate(batches, result, s)
    for stage in trainer.stages:
        stage.train(training)


def evaluation_batches(trainer, dataset, sequences: int):
    """This rank's batches. All ranks have equally many, of one size, for their forward passes
    may be collectives; what is too many is masked."""
    b = trainer.micro_batch
    for start in range(0, sequences, trainer.dp * b):
        mine = range(start + trainer.dp_rank * b, start + (trainer.dp_rank + 1) * b)
        batch = dataset.batch([min(n, sequences - 1) for n in mine])
        counts = torch.tensor([n < sequences for n in mine]).unsqueeze(1)
        yield batch._replace(loss_mask=batch.loss_mask & counts).to(trainer.device)
