"""The training loop and its parts."""

from hetjax.training.gate import GATES

__all__ = ["GATES"]
