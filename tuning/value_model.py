"""A model that gives a number for each token: what the reward model of preference.py, and the
reward model and the critic of reinforcement.py have in common: preference.ValueHead.
"""

import checkpoint
import preference


class ValueModel:
    """Before a Task: a model with a value head. `learns`, of the task: what messages call the
    model."""

    def after_model_parallel(self, stage) -> None:
        super().after_model_parallel(stage)
        preference.apply(stage, self.groups.tp, self.config.sequence_parallel)

    def load_weights(self, world) -> None:
        """Start from --load: a model that has a value head; or one that writes text, all but its
        head, and the value head begins at random. A collective. Raises CheckpointError."""
        path = checkpoint.find(self.config.load)
        whole = "model.head.value.weight" in checkpoint.read_index(path)["tensors"]
        new = None if whole else preference.is_value_head
        self.trainer.checkpoints.load(path, weights_only=True, new=new)
        head = "its value head" if whole else "a new value head"
        world.say(f"{self.learns}: starting from the weights of {path}, with {head}")
