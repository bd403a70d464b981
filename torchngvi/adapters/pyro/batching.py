"""Many θ at once: the ways in which the log joint of a Pyro model is evaluated for a batch, and which of them is right.

All draws are evaluated in one run of the model, their dimension on the left of those of its plates, if the model
broadcasts over it; else one θ at a time under `torch.func.vmap`; else so with every tensor that the model makes one
of each draw, into which it may write; else one after another.  Which of them is right is not assumed but tried, at
three points, against the last.  Discrete sites that are marked for parallel enumeration are summed out in each.
"""

import functools
import string
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import pyro
import torch
from pyro.ops import packed
from pyro.ops.contract import contract_to_tensor
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchngvi.adapters.pyro.layout import is_enumerated, random_sites
from torchngvi.errors import InputError

Batched = Callable[[Tensor], Tensor]  # (S, D) -> (S,)

_PLATE = "_torchngvi_draws"
_MAKERS = ("zeros", "empty", "ones", "full", "clone")  # of tensors that a model may write into


class Largest(TorchDispatchMode):
    """A context that counts the numbers of the largest floating tensor that is made in it, 1 at least."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what it makes; a view is not made."""
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point() and not func.is_view:
            self.numbers = max(self.numbers, made.numel())
        return made


def draws_at_once(largest: int, like: Tensor, most: int, cached: int = 2**21, fewest: int = 16) -> int:
    """The number of draws in one call of a log joint, so that its largest tensors stay in the cache of a CPU."""
    # cached: bytes of the largest tensor of a call on a CPU: beyond its cache a draw takes two to three times as long
    # fewest: draws of a call, or what Pyro takes for each run shows
    if like.device.type != "cpu":
        return most
    return min(max(cached // (largest * like.element_size()), fewest), most)


def by_broadcasting(runs: Any, theta: Tensor) -> Tensor:
    """All draws in one run, the dimension of draws on the left of those of the plates."""
    if runs.enumerates:
        return _by_plate(runs, theta)
    count = len(theta)
    values, log_jacobian = runs.layout.constrained(theta, runs.nesting)
    terms = [log_jacobian[:, None]]
    for log_prob in runs.scored(values):
        if log_prob.ndim <= runs.nesting:  # it does not depend on θ
            log_prob = log_prob.sum().expand(count)
        terms.append(log_prob.reshape(count, -1))
    return torch.cat(terms, -1).sum(-1)


def _by_plate(runs: Any, theta: Tensor) -> Tensor:
    """The same in an outermost plate, which Pyro's contraction of enumerated sites asks for."""
    count = len(theta)
    if count == 1:  # the packing of factors drops dimensions of size one
        return by_loop(runs, theta)
    values, log_jacobian = runs.layout.constrained(theta, runs.nesting)
    with pyro.validation_enabled(False):
        plate = pyro.plate(_PLATE, count, dim=-1 - runs.nesting)
    trace = runs.trace(values, plate)
    return log_jacobian + Factors.of(trace).sum_out(frozenset(trace.plate_to_symbol[_PLATE]))


def by_vmap(runs: Any, theta: Tensor, within: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext) -> Tensor:
    """One θ at a time under `torch.func.vmap`, each ``within`` a context of its own."""
    seen: list[Factors] = []

    def one(each: Tensor) -> Tensor:
        with within(each):
            return runs.one(each)

    def factors(each: Tensor) -> tuple[Tensor, list[Tensor]]:
        values, log_jacobian = runs.layout.constrained(each)
        with within(each):
            seen.append(Factors.of(runs.trace(values)))
        return log_jacobian, [factor.log_prob for factor in seen[-1].factors]

    if not runs.enumerates:
        return torch.func.vmap(one, randomness="same")(theta)
    # vmap cannot take Pyro's contraction, which is made for all draws, as of one plate
    log_jacobian, log_probs = torch.func.vmap(factors, randomness="same")(theta)
    return log_jacobian + seen[-1].for_all_draws(log_probs)


def by_vmap_in_place(runs: Any, theta: Tensor) -> Tensor:
    """The same for models that write into tensors which they make, such as OrderedLogistic and loops over time."""
    return by_vmap(runs, theta, _ForEachDraw)


def by_loop(runs: Any, theta: Tensor) -> Tensor:
    """One θ after another."""
    return torch.stack([runs.one(each) for each in theta.unbind()])


class _ForEachDraw(TorchFunctionMode):
    """New tensors are those of each draw, so that what depends on the draw can be written into them."""

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.zero = torch.zeros_like(theta[0])

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").removeprefix("new_").removesuffix("_like")
        return made + self.zero.to(made.dtype) if name in _MAKERS and made.is_floating_point() else made


def points_about(theta: Tensor, generator: torch.Generator, count: int = 3, spread: float = 0.1) -> Tensor:
    """Draw the points (count, D) about a start (D,) at which the ways are compared."""
    return theta + spread * torch.randn(count, len(theta), generator=generator, dtype=torch.float64).to(theta)


def best_way(runs: Any, points: Tensor) -> tuple[str, Batched]:
    """The first way that agrees with the loop, in value and gradient, at `points_about` a start."""
    reasons: list[str] = []
    loop = functools.partial(by_loop, runs)
    try:
        truth = _derivative(loop, points)
    except RuntimeError as error:
        with torch.no_grad():
            loop(points)  # an error that is not of the derivative says itself
        raise InputError(
            "the log density of the model has no derivative by its latents "
            f"({str(error).splitlines()[0].partition('. ')[0].rstrip('.')}): a guide that follows gradients cannot fit "
            "it. Compute it in torch from the latents on, without .item(), .numpy() and .detach(), or draw by "
            "importance or SMC."
        ) from error
    for name, function in (("plate", by_broadcasting), ("vmap", by_vmap), ("vmap", by_vmap_in_place)):
        way = functools.partial(function, runs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                answers = [_derivative(way, points), _derivative(way, points[:2])]
        except Exception as error:  # whatever a model does that was not written for a batch
            reasons.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if all(_agree(answer, truth) for answer in answers):
            return name, way
        reasons.append("other values")
    _check_slope(loop, points, truth)
    warnings.warn(
        "the model is run for one draw after another, which is slow: it does not broadcast over draws "
        f"({reasons[0]}), and torch.func.vmap cannot take it ({reasons[1]}).",
        stacklevel=5,
    )
    return "loop", loop


@torch.no_grad()
def _check_slope(way: Batched, points: Tensor, truth: tuple[Tensor, Tensor]) -> None:
    """The values may not change otherwise than the derivative says, at all points: what .item() reads has no slope."""
    values, eps = truth[0], torch.finfo(truth[0].dtype).eps
    if not torch.equal(way(points).to(values), values):
        return  # a model that draws
    direction = torch.randn(points.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(points)
    h = eps ** (1 / 3)
    changes = (way(points + h * direction).to(values) - way(points - h * direction).to(values)) / (2 * h)
    slopes = truth[1] @ direction
    noise = 100 * eps * values.abs() / h
    if bool(((changes - slopes).abs() > 0.5 * torch.maximum(changes.abs(), slopes.abs()) + noise).all()):
        raise InputError(
            "the log density of the model has another derivative by its latents than its values have: along one "
            f"direction they change at a rate of {float(changes[0]):.3g} where it is {float(slopes[0]):.3g}. "
            "Compute it in torch from the latents on, without .item(), .numpy() and .detach()."
        )


def _agree(answer: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> bool:
    """Up to rounding: gradients through an ill-conditioned factorisation lose most digits, values few."""
    eps, (values, gradients), count = torch.finfo(truth[0].dtype).eps, truth, len(answer[0])
    largest = float(gradients.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(1.0))
    close = torch.allclose(answer[0], values[:count], rtol=eps**0.6, atol=eps**0.6, equal_nan=True)
    return close and torch.allclose(answer[1], gradients[:count], rtol=0, atol=eps ** (1 / 3) * largest, equal_nan=True)


def _derivative(way: Batched, points: Tensor) -> tuple[Tensor, Tensor]:
    """The values and gradients of the log joint at some points, by one of the ways."""
    with torch.enable_grad():
        leaf = points.clone().requires_grad_()
        values = way(leaf).to(leaf.dtype)
        if values.shape != points.shape[:1]:
            raise ValueError
        (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True)
    return values.detach(), torch.zeros_like(points) if gradient is None else gradient


# -------------------------------------------------------------------------------- enumerated sites


class Enumerated(EnumMessenger):
    """Pyro's messenger of parallel enumeration, without reading the ``data`` of a value, which vmap forbids."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) or msg["value"] is None:
            return
        value, dims = msg["value"], msg["infer"].setdefault("_dim_to_id", {})
        shape = value.shape[: value.ndim - msg["fn"].event_dim]
        dims.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {d: i for d, i in dims.items() if len(shape) >= -d and shape[d] > 1}


class Factor(NamedTuple):
    """The log probability of one site, or of one site for all draws."""

    plates: frozenset[str]
    dims: str  # a letter for each of its dimensions
    log_prob: Tensor


@dataclass
class Factors:
    """A trace with enumerated sites as a product of factors, with the letters of the dimensions to sum out."""

    factors: list[Factor]
    summed: frozenset[str]
    scale: Any

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """The factors of a trace."""
        trace.pack_tensors()
        summed = frozenset(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        factors, scales = [], []
        for site in random_sites(trace):
            parts: Any = site["packed"]
            log_prob = parts["log_prob"]
            if not summed.isdisjoint(log_prob._pyro_dims):
                scales.append(site["scale"])
                mask = None if is_enumerated(site) else parts["mask"]
                log_prob = packed.scale_and_mask(parts["unscaled_log_prob"], mask=mask)
            frames = [frame for frame in site["cond_indep_stack"] if frame.vectorized]
            plates = frozenset(trace.plate_to_symbol[frame.name] for frame in frames)
            factors.append(Factor(plates, log_prob._pyro_dims, log_prob))
        return cls(_of_one_dtype(factors), summed, _common(scales))

    def for_all_draws(self, log_probs: list[Tensor]) -> Tensor:
        """The sum for each draw, where the draws are in front of the log probabilities and count as one more plate."""
        known = "".join(factor.dims for factor in self.factors)
        draw = next(letter for letter in string.ascii_letters if letter not in known)
        factors = []
        for (plates, dims, _), log_prob in zip(self.factors, log_probs, strict=True):
            log_prob._pyro_dims = draw + dims  # type: ignore[attr-defined]
            factors.append(Factor(plates | {draw}, draw + dims, log_prob))
        return Factors(factors, self.summed, self.scale).sum_out(frozenset(draw))

    def sum_out(self, draws: frozenset[str]) -> Tensor:
        """Sum out the enumerated dimensions, and add up over plates but that of the draws."""
        inside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        outside: OrderedDict[frozenset, list[Tensor]] = OrderedDict()
        for plates, dims, log_prob in self.factors:
            (outside if self.summed.isdisjoint(dims) else inside).setdefault(plates, []).append(log_prob)
        total = contract_to_tensor(outside, set(), target_ordinal=draws) if outside else 0.0
        if not inside:
            return torch.as_tensor(total)
        return self.scale * contract_to_tensor(inside, set(self.summed), target_ordinal=draws) + total


def _of_one_dtype(factors: list[Factor]) -> list[Factor]:
    """The factors in their widest dtype; Pyro gives the density of a Delta in the default one, whatever its value."""
    dtype = functools.reduce(torch.promote_types, (factor.log_prob.dtype for factor in factors))
    cast = [factor._replace(log_prob=factor.log_prob.to(dtype)) for factor in factors]
    for factor in cast:
        factor.log_prob._pyro_dims = factor.dims  # type: ignore[attr-defined]
    return cast


def _common(scales: list[Any]) -> Any:
    """The one scale of all sites that hang together with enumerated ones."""
    if any(isinstance(scale, Tensor) and scale.ndim for scale in scales) or len({float(scale) for scale in scales}) > 1:
        raise InputError(
            "all sites that depend on an enumerated one must have the same scale, one number, since it multiplies the "
            "log of their sum: subsample them by the same plate, or give poutine.scale to all of them."
        )
    return scales[0] if scales else 1.0  # where no enumerated site has more than one value
