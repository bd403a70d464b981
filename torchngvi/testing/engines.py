"""The check of an engine of `torchngvi.fit`: its marks, its counts, its loss, its state and its way back."""

import io
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from torchngvi.interfaces import Posterior
from torchngvi.testing.claims import DTYPE, Claim, kind


class _Counted:
    """A log joint that counts the points where it is asked."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function, self.points = function, 0

    def __call__(self, theta: Tensor) -> Tensor:
        self.points += theta.shape[:-1].numel()
        return self.function(theta)


def _bent(theta: Tensor) -> Tensor:
    """A log density of two variables that is no Gaussian, up to a constant."""
    x, y = theta.unbind(-1)
    return -0.5 * x.square() - 0.5 * (y - 0.3 * x.square() - 0.5).square()


def check_engine(
    factory: Callable[[Callable[[Tensor], Tensor]], Any],
    log_joint: Callable[[Tensor], Tensor] = _bent,
    *,
    steps: int = 8,
    posterior: Callable[[Any], Posterior] = attrgetter("q"),
) -> None:
    """Check that an engine keeps the contract of `torchngvi.fitting.loop.Engine`, by a short run on a small problem.

    Each `advance` must set a mark; what it adds to the gradients and values must be the points where the log joint was
    asked, and ``spent`` must agree with the record; the loss must be minus a fresh ELBO at q, within the error of so
    many draws; a run must go on from the state of a mark, which a file held, to the last bit; `go_back` must restore q.

    Args:
        factory: makes an engine on a q of its own, in float64 and not at its optimum, for the log joint that it is
            given: one of two variables by default, which counts.  A factory with a target of its own may leave it.
        log_joint: a function of θ (S, D) that returns (S,): that of the problem, where the factory has its own.
        steps: how many times the engine advances at most.
        posterior: gives the posterior of an engine whose loss is reported, where that is not its q.

    Raises:
        AssertionError: a promise is broken; the text says which, by how much, and at which evaluation.

    >>> from torchngvi import VN, CholeskyGaussian, LogJoint, Stein
    >>> from torchngvi.fitting.steps import Steps
    >>> from torchngvi.fitting.stopping import Evaluations
    >>> def factory(log_joint):
    ...     q = CholeskyGaussian(2, dtype=torch.float64)
    ...     return Steps(q, LogJoint(log_joint), VN(q, lr=0.1, estimator=Stein(8)), Evaluations(20))
    >>> check_engine(factory)
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        engine, counted = _begun(factory, log_joint)
        claim = Claim(kind(engine)).at("a mark")
        with claim.works("a call of the engine"):
            run = _advanced(claim, engine, counted, steps)
            middle = run[len(run) // 2 :]
            again, counted = _begun(factory, log_joint)
            _loss(claim, again, counted, middle[0], posterior)
            _put(claim, again, middle[0])
            for number, (standing, _) in enumerate(middle):
                found, here = again.advance(), claim.at(f"the evaluation {number + 1} after a mark")
                same = torch.equal(found.loss, standing.loss) and str(found.record[:-1]) == str(standing.record[:-1])
                here.holds(same, "a run must go on from its state_dict, bit for bit")
            if len(run) < steps:
                again.advance()
            states = [each.state_dict().items() for each in (again, engine)]
            one, two = ([(name, _plain(part)) for name, part in state if name != "optimizer"] for state in states)
            claim.holds(repr(one) == repr(two), "a run must go on from its state_dict, to the same state_dict")
            place, before = engine.here(), _plain(engine.q.state_dict())
            engine.advance()
            engine.go_back(place)
            claim.holds(_plain(engine.q.state_dict()) == before, "go_back must put q where `here` was called")


def _begun(factory: Callable[..., Any], log_joint: Any) -> tuple[Any, _Counted]:
    """An engine at its start, whose marks are files, and its log joint."""
    counted = _Counted(log_joint)
    engine = factory(counted)

    def captured(**state: Any) -> bytes:
        file, q = io.BytesIO(), _plain(engine.q.state_dict())
        torch.save({"state": _plain(state, lambda x: x), "generator": torch.get_rng_state(), "q": q}, file)
        return file.getvalue()

    engine.capture = captured
    engine.check()
    engine.begin()
    engine.begun = True
    return engine, counted


def _put(claim: Claim, engine: Any, place: tuple[Any, bytes]) -> None:
    """Put an engine where a run was marked."""
    saved = torch.load(io.BytesIO(place[1]), weights_only=True)
    engine.load_state_dict({**saved["state"], "spent": place[0].spent})
    claim.holds(_plain(engine.q.state_dict()) == saved["q"], "load_state_dict must put q where the run was marked")
    torch.set_rng_state(saved["generator"])


def _plain(state: Any, of: Callable[[Tensor], Any] = Tensor.tolist) -> Any:
    """A state in dicts, lists and tuples, as a checkpoint holds it, and its tensors as numbers, to be compared."""
    if isinstance(state, dict):
        return {name: _plain(part, of) for name, part in state.items()}
    if isinstance(state, list | tuple):
        parts = [_plain(part, of) for part in state]
        return parts if isinstance(state, list) else tuple(parts)
    return of(state) if isinstance(state, Tensor) else state


def _advanced(claim: Claim, engine: Any, counted: _Counted, steps: int) -> list[tuple[Any, bytes]]:
    """The standing and the state of each mark of a run, whose counts are checked."""
    run, last = list[tuple[Any, bytes]](), cast(Any, None)
    for number in range(steps):
        here, before = claim.at(f"the evaluation {number + 1}"), counted.points
        engine.marked = None
        standing = engine.advance()
        if standing is None or standing.aside:
            break
        here.holds(engine.marked is not None, "advance must call self.mark() before it evaluates")
        record, (evaluations, gradients) = standing.record, standing.spent
        if last is not None:
            told = record.gradients + standing.values - last.record.gradients - last.values
            asked = counted.points - before
            here.holds(told == asked or not counted.points, f"it must count {asked} gradients and values, not {told}")
            right = last.record.evaluations < evaluations <= record.evaluations
            right = right and (last.record.gradients < gradients or gradients == record.gradients)
            here.holds(
                right and gradients <= record.gradients,
                f"`spent` must be the evaluations and gradients so far; it is {standing.spent}",
            )
        run.append((standing, engine.marked.state))
        last = standing
    claim.holds(len(run) > 1, "it must advance more than once on a problem that is not solved")
    return run


def _loss(
    claim: Claim,
    engine: Any,
    counted: _Counted,
    place: tuple[Any, bytes],
    posterior: Callable[[Any], Posterior],
    repeats: int = 20,
    draws: int = 4000,
    errors: float = 6.0,
) -> None:
    """The mean loss of evaluations by other draws is that of q where it was marked, or where `advance` has left it."""
    losses, off = [place[0].loss.sum()], list[float]()
    for number in range(repeats):
        _put(claim, engine, place)
        torch.manual_seed(number)
        before = counted.points
        losses.append(engine.advance().loss.sum())
    loss, asked = torch.stack(losses), (counted.points - before) * (1 if losses[0] == losses[1] else len(losses))
    for go_back in (lambda: None, lambda: engine.go_back(engine.marked.coordinates)):
        go_back()
        q: Any = posterior(engine)
        with torch.no_grad():
            theta = q.sample(draws)
            energy = counted.function(theta).reshape(draws, -1).sum(-1)
            terms = energy - q.log_prob(theta).reshape(draws, -1).sum(-1)
        error = terms.std() / draws**0.5 + (energy.std() + terms.std()) * (asked > 0) / max(asked, 1) ** 0.5
        off.append(float((loss.mean() + terms.mean()).abs() / (error + torch.finfo(DTYPE).eps ** 0.5)))
    told = f"the loss must be minus the ELBO at q; it is off by {min(off):.1f} standard errors"
    claim.holds(min(off) <= errors, told)
