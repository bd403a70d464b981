"""Questions that the papers leave open, answered by runs: rates off conjugacy, floors of constant steps, schedules."""

from examples.papers import Study
from examples.papers.open_questions.batches import draw_batches, run_batches
from examples.papers.open_questions.curves import draw_curves, run_curves
from examples.papers.open_questions.floor import draw_floor, run_floor
from examples.papers.open_questions.mean_field import draw_mean_field, run_mean_field
from examples.papers.open_questions.normalised import draw_normalised, run_normalised
from examples.papers.open_questions.rate import draw_rate, run_rate

STUDIES: dict[str, Study] = {
    "rate": Study(run_rate, draw_rate),
    "floor": Study(run_floor, draw_floor),
    "batches": Study(run_batches, draw_batches),
    "mean-field": Study(run_mean_field, draw_mean_field),
    "normalised": Study(run_normalised, draw_normalised),
    "curves": Study(run_curves, draw_curves),
}
