"""The lesson of sharding.py: one weight over four ranks, and back."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpt
import sharding
from course import form, ranks
from course.mutations import tensor_parallel as bugs
from sharding import Shard, Sharding

ROWS, COLUMNS = 6, 3

WITHOUT = form.Removals()
WITHOUT["own-shard"] = form.Removal(
    bugs.clones,
    "Each rank keeps the first rank's part. Would the loss fall?",
    "Yes. The whole weight is rows 0, 1, 0, 0, 1, 0: a model that can learn, but not the one that"
    " was drawn. Counts of bytes and elements hold, for all parts have the right shape.",
)


@WITHOUT.add("common-seed", "Numbers are as random as before. What is wrong with them?")
def no_common_seed() -> None:
    """Each part is of another random weight, so together they are not the weight of one rank, and
    another number of ranks starts another model. A weight that ranks hold whole would differ among
    them."""
    sharding.generator = lambda seed, name: gpt.generator(seed + dist.get_rank(), name)


class Model(nn.Module):
    """One weight [6, 3]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(ROWS, COLUMNS, device="meta"))

    def init_parameter(self, name: str, shape, generator: torch.Generator) -> Tensor:
        return 0.02 * torch.randn(shape, generator=generator)


def on_rank(rank: int) -> dict:
    """Ranks 0 to 3 are (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    placements = Shard(0, mesh.get_group("tp")), Shard(0, mesh.get_group("dp"))
    record = Sharding((ROWS, COLUMNS), placements)
    # Row 0 is full of ones, row 1 of twos, and so on; padding has zeros.
    whole = torch.arange(1.0, ROWS + 1)[:, None].expand(ROWS, COLUMNS).contiguous()
    part = sharding.shard_of(whole, record)
    with ranks.Collectives() as sent:
        gathered = sharding.gather(part, record)
    model = Model()
    for shard in placements:
        sharding.shard_parameter(model, "weight", shard)
    sharding.init(model, 0, "cpu", torch.float32)
    return {
        "rows": [int(row[0]) - 1 for row in part],
        "back": torch.equal(gathered, whole),
        "sent": sent.calls,
        "held": model.weight.numel(),
        "parameters": sharding.num_parameters(model),
        "drawn": sharding.gather(model.weight.detach(), record),
    }


def teach(lesson: form.Lesson) -> None:
    lesson.predict(
        f"A weight [{ROWS}, {COLUMNS}] is sharded by rows over 2 tensor-parallel ranks (tp), then"
        " over 2 data-parallel ranks (dp). Which of rows 0 to 5 has each of the 4 ranks? Parts are"
        " of one size: where is padding?"
    )
    results = lesson.on_ranks(4, on_rank)
    for rank, result in enumerate(results):
        rows = ", ".join("padding" if row < 0 else f"row {row}" for row in result["rows"])
        lesson.say(f"rank {rank}: dp {rank // 2}, tp {rank % 2}   {rows}")
    lesson.check(
        "each tp has 3 rows; of these, dp 0 has two, dp 1 the third and a row of padding",
        [result["rows"] for result in results] == [[0, 1], [3, 4], [2, -1], [5, -1]],
    )

    lesson.predict(
        "Each rank gathers the whole weight again, in float32. Over which ranks first? How many"
        " bytes has a part that is sent?",
        "bytes over dp; bytes over tp",
    )
    sent = results[0]["sent"]
    sizes = " and ".join(f"{size}" for _, size in sent)
    steps = [("all-gather", 2 * COLUMNS * 4), ("all-gather", 3 * COLUMNS * 4)]
    lesson.check(
        f"parts of {sizes} bytes: over dp first, 2 x 3 x 4 bytes; padding is dropped; then over"
        " tp, 3 x 3 x 4 bytes",
        sent == steps,
        [size for _, size in sent],
    )
    back = [result["back"] for result in results]
    lesson.check(f"equal to the whole weight on {sum(back)} of 4 ranks", all(back))

    lesson.predict(
        "How many elements do 4 ranks hold together? How many parameters is that?",
        "elements; parameters",
    )
    held = [sum(result["held"] for result in results), results[0]["parameters"]]
    lesson.check(
        f"{held[0]} elements, {held[1]} parameters: padding is no parameter",
        held == [4 * 2 * COLUMNS, ROWS * COLUMNS],
        held,
    )

    lesson.predict("Weights begin as random numbers. Do 4 ranks begin with the weight of 1 rank?")
    one = Model().init_parameter("weight", (ROWS, COLUMNS), gpt.generator(0, "weight"))
    worst = max((result["drawn"] - one).abs().max().item() for result in results)
    lesson.check(
        f"largest difference {worst:.3f}: each draws the whole weight, and keeps its part",
        worst == 0,
    )


if __name__ == "__main__":
    form.run("sharding")
