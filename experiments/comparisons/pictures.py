"""What the pictures of the programs share."""

from typing import Any


def log_ticks(panel: Any) -> None:
    """Plain numbers on a logarithmic y axis, so few that they do not hide each other."""
    from matplotlib import ticker

    low, high = panel.get_ylim()
    subs = (2.0, 3.0, 5.0) if high > 5 * low else tuple(range(2, 10))
    panel.yaxis.set_minor_locator(ticker.LogLocator(subs=subs))
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.yaxis.set_tick_params(which="both", labelsize=8)
