"""Studies of Tan (2025): analytic natural gradients of a Cholesky factor.

Logistic regressions (Table 5, Figure 3) and mixed models (Table 6, Figure 4) under the paper's stopping rule, beside the
printed numbers; the weights of the iterates in Theorem 3 (Figure 2); the pattern of a block-diagonal step (Figure 1).
"""

from torchngvi.studies.papers import Study
from torchngvi.studies.papers.tan2025.logistic import draw_bounds, draw_table, run_logistic
from torchngvi.studies.papers.tan2025.theorem import draw_weights, run_weights

STUDIES: dict[str, Study] = {
    "table5": Study(run_logistic, draw_table),
    "fig2": Study(run_weights, draw_weights),
    "fig3": Study(run_logistic, draw_bounds),
}
