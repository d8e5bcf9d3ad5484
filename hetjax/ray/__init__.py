"""Runs a training function as actors of Ray, and joins the workers of a Ray Train script.

`launch` makes an actor for each worker, with resources of its own; `loop` goes around the training
function of a `JaxTrainer`. Ray is imported when they are called.

- `joining` says where process 0 listens, and which nodes are drained.
- `launching` starts all anew when one is lost; `actors` are those of one attempt.
- `loops` reports a run to Ray Train.
"""

from hetjax.ray.launching import launch
from hetjax.ray.loops import loop

__all__ = ("launch", "loop")
