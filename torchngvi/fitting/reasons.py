"""What a fit by sample averages says: sentences, and the parts of sentences that a verdict is made of."""

from torchngvi.fitting.descent import Point
from torchngvi.fitting.fresh import Fresh
from torchngvi.fitting.origin import BOUNDED, Origin
from torchngvi.fitting.starts import Starts
from torchngvi.models.guarded import Guarded

_SMALL = 0.01  # norm² that is small whatever the noise
_FLAT = (1.5, 10.0)  # times half of norm² that the distance may be, which is said from the first on, to the second


def distance(point: Point) -> str:
    """How far off q is in nats, where that is known: at the minimum of an average that is not all noise."""
    return _nats(point, 1.0) if _known(point) else ""


def _known(point: Point) -> bool:
    small = point.norm2 <= point.noise2.clamp_min(_SMALL)
    return bool((small & (point.noise2 < 1)).all())


def _nats(point: Point, growth: float) -> str:
    """Half the square of the norm, or as many times more where the ELBO is flat; words where that is too many."""
    if growth > _FLAT[1]:
        return " (how many nats from the best q is not known: the ELBO is nearly flat in a direction)"
    times = growth if growth > _FLAT[0] else 1.0
    return f", typically about {0.5 * times * point.total**2:.1g} nats from the best q"


def cut(fitted: int, checked: int) -> str:
    """How many draws were left out of the averages and of the check; nothing where none were."""
    if not fitted and not checked:
        return ""
    return (
        f" Left out were {fitted} draws of the fit and {checked} of the check at which the log joint fails or is NaN: "
        "q is fitted to the posterior cut there."
    )


def too_few(draws: int, norm: float, tolerance: float) -> str:
    """The beginning of what is said where averages do not lead to the tolerance."""
    return f"because {draws} draws leave a natural-gradient norm of {norm:.2g} against a tolerance of {tolerance:.2g}"


def advice(point: Point) -> str:
    """What to do then: a larger tolerance is of use only where q is near an optimum."""
    first = "Raise the tolerance" if distance(point) else "Start from another mean or a smaller scale (initialize_)"
    return f"{first}, or transform the model to be nearer to a Gaussian."


def not_enough(point: Point, growth: float, draws: int, tolerance: float, judged: Fresh) -> str:
    """Why the most draws are not enough."""
    lost = _nats(point, growth) if _known(point) else ": q is not at an optimum"
    return f"{too_few(draws, point.total, tolerance)}{lost}; {judged}. {advice(point)}"


def converged(point: Point, growth: float, draws: int, judged: Fresh, elsewhere: str) -> str:
    """That q is at an optimum, on how many draws, and what was found elsewhere."""
    lost = _nats(point, growth) if _known(point) else ""
    reached = f"natural-gradient norm {point.total:.2g} with {draws} draws{lost}"
    return f"{reached}; {judged}, {judged.kept}{elsewhere}."


def others(starts: Starts, switched: bool) -> str:
    """Where else was looked."""
    if switched:
        return "; q is from the best of several starts"
    if not starts.looked:
        return ""
    return f", and {starts.others} other starts found nothing better"


_ELSEWHERE = "Start from another mean or a smaller scale (initialize_), or transform constrained coordinates."


def not_finite(loss: float, advice: str = _ELSEWHERE) -> str:
    """Say that the log joint is not finite at some of the draws with which an average begins."""
    return f"because the negative ELBO is {loss} at this q: the log joint is not finite at some of its draws. {advice}"


def lost(point: Point, origin: Origin, target: Guarded) -> str:
    """Why no step can help at a point, or nothing."""
    loss = float(point.loss.sum())
    if not point.finite:
        return not_finite(loss) + target.failures()
    return unconfined(loss, origin.wider()) if origin.unconfined(loss) else ""


def unconfined(loss: float, wider: float) -> str:
    """Say that the log joint confines no posterior: the negative ELBO falls without bound."""
    spread = f", and q spreads e^{wider:.0f} times as wide as it started" if wider > 0.5 else ""
    energy = "" if loss >= -BOUNDED else " If the function returns -log p, an energy, return its negative."
    return (
        f"because the negative ELBO falls without bound, to {loss:.3g}{spread}: the log joint does not confine q. Give "
        f"every parameter a proper prior.{energy}"
    )
