"""What a fit by sample averages says: sentences, and the parts of sentences that a verdict is made of."""

from torchngvi.fitting.descent import Point
from torchngvi.fitting.fresh import Fresh
from torchngvi.fitting.starts import Starts
from torchngvi.models.guarded import Guarded


def _distance(point: Point, growth: float = 1.0, flat: tuple[float, float] = (1.5, 10.0)) -> str:
    """How far off q is in nats, where that is known: at the minimum of an average that is not all noise.

    It is half the square of the norm, or ``growth`` times more, from the first of ``flat`` on; beyond the second of
    them words say that it is not known.
    """
    small = point.norm2 <= point.noise2.clamp_min(0.01)
    if not bool((small & (point.noise2 < 1)).all()):
        return ""
    if growth > flat[1]:
        return " (how many nats from the best q is not known: the ELBO is nearly flat in a direction)"
    times = growth if growth > flat[0] else 1.0
    return f", typically about {0.5 * times * point.total**2:.1g} nats from the best q"


def cut(fitted: int, checked: int) -> str:
    """How many draws were left out of the averages and of the check; nothing where none were."""
    if not fitted and not checked:
        return ""
    return (
        f" Left out were {fitted} draws of the fit and {checked} of the check at which the log joint fails or is NaN: "
        "q is fitted to the posterior cut there."
    )


def advice(point: Point) -> str:
    """What to do where draws are not enough: a larger tolerance is of use only where q is near an optimum."""
    first = "Raise the tolerance" if _distance(point) else "Start from another mean or a smaller scale (initialize_)"
    return f"{first}, or transform the model to be nearer to a Gaussian."


def not_enough(point: Point, growth: float, draws: int, tolerance: float, judged: Fresh) -> str:
    """Why the most draws are not enough."""
    left = f"because {draws} draws leave a natural-gradient norm of {point.total:.2g} against a tolerance of"
    lost = _distance(point, growth) or ": q is not at an optimum"
    return f"{left} {tolerance:.2g}{lost}; {judged}. {advice(point)}"


def converged(point: Point, growth: float, draws: int, judged: Fresh, elsewhere: str) -> str:
    """That q is at an optimum, on how many draws, and what was found elsewhere."""
    reached = f"natural-gradient norm {point.total:.2g} with {draws} draws{_distance(point, growth)}"
    return f"{reached}; {judged}, {judged.kept}{elsewhere}."


def others(starts: Starts, switched: bool) -> str:
    """Where else was looked."""
    if switched:
        return "; q is from the best of several starts"
    return f", and {starts.others} other starts found nothing better" if starts.looked else ""


def not_finite(loss: float) -> str:
    """Say that the log joint is not finite at some of the draws with which an average begins."""
    return (
        f"because the negative ELBO is {loss} at this q: the log joint is not finite at some of its draws. Start from "
        "another mean or a smaller scale (initialize_), or transform constrained coordinates."
    )


def lost(point: Point, starts: Starts, target: Guarded) -> str:
    """Why no step can help at a point, or nothing."""
    loss = float(point.loss.sum())
    if not point.finite:
        return not_finite(loss) + target.failures()
    return unconfined(loss, starts.wider()) if starts.unconfined(loss) else ""


def unconfined(loss: float, wider: float) -> str:
    """Say that the log joint confines no posterior: the negative ELBO falls without bound."""
    spread = f", and q spreads e^{wider:.0f} times as wide as it started" if wider > 0.5 else ""
    energy = "" if loss >= -Starts.bounded else " If the function returns -log p, an energy, return its negative."
    return (
        f"because the negative ELBO falls without bound, to {loss:.3g}{spread}: the log joint does not confine q. Give "
        f"every parameter a proper prior.{energy}"
    )
