"""Log joints given as functions: of all draws at once, of one, with terms for each datum, or under a warp.

And what a user may hand in where a target is asked for.

What the components of a mixture approximate: h(θ) = log p(θ) - log q(θ), in which the other components stand.

With the Fisher matrix of (allocation, θ) jointly the factors π_k cancel, and the natural gradient of the ELBO for
component k is that of one Gaussian on h (Lin, Khan and Schmidt 2019, Fast and simple natural-gradient variational
inference with mixture of exponential-family approximations):

    a_k = -C_kᵀ E_k[∇h]        P_k = -C_kᵀ E_k[∇²h] C_k        ∇log q = Σ_j r_j ∇log N_j, r the responsibilities

The entropy is in h, so that the temperature of this target is 0 and P has no identity to be taken off.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Self, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchngvi.arguments import read_callable, read_instance, read_number
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Posterior, SeparableTarget, Target
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.mixture import Mixture
from torchngvi.posteriors.warps import Warped

# Any differentiable log joint, given as a function: of all draws at once, or of one

_WORDS_OF_VMAP = ("vmap", "doesn't have storage")  # in the errors it raises


@final
class LogJoint(Target):
    """A log joint log p(data, θ) given as a function of θ, differentiable by autograd.

    Use it for any model without a structure that the library knows.  A value that is NaN or infinite is passed
    on: a step that meets one is not taken.  Values come in the dtype of θ, whatever the function computes in.

    Args:
        function: the log joint of each of S draws, θ (S, *batch, D) -> (S, *batch); normalising
            constants may be left out, then the loss lacks them too.  For a function of one θ (D,) see
            `vmapped` and `looped`.
        temperature: the weight γ of the entropy, finite and not negative.

    Raises:
        InputError: if the function cannot be called, or the temperature is out of range; on use, if a result is no
            tensor,
            is complex, or has another shape than (S, *batch).

    >>> import torch
    >>> LogJoint(lambda theta: -0.5 * theta.square().sum(-1)).log_joint(torch.ones(1, 2)).tolist()
    [-1.0]
    """

    def __init__(self, function: Callable[[Tensor], Tensor], temperature: float = 1.0) -> None:
        _check_callable(function)
        self.function = function
        self.temperature = read_number("temperature", temperature, "is the weight of the entropy", at_least=0)

    @classmethod
    def vmapped(cls, function: Callable[[Tensor], Tensor], temperature: float = 1.0) -> Self:
        """Make a log joint from a function of one θ, which `torch.func.vmap` evaluates at all draws at once.

        Args:
            function: the log joint of one θ, (D,) -> ().
            temperature: the weight γ of the entropy.

        Returns:
            The log joint.

        Raises:
            InputError: as `LogJoint`; on use, if vmap cannot take the function.

        >>> LogJoint.vmapped(lambda theta: -theta @ theta).log_joint(torch.ones(3, 2)).tolist()
        [-2.0, -2.0, -2.0]
        """
        _check_callable(function)
        return cls(_Vmapped(function), temperature)

    @classmethod
    def looped(cls, function: Callable[[Tensor], Tensor], temperature: float = 1.0) -> Self:
        """Make a log joint from a function of one θ, called for one draw after another: slow, and takes any function.

        Args:
            function: the log joint of one θ, (D,) -> ().
            temperature: the weight γ of the entropy.

        Returns:
            The log joint.

        Raises:
            InputError: as `LogJoint`.

        >>> target = LogJoint.looped(lambda theta: -theta @ theta if theta[0] > 0 else theta[0])
        >>> target.log_joint(torch.eye(2)).tolist()
        [-1.0, 0.0]
        """
        _check_callable(function)
        return cls(_Looped(function), temperature)

    def log_joint(self, theta: Tensor) -> Tensor:
        """Call the user's function, and check its result.

        Raises:
            InputError: if the result is no tensor, is complex, or has another shape than (S, *batch).
        """
        value, shape = _real(self.function(theta)).to(theta.dtype), theta.shape[:-1]
        if value.shape != shape:
            one = " If the function is of one theta (D,), wrap it: LogJoint.vmapped(f)." if value.ndim == 0 else ""
            raise InputError(
                f"the log joint must map theta of shape {tuple(theta.shape)} to one value a draw, "
                f"shape {tuple(shape)}; got shape {tuple(value.shape)}. "
                f"Sum over data and coordinates, keep the leading dimensions.{one}"
            )
        return value

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the function depends on are unknown.

        What a function closes over may change, so that only the step after `evaluate` reuses its work.
        """
        return ()


