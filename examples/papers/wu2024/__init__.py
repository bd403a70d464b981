"""Wu and Gardner (2024), Understanding stochastic natural-gradient variational inference: Figures 1, 2, Theorem 1."""

from examples.papers import Study
from examples.papers.wu2024.families import draw_families, run_families
from examples.papers.wu2024.figure_1 import draw_regression, run_regression
from examples.papers.wu2024.figure_2 import draw_logistic, run_logistic

STUDIES: dict[str, Study] = {
    "fig1": Study(run_regression, draw_regression),
    "fig2": Study(run_logistic, draw_logistic),
    "families": Study(run_families, draw_families),
}
