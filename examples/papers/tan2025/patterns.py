"""Figure 1 of Tan (2025): which entries of the matrices of a step are not zero, for blocks and for an arrow."""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import ListedColormap

from examples.compare_methods.plots import blank_figure, color, save, style
from torchngvi.expectations import Independent, PathDerivative
from torchngvi.models import LogJoint
from torchngvi.posteriors import CholeskyGaussian, PrecisionCholeskyGaussian
from torchngvi.structures import arrow, block_diagonal


def run_patterns(sizes: tuple[int, ...] = (4, 3, 5, 4), draw: int = 0, *, full: bool = False) -> pd.DataFrame:
    """Take one step of Algorithms 1c and 2c at a random q, and record what is not zero; the last block is
    the global.
    """
    sizes, found = tuple(sizes), []
    dim = sum(sizes)
    generator = torch.Generator().manual_seed(draw)
    noise = torch.randn(dim, dim, dtype=torch.float64, generator=generator)
    for algorithm, kind, structure in (
        ("1c", CholeskyGaussian, block_diagonal(sizes)),
        ("2c", PrecisionCholeskyGaussian, arrow(local=sizes[:-1], globals=sizes[-1])),
    ):
        q = kind(dim, structure=structure, dtype=torch.float64)
        root = structure.from_dense(noise.tril(-1) + 3 * torch.eye(dim, dtype=torch.float64))
        q.assign(q.coordinates._replace(matrix=root), torch.tensor(True))
        e = PathDerivative(Independent(1, generator))(q, LogJoint(lambda theta: -theta.cosh().log().sum(-1)))
        L, gradient, step = (
            structure.to_dense(x) for x in (root, structure.tril(q.euclidean(e).matrix), q.tangent(e).matrix)
        )
        inner = L.mT @ gradient if algorithm == "1c" else torch.linalg.solve(L, step)
        names = ("Cᵀ", "Ḡ₁", "H = CᵀḠ₁", "C DB(H)") if algorithm == "1c" else ("Tᵀ", "Ḡ", "DB(H)", "T DB(H)")
        for name, matrix in zip(names, (L.mT, gradient, inner, step), strict=True):
            for row, column in (matrix.abs() > 1e-12).nonzero().tolist():
                found.append({"algorithm": algorithm, "matrix": name, "row": row, "column": column, "dim": dim})
    return pd.DataFrame(found)


def draw_patterns(log: pd.DataFrame, path: Path) -> None:
    """Draw Figure 1, a row of panels for each algorithm, what is not zero shaded."""
    figure = blank_figure(
        8.4,
        4.8,
        "Figure 1: what is not zero in a step",
        "blocks of several sizes; in 2c the last holds the global variables",
    )
    panels = figure.subplots(log["algorithm"].nunique(), 4, squeeze=False)
    for line, (algorithm, part) in zip(panels, log.groupby("algorithm", sort=False), strict=True):
        for axes, (name, entries) in zip(line, part.groupby("matrix", sort=False), strict=True):
            shade = np.zeros((int(entries["dim"].iloc[0]),) * 2)
            shade[entries["row"], entries["column"]] = 1.0
            style(axes, f"{algorithm}: {name}")
            axes.pcolormesh(shade, cmap=_shades(), vmin=0, vmax=1, edgecolors="white", linewidth=0.4, rasterized=True)
            axes.invert_yaxis()
            axes.set_aspect("equal")
            axes.set_xticks([])
            axes.set_yticks([])
    save(figure, path)


def _shades() -> ListedColormap:
    return ListedColormap(["#f1f2f4", color(0)])
