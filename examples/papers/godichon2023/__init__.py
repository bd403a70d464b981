"""Studies of Godichon-Baggioni, Nguyen and Tran (2023): Figures 1 to 6 with the rivals the paper leaves out; a flow.

Every method of a figure takes the same draws of the log joint an iteration; scores for Fisher matrices, which cost
no likelihood, are counted beside, and so is the time of the steps.  Runs of one method differ in their seeds and
step side by side, as a batch of λ, in Figures 1 to 4.
"""

from examples.papers import Study
from examples.papers.godichon2023.coin import draw_coin_densities, draw_coin_errors, run_coin
from examples.papers.godichon2023.crescent import draw_crescent, run_crescent
from examples.papers.godichon2023.flow import draw_flow, run_flow
from examples.papers.godichon2023.network import draw_network, run_network
from examples.papers.godichon2023.normal import draw_normal, run_normal
from examples.papers.godichon2023.ode import draw_ode, run_ode
from examples.papers.godichon2023.poisson import draw_poisson, run_poisson

STUDIES: dict[str, Study] = {
    "fig1": Study(run_coin, draw_coin_densities),
    "fig2": Study(run_coin, draw_coin_errors),
    "fig3": Study(run_normal, draw_normal),
    "fig4": Study(run_poisson, draw_poisson),
    "fig5": Study(run_network, draw_network),
    "fig6": Study(run_flow, draw_flow),
    "coupling": Study(run_crescent, draw_crescent),
    "ode": Study(run_ode, draw_ode),
}
