"""The numbers of a fit of a log joint, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """The numbers of a fit of a log joint by a pool of draws, for `torchngvi.fitting.sample_average.SampleAverages`.

    They were chosen on eight schools, forty groups, logistic regressions of 50 and Poisson regressions of 33
    coefficients, and judged on the other rows of ``python -m benchmarks.engine_table``, whose option
    ``--set FIELD=VALUE`` runs them with another number; the appendix of black_box.md has a row for each.

    Attributes:
        trust: nats, and nats a coordinate, by which a mode may miss its promise and be trusted.
        units: nats a coordinate by which q is worse than a mode that is not trusted, where the data are in units of
            their own.
        widest: dimensions up to which one Gaussian with a full covariance is fitted by a pool, where a mode is trusted
            and where none is: its regressions take D² numbers a draw.  In as many as the first a mean field comes
            first where no mode is trusted.
        fewest: draws of a lot, and of an average, at least.
        radius: nats, and nats a coordinate, by which q may move from where it has drawn last.
        bold: share of the nats just gained by which it may move where it is far from an optimum.
        far: times noise² that norm² is there.
        stretch: bounds of the eigenvalues of a first step there.
        steps: of Anderson's acceleration over one pool, which remembers half as many.
        lengths: of each step that are tried.
        solved: share of noise² that norm² may be at the end of the steps.
        kept: share of the effective draws that steps must leave.
        share: of the weights, times the mean of a draw, below which a lot is forgotten.
        lots: that are kept, at most.
        aim: share of tolerance² that noise² is to have at the end.
        growth: share of the effective draws that a lot has, at most: in a valley, at the end, and where it creeps.
        least: effective draws at the end, unless they say that noise² is a hundredth of what is tolerated.
        cosine: of two moves from which on a third one may go on along the last.
        looks: values of the log joint at each of the places along it.
        rough: norm at which a mean field that comes before the full covariance ends, and from which on another start is
            tried before q needs more than so many `dear` draws.
        draft: draws after which it ends in any case.
        early: draws of the full covariance before another start may be tried in the place of more.
        dear: draws of an average, or of a pool near its end, from which on another start is worth its cost.
        most: draws in all.
        numbers: and coordinates of them, for the memory: about fifty bytes each.
    """

    trust: tuple[float, float] = (1.0, 0.3)
    units: float = 3000.0
    widest: tuple[int, int] = (150, 300)
    fewest: int = 32
    radius: tuple[float, float] = (0.5, 0.05)
    bold: float = 0.1
    far: float = 4.0
    stretch: tuple[float, float] = (0.25, 16.0)
    steps: int = 12
    lengths: tuple[float, ...] = (1.0, 0.4, 0.16, 0.064)
    solved: float = 0.05
    kept: float = 0.5
    share: float = 0.1
    lots: int = 40
    aim: float = 0.8
    growth: tuple[float, float, float] = (0.25, 1.0, 0.3)
    least: int = 200
    cosine: float = 0.6
    looks: int = 64
    rough: float = 0.3
    draft: int = 1500
    early: int = 4096
    dear: int = 512
    most: int = 65_536
    numbers: int = 8_000_000
