"""What all figures share: colours, marks, and axes with nothing on them that is not read."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED = "#1c2530", "#7a838c"
"""The text's colour and a fainter one, light or dark in a page."""
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Okabe and Ito's, for lines side by side."""
MARKS = ("o", "s", "^", "D", "v", "P", "X")
"""Beside colours, for those who do not see them."""


def blank(width: float, height: float) -> "Figure":
    """A figure of its own, in inches; nothing global is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain(axis) -> None:
    """Only the two spines that are read, in colours that a page can change."""
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    axis.tick_params(color=MUTED, labelcolor=INK)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set_color(INK)


def legend(axis) -> None:
    """Without a frame."""
    axis.legend(fontsize="small", frameon=False, labelcolor=INK)
