"""One style for all plots of the manual: title, units, a legend that explains lines and bands, success from 0 to 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

_Labels: TypeAlias = str | Sequence[str]

WIDTH, HEIGHT, DPI = 5.0, 3.4, 130
"""Size of a panel, inches; dots per inch."""
COLOURS = ("#0b6bcb", "#e8590c", "#2b8a3e", "#7048e8", "#c2255c", "#495057")
"""One for each thing that is compared; colour-blind readers can distinguish them too."""


def panels(titles: Sequence[str], columns: int = 3) -> tuple[Any, list[Any]]:
    """Make a figure with a panel for each title; the figure and its axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(max(7.0, WIDTH * columns), HEIGHT * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(titles) :]:
        axis.set_visible(False)
    for axis, title in zip(axes.flat, titles, strict=False):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_prop_cycle(color=COLOURS)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
        axis.grid(alpha=0.25)
    return figure, list(axes.flat[: len(titles)])


def finish(figure: Any, axes: Sequence[Any], path: Path, *, x: _Labels, y: _Labels, note: str = "") -> None:
    """Label the axes, set a success's from 0 to 1, explain the lines below the panels, and write the picture.

    Args:
        x, y: Quantity and unit of each panel, or of all.
        note: What thin and thick lines and bands are.
    """
    below, beside = ([given] * len(axes) if isinstance(given, str) else given for given in (x, y))
    for axis, under, label in zip(axes, below, beside, strict=True):
        axis.set(xlabel=under, ylabel=label)
        if label.startswith("success"):
            axis.set_ylim(0.0, 1.0)
    handles, labels = axes[0].get_legend_handles_labels()
    if len(labels) > 1 and axes[0].get_legend() is None:
        figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside upper center", ncols=4)
    if note:
        figure.supxlabel(note, fontsize=8, color="0.35", x=0.01, ha="left")
    figure.savefig(path, dpi=DPI)
