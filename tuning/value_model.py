"""A run whose model gives a number for each token: the reward model of --preference reward, and the
reward model and the critic of --rl.
"""

import checkpoint
import preference


class ValueModel:
    """Hooks of train.Trainer (runtime/hooks.py)."""

    def after_model_parallel(self, stage) -> None:
        super().after_model_parallel(stage)
        preference.apply(stage, self.groups.tp, self.config.sequence_parallel)

    def load_weights(self, world) -> None:
        """From --load: a model that writes text, whose value head then begins at random, or one
        that has a value head. A collective. Raises CheckpointError."""
        path = checkpoint.find(self.config.load)
        whole = "model.head.value.weight" in checkpoint.read_index(path)["tensors"]
        new = None if whole else preference.is_value_head
        self.checkpoints.load(path, weights_only=True, new=new)
        head = "its value head" if whole else "a new value head"
        world.say(f"{self.learns}: starting from the weights of {path}, with {head}")
