"""What a prediction is made from: a machine, the software that runs on it, and a layout.

    Machine      data-sheet numbers of a device and of the links between devices, and at most six
                 constants that are fitted to measured times
    Software     facts about an implementation: what it keeps, what it overlaps
    Layout       how a model and its batch are spread over the ranks
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are spread. Each field has the name of train.py's flag.

    recompute: none, selective or full. schedule: None is 1f1b, or interleaved with virtual stages.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    virtual_stages: int = 1
    schedule: str | None = None
    # sequences, of one forward pass and of one step
    micro_batch_size: int = 1
    global_batch_size: int = 1
    recompute: str = "none"
    sequence_parallel: bool = False
    zero_stage: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """m, of each pipeline in a step."""
        return self.global_batch_size // self.dp // self.micro_batch_size

    @property
    def pipeline_schedule(self) -> str:
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")


@dataclass(frozen=True)
class Software:
    """Facts about an implementation, known from its source. Not fitted.

    Bytes are those of one number. Overlapped communication takes time only where it is longer than
    the computation beside it.
    """

    name: str
    # bytes of a weight, and of an activation
    weight: int = 2
    gradient: int = 4
    # master weight and two moments
    optimizer_state: int = 12
    # attention in one kernel, which writes no s x s scores
    fused_attention: bool = False
