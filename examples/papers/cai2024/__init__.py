"""Cai et al. (2024), Batch and match: black-box VI with a score-based divergence (arXiv 2402.14758).

The rival of SR-VN that is nearest to it: full-covariance Gaussians from gradients at draws, in closed form.
"""

from examples.papers import Study
from examples.papers.cai2024.targets import draw_targets, run_targets

STUDIES: dict[str, Study] = {
    "targets": Study(run_targets, draw_targets),
}
