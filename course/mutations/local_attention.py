"""What local attention needs: its own heads' slopes, and the width of the window."""

import families
from course.mutations import bug, replaces


@bug(2, dict(tp=2, positions="alibi"), first="step 1: output of blocks.0")
@replaces(families.LocalBias, "shard_heads")
def slopes_of_the_first_rank(self, group):
    """Every tensor-parallel rank's heads have the ALiBi slopes of the first rank's."""
    self.slopes = self.slopes.chunk(group.size())[0]


@bug(1, dict(sliding_window=8), first="step 1: output of blocks.0")
@replaces(families.LocalBias, "__init__")
def window_of_one_more(self, config, layer=0, original=families.LocalBias.__init__):
    """A window of w tokens shows w + 1: the token itself is not counted."""
    original(self, config, layer)
    self.window += 1