@dataclass(frozen=True)
class _Vmapped:
    """All draws at once: the function sees one θ (D,), its operations see all."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, theta: Tensor) -> Tensor:
        remedy = "Write it for theta of shape (S, D), or use LogJoint.looped(f)."
        values = mapped(lambda one: number(self.function(one)), theta.flatten(0, -2), remedy)
        return values.unflatten(0, theta.shape[:-1])


@dataclass(frozen=True)
class _Looped:
    """One draw after another."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, theta: Tensor) -> Tensor:
        values = [number(self.function(one)) for one in theta.flatten(0, -2)]
        return torch.stack(values).unflatten(0, theta.shape[:-1])


def _check_callable(function: object) -> None:
    read_callable("LogJoint", function, "takes a function of theta", arguments="theta")


def _real(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(f"the log joint must return a tensor; got {type(value).__name__}.")
    if value.is_complex():
        raise InputError(f"the log joint must be real; got {value.dtype}. Return its real part.")
    return value


def mapped(function: Callable[[Tensor], Tensor], draws: Tensor, remedy: str) -> Tensor:
    """Evaluate a function of one draw at all of them by `torch.func.vmap`."""
    try:
        return torch.func.vmap(function)(draws)
    except RuntimeError as error:
        if not any(word in str(error) for word in _WORDS_OF_VMAP):
            raise
        if ".item()" in str(error):
            with suppress(RuntimeError), _unvalidated():
                return torch.func.vmap(function)(draws)
        reason = str(error).split(". ")[0].rstrip(".")
        raise InputError(f"torch.func.vmap cannot take this log joint ({reason}). {remedy}") from error


@contextmanager
def _unvalidated() -> Iterator[None]:
    """Let distributions take any parameters: where one is not valid the message that says so cannot be made by vmap."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def number(value: object) -> Tensor:
    """The result of a function of one θ, which has to be one real number."""
    value = _real(value)
    if value.ndim:
        raise InputError(
            f"the log joint of one theta must be one number, of shape (); got shape {tuple(value.shape)}. "
            "Sum over data and coordinates."
        )
    return value


# A log joint that tells its terms apart: one log likelihood a datum, and a log prior


@final
class PerDatum(SeparableTarget):
    """A log joint whose terms are known one by one, log p(θ) + Σ_n log p(y_n | θ), as `GaussNewton` needs them.

    Args:
        log_likelihoods: the log likelihood of every datum, θ (S, D) -> (S, N).
        log_prior: the log prior, θ (S, D) -> (S,).
        temperature: the weight γ of the entropy, finite and not negative.

    Raises:
        InputError: if something cannot be called; on use, if a result has another shape.

    >>> import torch
    >>> y = torch.tensor([1.0, 2.0])
    >>> target = PerDatum(lambda theta: -0.5 * (y - theta).square(), lambda theta: -0.5 * theta.square().sum(-1))
    >>> target.log_joint(torch.zeros(1, 1)).item()
    -2.5
    """

    def __init__(
        self,
        log_likelihoods: Callable[[Tensor], Tensor],
        log_prior: Callable[[Tensor], Tensor],
        temperature: float = 1.0,
    ) -> None:
        read_callable("log_likelihoods", log_likelihoods, "must be a function of theta", arguments="theta")
        self.log_likelihoods, self.prior = log_likelihoods, LogJoint(log_prior, temperature)
        self.temperature = self.prior.temperature

    def terms(self, theta: Tensor) -> Tensor:
        """Return log p(y_n | θ), (S, N).

        Raises:
            InputError: if the function gives a result of another shape.
        """
        terms = self.log_likelihoods(theta)
        if terms.ndim != 2 or len(terms) != len(theta):
            raise InputError(
                f"log_likelihoods must map theta of shape {tuple(theta.shape)} to (S, N), one value a draw and datum; "
                f"got shape {tuple(terms.shape)}. Do not sum over the data."
            )
        return terms

    def tensors(self) -> tuple[Tensor, ...]:
        """Return no tensors: those that the functions depend on are unknown."""
        return ()


# A warp is a change of the target: what the Gaussian inside a warped posterior approximates


@final
class WarpedTarget(Target):
    """The log joint as a density of x, where θ = m + s w((x - m)/s; φ): that of θ plus γ Σ_i log w'(ξ_i; φ_i).

    What an examination of the base against it finds, k-hat and the ELBO among it, is true of the warped posterior.

    Args:
        target: the log joint of θ.
        q: the warped posterior, which is read at each call.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> target = WarpedTarget(LogJoint(lambda theta: -theta.square().sum(-1)), CholeskyGaussian(1).warped())
    >>> target.log_joint(torch.ones(1, 1)).tolist()  # the identity
    [-1.0]
    """

    def __init__(self, target: Target, q: Warped) -> None:
        read_instance("target", target, Target, "is a model or a LogJoint", other=q)
        read_instance("q", q, Warped, "is a warped posterior, such as CholeskyGaussian(2).warped()", other=target)
        self.target, self.q = target, q
        self.temperature, self.comparable, self.coupled = target.temperature, target.comparable, target.coupled
        self.draws_at_once, self.in_passes, self.batches = target.draws_at_once, target.in_passes, target.batches
        self.processes = target.processes

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute the log joint at the bent points, plus the log volume."""
        bent, log_volume = self.q.bent(theta)
        return self.target.log_joint(bent) + self.temperature * log_volume

    def outward(self, theta: Tensor) -> Tensor:
        """Map points x to the θ that they stand for."""
        return self.q.bent(theta)[0]

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the log joint, if they are known, with those of the warp."""
        inner = self.target.tensors()
        return (*inner, *self.q.state_dict().values()) if inner else ()


def unwarped(q: Any, target: Target) -> tuple[Any, Target]:
    """Take a warped posterior and its target to the Gaussian inside and what that approximates; others stay.

    >>> from torchngvi import CholeskyGaussian, LogJoint
    >>> q, target = unwarped(CholeskyGaussian(1).warped(), LogJoint(lambda theta: -theta.square().sum(-1)))
    >>> type(q).__name__, type(target).__name__
    ('CholeskyGaussian', 'WarpedTarget')
    """
    return (q.base, WarpedTarget(target, q)) if isinstance(q, Warped) else (q, target)


@final
class MixtureIntegrand(Target):
    """The target of the components of a mixture: h = log p/γ - log q, q the whole mixture as it is at the time.

    An optimizer over ``q.components`` with this target takes the natural-gradient step of every component, and minus
    its value is E_k h, of which `Mixture.reweigh_` makes a step of the weights.  `torchngvi.fit` does both; use it for
    a loop of your own.

    Args:
        q: the mixture, which is held.
        target: the log joint; its draws come as (S K, D), those of the components together.

    Raises:
        InputError: a log joint in mini-batches, or of temperature 0; on use, a posterior that is not ``q.components``.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, NaturalGradientVI
    >>> from torchngvi.expectations import Fixed, Stein
    >>> from torchngvi.models import LogJoint
    >>> from torchngvi.posteriors import Mixture
    >>> from torchngvi.rules import LocalExponential
    >>> q = Mixture(CholeskyGaussian(1, (2,), mean=torch.tensor([[-5.0], [5.0]])))
    >>> two = LogJoint(lambda x: torch.logaddexp(-(x + 4).square(), 1.0986123 - (x - 4).square()).sum(-1))
    >>> opt = NaturalGradientVI(q.components, LocalExponential(), lr=1.0, estimator=Stein(Fixed(64)))
    >>> for _ in range(5):
    ...     gains = -opt.evaluate(MixtureIntegrand(q, two)).loss
    ...     loss, rho = opt.step(MixtureIntegrand(q, two)), q.reweigh_(gains)
    >>> q.components.mean.flatten().round(decimals=3).tolist(), q.weights.round(decimals=3).tolist()
    ([-4.0, 4.0], [0.25, 0.75])
    """

    temperature = 0.0
    comparable = False  # E_k h is no function whose derivative is (a, P): q is in h
    coupled = True

    def __init__(self, q: Mixture, target: Target) -> None:
        read_instance("q", q, Mixture, "is a mixture, such as Mixture(CholeskyGaussian(2, (3,)))", other=target)
        read_instance("target", target, Target, "is a model or a LogJoint", other=q)
        if not target.comparable or target.in_passes:
            raise InputError(
                f"a mixture is fitted to one log joint over fixed draws, and {type(target).__name__} is another at "
                "each call, as mini-batches are. Give it all data at once."
            )
        if not target.temperature > 0:
            raise InputError(
                "a mixture at temperature 0 has no entropy, and collapses on a mode; use a temperature above 0."
            )
        self.q, self.target = q, target
        self.draws_at_once = max(1, target.draws_at_once // len(q))

    def log_joint(self, theta: Tensor) -> Tensor:
        """Compute h at draws of each component, (*sample, K), differentiable in θ."""
        flat = theta.flatten(0, -2)
        h = self.target.log_joint(flat) / self.target.temperature - self.q.log_prob(flat)
        return h.unflatten(0, theta.shape[:-1])

    def check(self, q: Posterior) -> None:
        """Check that it is the components that are evaluated.

        Raises:
            InputError: another posterior.
        """
        if q is not self.q.components:
            raise InputError(
                "a MixtureIntegrand is the target of the components of its own mixture: build the optimizer over "
                "q.components."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the weights, the components and the tensors of the log joint; none where those are not known."""
        known = self.target.tensors()
        return (*known, self.q.log_weights, *self.q.components.coordinates) if known else ()

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the log joint."""
        return (self.target.temperature, *self.target.settings())

    def known_data(self) -> tuple[Tensor, ...]:
        """Return the tensors that tell the problem of the log joint from another."""
        return self.target.known_data()


# ------------------------------------------------------------------------------------ what a user may hand in


def kind_of(value: object) -> str:
    """The class of an object, or which class it is, as messages say it."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def read_posterior(door: str, q: Any, target: object = None) -> Posterior:
    """Check that what stands in the place of a posterior is one.

    >>> read_posterior("fit", 3)
    Traceback (most recent call last):
    torchngvi.errors.InputError: fit takes a posterior first, such as CholeskyGaussian(dim), then the model or log \
    joint; got int first.
    """
    if isinstance(q, type):
        raise InputError(f"{door} takes a posterior; got the class {q.__name__}. Make one of it: {q.__name__}(dim).")
    if not isinstance(q, Posterior):
        swapped = " The arguments are swapped." if isinstance(target, Posterior) else ""
        inside = " Pass its posterior." if isinstance(getattr(q, "posterior", None), Posterior) else ""
        raise InputError(
            f"{door} takes a posterior first, such as CholeskyGaussian(dim), then the model or log joint; got "
            f"{type(q).__name__} first.{swapped}{inside}"
        )
    return q


def read_gaussian(door: str, q: Any, target: object = None) -> Gaussian:
    """Check that what stands in the place of a Gaussian posterior is one."""
    q = read_posterior(door, q, target)
    if not isinstance(q, Gaussian):
        raise PairError(f"{door} needs a Gaussian posterior, such as CholeskyGaussian(dim); got {type(q).__name__}.")
    return q


def as_target(source: Any) -> Target:
    """Make a target of what a user gives: a target stays as it is, and a function of theta becomes a `LogJoint`."""
    if isinstance(source, Target):
        return source
    if isinstance(source, Posterior | type):
        raise InputError(
            f"a model or a log joint of theta is needed; got {kind_of(source)}. A posterior comes first, then the "
            "target."
        )
    target = classify(source)
    if not isinstance(target, Target):
        raise InputError("this needs a model or a log joint of theta; got a function without arguments.")
    return target


def classify(function: Any) -> Target | Callable[[], Tensor]:
    """Make a `LogJoint` of a function that needs its one argument; a closure, which can take none, stays."""
    if not callable(function) or isinstance(function, Posterior | type):
        raise InputError(
            f"step takes a model, a log joint of theta, or a closure that returns the loss; got {kind_of(function)}."
            + " Call its own fit()." * hasattr(function, "fit")
        )

    def binds(*arguments: object) -> bool:
        try:
            inspect.signature(function).bind(*arguments)
        except (TypeError, ValueError):
            return False
        return True

    without, with_one = binds(), binds(None)
    if not without and not with_one:
        raise InputError(
            "step calls a log joint with theta alone, or a closure with nothing; this callable needs other arguments. "
            "Bind them: functools.partial(f, ...), or a lambda."
        )
    if with_one and not without:
        return LogJoint(function)
    if without and not with_one:
        return function
    raise InputError(
        "step cannot tell whether this callable is a log joint of theta (which goes up) or a closure that returns "
        "the loss (which goes down). Wrap it: LogJoint(f), or lambda: f()."
    )


class FullPrecision:
    """A context that switches autocast off around a step, so that no factorisation is in half precision."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.active = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)

    def _autocast(self, enabled: bool) -> AbstractContextManager[Any]:
        if not self.active:
            return nullcontext()
        return torch.autocast(self.device_type, torch.get_autocast_dtype(self.device_type), enabled)

    def __enter__(self) -> "FullPrecision":
        self.context = self._autocast(False)
        self.context.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.context.__exit__(*exception)

    def restored(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Wrap a closure so that it runs under the autocast that its author meant."""

        def run() -> Tensor:
            with self._autocast(True):
                return closure()

        return run
