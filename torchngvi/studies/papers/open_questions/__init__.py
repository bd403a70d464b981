"""Questions that the papers leave open, answered by runs: rates off conjugacy, floors of constant steps, schedules."""

from torchngvi.studies.papers import Study
from torchngvi.studies.papers.open_questions.batches import draw_batches, run_batches
from torchngvi.studies.papers.open_questions.floor import draw_floor, run_floor
from torchngvi.studies.papers.open_questions.rate import draw_rate, run_rate

STUDIES: dict[str, Study] = {
    "rate": Study(run_rate, draw_rate),
    "floor": Study(run_floor, draw_floor),
    "batches": Study(run_batches, draw_batches),
}
