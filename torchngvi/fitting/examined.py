"""After a fit of a log joint: does a Gaussian fit?  That q is the best of them does not say so.

The examination of `torchngvi.diagnostics` takes from the log joint what the fit has taken at most, or what
`ExaminationSettings` allows where that is more, and what the budgets of the run have left.  It draws from generators of
its own, and leaves q and those of torch alone.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from torchngvi.diagnostics.examination import Allowance, ExaminationSettings, examine_fitted
from torchngvi.diagnostics.verdict import Verdict
from torchngvi.errors import TorchngviError
from torchngvi.fitting.checkpoints import Generators
from torchngvi.fitting.starts import Starts
from torchngvi.models.guarded import VALUE, Guarded
from torchngvi.models.log_joint import WarpedTarget
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.warped import Warped

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
    modes, around = starts.modes, starts.mean
    with ExitStack() as stack:
        if warped is not None:  # in the space of the base
            modes, around = [mode._replace(theta=warped.unbent(mode.theta)) for mode in modes], warped.unbent(around)
            target = stack.enter_context(target.seen_as(lambda inner: WarpedTarget(inner, warped)))
        allowed = Allowance(target, 2**62, min(_SETTINGS.cost_after(target.cost), most - target.cost), over)
        if over() or allowed.cost < 1025 * VALUE:  # fewer values say nothing
            return Examined(None, "the budget of the run is used up")
        known = starts.looked and bool(modes)
        stack.enter_context(Generators(q.device).kept())
        try:
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
