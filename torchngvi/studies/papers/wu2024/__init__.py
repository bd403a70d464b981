"""Wu and Gardner (2024), Understanding stochastic natural-gradient variational inference: Figures 1, 2, Theorem 1."""

from torchngvi.studies.papers import Study
from torchngvi.studies.papers.wu2024.families import draw_families, run_families
from torchngvi.studies.papers.wu2024.figure_1 import draw_regression, run_regression
from torchngvi.studies.papers.wu2024.figure_2 import draw_logistic, run_logistic

STUDIES: dict[str, Study] = {
    "fig1": Study(run_regression, draw_regression),
    "fig2": Study(run_logistic, draw_logistic),
    "families": Study(run_families, draw_families),
}
