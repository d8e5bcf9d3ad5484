"""What a run tells its user beside its results, on stderr."""

import sys


def say(text: str) -> None:
    """Tells the user something that is no error."""
    print(f"hetjax: {text}", file=sys.stderr)
