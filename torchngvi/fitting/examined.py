"""After a fit of a log joint: does a Gaussian fit?  That q is the best of them does not say so.

The examination of `torchngvi.diagnostics` takes from the log joint what the fit has taken at most, or what
`ExaminationSettings` allows where that is more, and what the budgets of the run have left.  It draws from generators of
its own, and leaves q and those of torch alone.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from torchngvi.diagnostics.examination import Allowance, ExaminationSettings, examine_fitted
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.errors import TorchngviError
from torchngvi.fitting.generators import Generators
from torchngvi.fitting.starts import Starts
from torchngvi.mode import Mode
from torchngvi.models.guarded import VALUE, Guarded
from torchngvi.models.log_joint import WarpedTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warped import Warped

_FEWEST = 1025 * VALUE  # cost below which nothing can be told
_SETTINGS = ExaminationSettings()


class Examined(NamedTuple):
    """What an engine knows about the family of q when a run is over."""

    verdict: Verdict | None = None
    why_not: str = ""  # where there is no verdict, as a clause; nothing where the engine never examines


def examined(
    q: Gaussian,
    target: Guarded,
    starts: Starts,
    most: float,  # budget of the whole run, in gradients
    over: Callable[[], bool],
    warped: Warped | None = None,
) -> Examined:
    """Examine a q that has been fitted from those starts, or what is warped around it, whatever it comes upon."""
    if warped is None:
        return _examined(q, target, starts, starts.modes, starts.mean, most, over)
    modes = [mode._replace(theta=warped.unbent(mode.theta)) for mode in starts.modes]  # in the space of the base
    with target.seen_as(lambda inner: WarpedTarget(inner, warped)) as inside:
        return _examined(q, inside, starts, modes, warped.unbent(starts.mean), most, over)


def _examined(
    q: Gaussian,
    target: Guarded,
    starts: Starts,
    modes: list[Mode],
    around: Tensor,  # (D,)
    most: float,
    over: Callable[[], bool],
) -> Examined:
    left = most - target.cost
    allowed = Allowance(target, 2**62, min(_SETTINGS.cost_after(target.cost), left), over)
    if over() or allowed.cost < _FEWEST:
        return Examined(None, "the budget of the run is used up")
    known = starts.looked and bool(starts.modes)
    try:
        with Generators(q.device).kept():
            verdict = examine_fitted(
                q,
                allowed,
                modes=modes if known else None,
                starts=starts.others if known else 0,
                around=around,
                seed=starts.seed + 11,
                settings=_SETTINGS,
            )
    except (TorchngviError, RuntimeError, ArithmeticError) as error:  # the fit is not lost for it
        return Examined(None, str(error).rstrip("."))
    return Examined(verdict)
