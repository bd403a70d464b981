"""Kim, Ma and Gardner (2024), Linear convergence of black-box variational inference: its theorems, drawn.

The paper has no experiment.  All targets here are Gaussian, so that the optimum and every second moment are known.
"""

from examples.papers import Study
from examples.papers.kim2024.complexity import draw_complexity, run_complexity
from examples.papers.kim2024.floor import draw_floor, run_floor
from examples.papers.kim2024.quadratic_variance import draw_qv, run_qv
from examples.papers.kim2024.rate import draw_rate, run_rate

STUDIES: dict[str, Study] = {
    "rate": Study(run_rate, draw_rate),
    "qv": Study(run_qv, draw_qv),
    "floor": Study(run_floor, draw_floor),
    "complexity": Study(run_complexity, draw_complexity),
}
