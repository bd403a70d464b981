"""Kim, Fu, Ma, Gardner and Campbell (2026), Price's gradient from Bures-Wasserstein to parameter space.

The claim (arXiv 2602.18718) is that the estimator and not the geometry makes the difference.  Geometry and estimator
are two axes of this library, so that each can be held while the other is changed.
"""

from examples.papers import Study
from examples.papers.kim2026.geometries import draw_geometries, run_geometries
from examples.papers.kim2026.noise import draw_noise, run_noise

STUDIES: dict[str, Study] = {
    "geometries": Study(run_geometries, draw_geometries),
    "noise": Study(run_noise, draw_noise),
}
