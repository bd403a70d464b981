"""What the optimizer hands from one part of a step to the next, and what it tells of itself."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torchngvi.interfaces import Expectation, Path


class Evaluation(NamedTuple):
    """The loss L and its derivative, evaluated at one q.

    Attributes:
        loss: L(q) = E_q[ℓ] - γ entropy(q), (*batch,), in nats.
        e: the value and the derivative of E_q[ℓ].

    >>> import torch
    >>> from torchngvi.interfaces import Cost, Framed
    >>> e = Expectation(torch.tensor(2.0), Framed(torch.zeros(1), torch.ones(1, 1)), 1.0, True, Cost(1, 0))
    >>> Evaluation(torch.tensor(0.5), e).e.value.item()
    2.0
    """

    loss: Tensor  # L(q) = E_q[ℓ] - γ entropy, (*batch,)
    e: Expectation


class Heading(NamedTuple):
    """The path that the next step may follow from an evaluation.

    Attributes:
        path: the curve of moves that the rule gives.
        norm2: the squared natural norm of ∇L, (*batch,), computed only if it is asked for.
        memory: what the metric will remember of this gradient once the step is taken.

    >>> import torch
    >>> path = Path(lambda rho: rho, lambda: torch.tensor(4.0), lambda: torch.tensor(4.0))
    >>> Heading(path, path.norm2, {}).norm2().item()
    4.0
    """

    path: Path
    norm2: Callable[[], Tensor]  # squared natural norm of ∇L, (*batch,)
    memory: dict[str, Any]  # what the metric will remember of this gradient once the step is taken


class Status(NamedTuple):
    """The loss of q and the norm of its gradient, as `NaturalGradientVI.evaluate` gives them.

    Attributes:
        loss: L(q) = E_q[ℓ] - γ entropy(q), (*batch,), in nats.
        norm2: the squared natural norm |a|² + ½‖P‖²_F of its gradient, (*batch,); 0 at the optimum.
        noise2: the expected value of norm2 at the optimum, where it is known from the draws: a squared standard error.

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian, GeneralizedLinear
    >>> model = GeneralizedLinear(torch.ones(1, 1), [0.0], "gaussian", prior_precision=1.0)
    >>> status = VN(CholeskyGaussian(1, scale=0.5**0.5)).evaluate(model)  # q is the posterior
    >>> round(status.loss.item(), 4), status.norm2.item() < 1e-12  # ½ log 4π
    (1.2655, True)
    """

    loss: Tensor  # (*batch,)
    norm2: Tensor  # squared natural-gradient norm, (*batch,)
    noise2: Tensor | None  # its expected value at the optimum, known from the draws: a squared standard error


class Report(NamedTuple):
    """The size of the last step and whether it was taken, kept in the attribute ``last`` of an optimizer.

    Attributes:
        rho: the step size ρ, (*batch,); in units of 1/γ where it was found by trial.
        accepted: which members have moved, (*batch,).

    >>> import torch
    >>> from torchngvi import VN, CholeskyGaussian
    >>> _ = torch.manual_seed(0)
    >>> opt = VN(CholeskyGaussian(1), lr=0.5)
    >>> _ = opt.step(lambda theta: -theta.square().sum(-1))
    >>> opt.last.rho.item(), opt.last.accepted.item()
    (0.5, True)
    """

    rho: Tensor  # step size, (*batch,); in units of 1/γ where it was found by trial
    accepted: Tensor  # (*batch,)


# The state of a posterior under its optimizer: completed for the parts, and converted with q

State = dict[str, Any]


def complete(state: State, fresh: State) -> None:
    """Complete a state that was loaded, in place: add entries that it lacks, and restore their dtypes."""
    for name, value in fresh.items():
        state[name] = _in_dtypes_of(value, state[name]) if name in state else value


def converted(state: State, like: Tensor) -> State:
    """The state in the dtype and on the device of q."""
    new = dict(state)
    for name, value in state.items():
        if isinstance(value, dict):
            new[name] = converted(value, like)
        elif isinstance(value, Tensor) and value.is_floating_point():
            new[name] = value.to(like)
    return new


def _in_dtypes_of(fresh: Any, loaded: Any) -> Any:
    if isinstance(fresh, dict):
        return fresh | loaded | {name: _in_dtypes_of(fresh[name], loaded[name]) for name in fresh if name in loaded}
    return loaded.to(fresh.dtype) if isinstance(fresh, Tensor) else loaded
