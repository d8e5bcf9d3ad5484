"""What a run tells its user beside its results, on stderr."""

import contextlib
import sys


def say(text: str) -> None:
    """Tells the user something that is no error, on a line of its own, above a bar that moves."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with bars.external_write_mode(sys.stderr) if bars else contextlib.nullcontext():
        print(f"hetjax: {text}", file=sys.stderr)
