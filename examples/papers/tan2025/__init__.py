"""Studies of Tan (2025): analytic natural gradients of a Cholesky factor.

Logistic regressions (Table 5, Figure 3) and mixed models (Table 6, Figure 4) under the paper's stopping rule, beside
the printed numbers; the patterns of a step (Figure 1) and the weights of the iterates in Theorem 3 (Figure 2).
"""

from examples.papers import Study
from examples.papers.tan2025 import logistic, mixed
from examples.papers.tan2025.patterns import draw_patterns, run_patterns
from examples.papers.tan2025.theorem import draw_weights, run_weights

STUDIES: dict[str, Study] = {
    "table5": Study(logistic.run_logistic, logistic.draw_table),
    "table6": Study(mixed.run_mixed, mixed.draw_table),
    "fig1": Study(run_patterns, draw_patterns),
    "fig2": Study(run_weights, draw_weights),
    "fig3": Study(logistic.run_logistic, logistic.draw_bounds),
    "fig4": Study(mixed.run_mixed, mixed.draw_bounds),
}
