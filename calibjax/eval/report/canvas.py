"""Style that all figures share: colours, markers, and plain axes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED = "#1c2530", "#7a838c"
"""The colour of the text and a fainter one; a page replaces both by its own, light or dark."""
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Colours of lines: the colour-blind safe set of Okabe and Ito."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
"""Markers of lines, so that colour is not the only difference."""


def blank(width: float, height: float) -> "Figure":
    """A new figure of this size in inches, without pyplot's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(axis) -> None:
    """Keeps the left and bottom spines only, in the colours that a page replaces."""
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    axis.tick_params(color=MUTED, labelcolor=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_color(INK)


def legend(axis) -> None:
    """A legend without a frame."""
    axis.legend(fontsize="small", frameon=False, labelcolor=INK)
