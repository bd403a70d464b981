"""What training reads of a model of GPyTorch: its data in batches, its kernels, a q of this library in it for a while.

K_ZZ = L Lᵀ is factored once for as long as its entries do not change; the rows of a batch are a_n = L⁻¹ k(Z, x_n), as
in `sparse_gp`.  The full Gaussians of GPyTorch hold the same q in other coordinates; the unwhitened strategy holds it
for u = μ_Z + L v in the place of v.  The model is given back as it was, with the q that was found.  GPyTorch's modules
keep values of an older q or kernel in eval mode, until a call of the model, which direct steps do without.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, Likelihood
from gpytorch.models import ApproximateGP
from gpytorch.settings import _linalg_dtype_cholesky
from gpytorch.variational import UnwhitenedVariationalStrategy, VariationalStrategy
from linear_operator.operators import CholLinearOperator, TriangularLinearOperator
from linear_operator.utils.errors import NanError, NotPSDError
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset, default_collate

from torchngvi.adapters.gpytorch.distribution import (
    FULL,
    NaturalGradientVariationalDistribution,
    base_strategy,
    moments_of,
)
from torchngvi.adapters.gpytorch.energies import Latents
from torchngvi.arguments import read_instance, shown
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, Sites
from torchngvi.numerics.arrays import Versions
from torchngvi.numerics.linalg import cholesky, gram, triangular_gram, triangular_rows

_OF_ONE_TASK = (
    "For rows of one task each take a model of one function with the number of the task among the inputs, and a kernel "
    "such as RBFKernel(active_dims=[0]) * IndexKernel(num_tasks=3, active_dims=[1])."
)
Batch = tuple[Tensor, Tensor]  # x (*batch, B, features), y (*batch, B), or (B, tasks)


def count(x: Tensor) -> int:
    """The number of rows B of a batch of inputs, (*batch, B, features) or (B,)."""
    return x.shape[-1 if x.ndim == 1 else -2]


def check_num_data(num_data: float, rows: int) -> None:
    """Check that a batch has no more rows than all of the data."""
    if rows > num_data:
        raise InputError(
            f"num_data counts the rows of the whole data, and is {num_data:g} where one batch has {rows} rows: the KL "
            f"divergence would weigh {rows / num_data:.3g} times as much as it should, or more. Give "
            "len(train_x), and not the number of batches."
        )


def row_dimension(y: Tensor, latents: Latents) -> int:
    """The dimension of the targets that runs over the rows."""
    return -2 if latents.coupled and y.ndim > 1 else -1


def pairs(batches: Iterable[Any], latents: Latents) -> Iterator[Batch]:
    """The batches one after another, each checked against the model before it is used."""
    features = latents.strategy.inducing_points.shape[-1]
    if isinstance(batches, str | bytes | type) or not hasattr(batches, "__iter__") or getattr(batches, "ndim", 1) == 0:
        raise InputError(f"batches is a DataLoader or a list of pairs (x, y) of tensors; got {shown(batches)}.")
    for batch in batches:
        parts = batch if isinstance(batch, tuple | list) else (batch,)
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            what = ", ".join(type(part).__name__ for part in parts)
            arrays = "torch.as_tensor(x) and torch.as_tensor(y) of arrays, " * any(
                _is_array(part) and not isinstance(part, Tensor) for part in parts
            )
            raise InputError(
                f"batches are pairs (x, y) of tensors; got {what}. Give {arrays}a DataLoader over TensorDataset(x, y), "
                f"or [(x, y)] for all data at once. {_OF_ONE_TASK if latents.coupled else ''}".rstrip()
            )
        x, y = (part.detach() if part.requires_grad else part for part in parts)
        if x.ndim == 0 or count(x) == 0:
            raise InputError(
                f"a batch has inputs of shape {tuple(x.shape)}, which are no rows: give x as (rows, features)."
            )
        if x.ndim > 1 and x.shape[-1] != features or x.ndim == 1 and features != 1:
            raise InputError(
                f"the inducing points have {features} features; got inputs of shape {tuple(x.shape)}. "
                "Give x as (rows, features)."
            )
        own = latents.strategy.inducing_points.dtype
        if x.is_floating_point() and torch.promote_types(x.dtype, own) != own:
            raise InputError(
                f"the inputs are in {x.dtype} and the model is in {own}: call model.double() and "
                "likelihood.double(), or give the data in the dtype of the model."
            )
        if y.ndim == 0 or y.shape[row_dimension(y, latents)] != count(x):
            column = " Give y[:, 0] for y." if y.shape == (count(x), 1) else ""
            raise InputError(
                f"a batch has {count(x)} rows of inputs and targets of shape {tuple(y.shape)}: check the shape of the "
                f"targets, (rows,) of one value a datum and (rows, tasks) of several.{column}"
            )
        if latents.each and y.shape[1:] != (latents.count,):
            raise InputError(
                f"the model gives {latents.count} values a datum, with a target for each, (rows, {latents.count}); got "
                f"targets of shape {tuple(y.shape)}. {_OF_ONE_TASK if y.ndim == 1 else ''}".rstrip()
            )
        if latents.one_noise:
            raise PairError(
                f"the likelihood has the noise of one value a datum, and the model gives {latents.count}. Give "
                f"MultitaskGaussianLikelihood(num_tasks={latents.count})."
            )
        if latents.labels and y.ndim > 1:
            raise InputError(
                f"a softmax takes one label a datum, (rows,); got targets of shape {tuple(y.shape)}. Give "
                f"{'y[:, 0]' if y.shape[1:] == (1,) else 'y.argmax(-1) for one-hot rows y'}."
            )
        yield x, y


def _is_array(part: Any) -> bool:
    """Whether something is a tensor, or what NumPy and pandas hold."""
    return hasattr(part, "__array__")


def all_rows(data: Any, latents: Latents) -> Batch:
    """All rows of the data at once."""
    if isinstance(data, DataLoader):
        data = _all_tensors(data) or data
    if type(data) is TensorDataset:
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_array, data)):
        data = [tuple(data)]
    given = [(x[:, None] if x.ndim == 1 else x, y) for x, y in pairs(data, latents)]
    if not given:
        raise InputError("train_svgp got no data: the batches are empty. Give one pair (x, y), or a list of pairs.")
    row = row_dimension(given[0][1], latents)
    return torch.cat([x for x, _ in given], -2), torch.cat([y for _, y in given], row)


def check_call(model: Any, likelihood: Likelihood, data: Any) -> None:
    """Check that the model and the likelihood are such, and that rows with a noise of their own come in their order."""
    read_instance("model", model, torch.nn.Module, "is a model of GPyTorch, such as an ApproximateGP", other=likelihood)
    if isinstance(likelihood, type):
        raise PairError(f"the likelihood is the class {likelihood.__name__}. Call it, and pass what it makes.")
    if not hasattr(likelihood, "expected_log_prob"):
        instead = (
            "mll.likelihood in the place of mll" if hasattr(likelihood, "likelihood") else "one of gpytorch.likelihoods"
        )
        raise PairError(
            "the call takes the model, its likelihood and the data; got "
            f"{type(likelihood).__name__} as the likelihood. Give {instead}."
        )
    if not isinstance(likelihood, FixedNoiseGaussianLikelihood) or not isinstance(data, DataLoader):
        return
    sampler = _sampler(data)
    if sampler is not None and not isinstance(sampler, SequentialSampler):
        raise InputError(
            "FixedNoiseGaussianLikelihood holds a noise for each row in their order, and the DataLoader gives the rows "
            f"in that of a {type(sampler).__name__}. Build it with shuffle=False, or give one pair (x, y)."
        )


def _sampler(loader: DataLoader) -> Any:
    """What draws the rows of a loader, within its batches if it makes them itself."""
    batches = loader.batch_sampler
    return batches.sampler if type(batches) is BatchSampler else batches or loader.sampler


def _all_tensors(loader: DataLoader) -> tuple[Tensor, ...] | None:
    """The two tensors of a loader that gives each row of them once, as it is; None of any other."""
    dataset, sampler = loader.dataset, _sampler(loader)
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2 or loader.collate_fn is not default_collate:
        return None
    every = isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    return dataset.tensors if every or type(sampler) is SequentialSampler else None


class Kernels(NamedTuple):
    """The prior of a batch beside the inducing values, differentiable in the hyper-parameters."""

    factor: Tensor  # L, (*batch, M, M), float64
    cross: Tensor  # k(Z, x_n), (*batch, M, B)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter, (*batch, B)

    @torch.no_grad()
    def projection(self, dtype: torch.dtype) -> "Projection":
        """The rows a_n = L⁻¹ k(Z, x_n) with the prior moments that they leave, without a graph."""
        # from the right, where the transposed view is in the order that LAPACK takes without a copy
        cross = self.cross.to(dtype).mT
        rows = torch.linalg.solve_triangular(self.factor.to(dtype).mT, cross, upper=True, left=False)
        return Projection(rows, self.mean.to(dtype), self.variance.to(dtype) - rows.square().sum(-1))

    @torch.no_grad()
    def pulled(self, sites: Sites, H: Tensor, frame: Frame, slack: Tensor | None = None) -> "Kernels":
        """∂E_q[ℓ] of the data part, from H = Σ β_n a_n a_nᵀ, which the step of q has formed already.

        With P = L⁻ᵀ(S - I) and w = L⁻ᵀm: for k(Z, x_n) it is w α_n + P β_n a_n, for L the lower part of
        -w (Σ α_n a_n)ᵀ - P H.  A bound whose slope in d_n is ½(β_n - κ_n) adds L⁻ᵀκ_n a_n and -L⁻ᵀ Σ κ_n a_n a_nᵀ.
        """
        S, dtype = covariance(frame), self.factor.dtype
        S.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        mean, weighted = frame.mean[..., None, :], sites.rows * sites.beta[..., None]
        first = sites.alpha[..., None, :] @ sites.rows
        if slack is not None:  # all of it before one substitution, from the right as in `projection`
            inner = (weighted @ S).addcmul_(sites.rows, slack[..., None]).addcmul_(sites.alpha[..., None], mean)
            total = (H @ S + gram(sites.rows, slack)).addcmul_(first.mT, mean)
            cross, factor = (
                torch.linalg.solve_triangular(self.factor, part.to(dtype), upper=False, left=False).to(S.dtype).mT
                for part in (inner, total)
            )
            return Kernels(-factor.tril(), cross, sites.alpha, 0.5 * (sites.beta - slack))
        both = torch.linalg.solve_triangular(self.factor.mT, torch.cat([mean.mT, S], -1).to(dtype), upper=True)
        w, P = both[..., :1].to(S.dtype), both[..., 1:].to(S.dtype)
        cross = torch.addcmul(P @ weighted.mT, w, sites.alpha[..., None, :])
        return Kernels(-(P @ H + w * first).tril(), cross, sites.alpha, 0.5 * sites.beta)


class Projection(NamedTuple):
    """The linear map from whitened inducing values v to the values of a batch, and their variance given v."""

    rows: Tensor  # a_n, (*batch, B, M)
    mean: Tensor  # μ(x_n), (*batch, B)
    variance: Tensor  # k(x_n, x_n) + jitter - |a_n|², (*batch, B)

    def part(self, rows: slice) -> "Projection":
        """The projection of some of the rows."""
        return Projection(self.rows[..., rows, :], self.mean[..., rows], self.variance[..., rows])

    def moments(self, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
        """The moments of the latent values under q."""
        projected = triangular_rows(self.rows, frame.root, frame.upper) if _full(frame) else frame.rows(self.rows)
        mean = self.mean + (self.rows @ frame.mean[..., None])[..., 0]
        return mean, self.variance + projected.square().sum(-1), projected


def covariance(frame: Frame) -> Tensor:
    """The covariance S of q, written out."""
    if _full(frame):
        return triangular_gram(frame.root, frame.upper)
    return frame.structure.full(frame.marginals())


def _full(frame: Frame) -> bool:
    """Whether the root has all entries of a triangle."""
    return frame.structure.widest == frame.mean.shape[-1]


@contextlib.contextmanager
def evaluated() -> Iterator[None]:
    """A block in which kernels are evaluated, of which GPyTorch factors some on the way; also a decorator."""
    try:
        yield
    except (NanError, NotPSDError, torch.linalg.LinAlgError) as error:
        if _is_dense(error):
            raise InputError(
                "forward gives MultivariateNormal its kernel matrix as a dense tensor, which torch factors without "
                "jitter, and it is not positive definite to rounding. Give the lazy matrix, self.covar_module(x) "
                "without to_dense() or evaluate(), or linear_operator.to_linear_operator(K) of a dense K."
            ) from error
        raise InputError(
            "GPyTorch cannot factor the kernel matrix, as it does to evaluate a sum with a linear kernel: it is not "
            "finite, or not positive definite to rounding. Check the inputs, the inducing points and the "
            "hyper-parameters for NaN, infinities and length scales of zero, or use float64."
        ) from error


def _is_dense(error: BaseException) -> bool:
    """Whether an error was raised where torch's own MultivariateNormal factors a covariance that is a tensor."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch.distributions.multivariate_normal" for frame, _ in frames)


@evaluated()
def kernels(strategy: VariationalStrategy, x: Tensor, factor: Tensor | None = None) -> Kernels:
    """Evaluate mean and kernel for a batch (*batch, B, features) and the inducing points, whose L may be known."""
    Z = strategy.inducing_points
    if x.ndim == 1:
        x = x[:, None]
    if Z.shape[:-2] != x.shape[:-2]:
        x, Z = strategy._expand_inputs(x, Z)
    size, jitter = Z.shape[-2], strategy.jitter_val
    joint = strategy.model.forward(torch.cat([Z, x], -2))
    covariance = joint.lazy_covariance_matrix
    if factor is None:
        factor = _factor_of(strategy, covariance[..., :size, :size].add_jitter(jitter).to_dense())
    variance = covariance[..., size:, size:].diagonal(dim1=-1, dim2=-2) + jitter
    return Kernels(factor, covariance[..., :size, size:].to_dense(), joint.mean[..., size:], variance)


# of each strategy K_ZZ and its factor, with the count of writes to that
_kept: WeakKeyDictionary[VariationalStrategy, tuple[Tensor, Tensor, Versions]] = WeakKeyDictionary()


def _factor_of(strategy: VariationalStrategy, covariance: Tensor) -> Tensor:
    """L of K_ZZ, which is kept while K_ZZ has the same entries."""
    if covariance.requires_grad or covariance.device.type != "cpu":  # where to compare would wait for the device
        return _factor(covariance)
    if strategy in _kept:
        before, factor, writes = _kept[strategy]
        alike = (before.dtype, factor.dtype) == (covariance.dtype, _linalg_dtype_cholesky.value())
        if alike and writes.hold([factor], contents=False) and torch.equal(before, covariance):
            return factor
    with torch.inference_mode(False):
        covariance = covariance.clone()  # a kernel may return a tensor that it writes to later
        factor = _factor(covariance)
    _kept[strategy] = covariance, factor, Versions([factor])
    return factor


def _factor(covariance: Tensor) -> Tensor:
    """L with K_ZZ = L Lᵀ, in float64 whatever the model's dtype, without the further jitter that GPyTorch would try."""
    L, info = torch.linalg.cholesky_ex(covariance.to(_linalg_dtype_cholesky.value()))
    # a NaN or an infinity anywhere reaches the diagonal
    if L.device.type == "cpu" and not bool((info == 0).all() & L.diagonal(dim1=-2, dim2=-1).isfinite().all()):
        if not bool(covariance.isfinite().all()):
            raise InputError(
                "K_ZZ is not finite: check the inputs, the inducing points and the hyper-parameters for NaN and "
                "infinities."
            )
        raise InputError(
            "K_ZZ is not positive definite: inducing points coincide, or the jitter is too small for this dtype, as if "
            "inputs hold many periods. Raise jitter_val of the strategy, or use float64."
        )
    return L


# -------------------------------------------------------------------------------- a q of this library for a while


def forget(model: torch.nn.Module) -> None:
    """Clear what strategies and kernels keep, so that the next prediction sees q and the kernels as they are."""
    for module in model.modules():
        if isinstance(module, gpytorch.Module):
            module._clear_cache()


def as_in_predictions(model: torch.nn.Module) -> None:
    """Put the layers of a network within a model in eval mode: without dropout, with the statistics that were kept."""
    for module in model.modules():
        if type(module).__module__.startswith("torch.nn."):
            module.eval()


@contextlib.contextmanager
def kept_modes(*owners: torch.nn.Module) -> Iterator[None]:
    """A block in which models may be evaluated, in any mode."""
    modes = [(module, module.training) for owner in owners for module in owner.modules()]
    for owner in owners:
        forget(owner)
    try:
        yield
    finally:
        for module, training in modes:  # a module before its parts, whose own mode comes last
            module.train(training)
        for owner in owners:
            forget(owner)


def unwrapped(model: Any, likelihood: Any, data: Any) -> tuple[Any, Any, Any]:
    """The model of GPyTorch within one of BoTorch, with its likelihood, and rows as its transforms give them."""
    inner = getattr(model, "model", None)
    if isinstance(model, ApproximateGP) or not isinstance(inner, ApproximateGP):
        if likelihood is None or data is None:
            raise InputError(
                "train_svgp takes a model, a likelihood and data: write train_svgp(model, likelihood, (x, y))."
            )
        return model, likelihood, data
    if data is not None:
        if not isinstance(data, tuple | list) or len(data) != 2:
            raise InputError("the rows for a model of BoTorch are one pair: write train_svgp(model, data=(x, y)).")
        with kept_modes(model):
            x, y = model.eval().transform_inputs(data[0]), data[1].reshape(len(data[0]), -1)
            y = model.outcome_transform(y)[0] if hasattr(model, "outcome_transform") else y
    elif getattr(inner, "train_targets", None) is None:
        raise InputError(f"the {type(model).__name__} was built without train_Y: call train_svgp(model, data=(x, y)).")
    else:
        x, y = inner.train_inputs[0], inner.train_targets
    return inner, likelihood or model.likelihood, (x, y.squeeze(-1) if y.ndim > 1 else y)


@contextlib.contextmanager
def lent_posterior(model: ApproximateGP) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """A block in which the model has a q of this library in the place of its own, which takes over what was found."""
    outer: Any = getattr(model, "variational_strategy", None)
    strategy = base_strategy(model)
    own: Any = getattr(strategy, "_variational_distribution", None)
    whitened = type(strategy) is not UnwhitenedVariationalStrategy
    # a class of the user's that holds another q, or uses it in another way, has a method of its own
    theirs = isinstance(own, FULL) and type(own).forward in {kind.forward for kind in FULL}
    ours = isinstance(own, NaturalGradientVariationalDistribution) and not whitened
    ours = ours and own.posterior.framed and own.posterior.structure.widest > 1  # a full Gaussian
    if not (theirs or ours) or (whitened and not isinstance(strategy, VariationalStrategy)):
        yield contextlib.nullcontext
        return
    lent = NaturalGradientVariationalDistribution(own.num_inducing_points, own.batch_shape, mean_init_std=0.0)
    lent.to(dtype=own.dtype, device=own.device)
    begun = strategy.variational_params_initialized
    holder, name = (model, "variational_strategy") if outer is strategy else (outer, "base_variational_strategy")
    stand_in, unwhitened = strategy, None
    if not whitened:  # the whitened strategy over the same inducing points
        learn = isinstance(strategy.inducing_points, torch.nn.Parameter)
        Z = strategy.inducing_points.detach()
        stand_in = unwhitened = VariationalStrategy(model, Z, lent, learn, strategy.jitter_val)
        stand_in.inducing_points = strategy.inducing_points
        stand_in.variational_params_initialized.copy_(begun)
        stand_in.train(strategy.training)
    if bool(begun):
        _give(own, lent, unwhitened)

    def lend() -> None:
        stand_in._variational_distribution = lent
        setattr(holder, name, stand_in)
        forget(model)

    def give_back() -> None:
        setattr(holder, name, strategy)
        strategy._variational_distribution = own
        strategy.train(stand_in.training)
        begun.copy_(stand_in.variational_params_initialized)
        if bool(begun):
            _take(own, lent, unwhitened)
        forget(model)

    @contextlib.contextmanager
    def returned() -> Iterator[None]:
        give_back()
        try:
            yield
        finally:
            lend()

    lend()
    try:
        yield returned
    finally:
        give_back()


@torch.no_grad()
def _prior(strategy: VariationalStrategy) -> tuple[Tensor, Tensor]:
    """μ_Z and L."""
    at_points = kernels(strategy, strategy.inducing_points)
    return at_points.mean.double(), at_points.factor


@torch.no_grad()
def _give(own: Any, lent: NaturalGradientVariationalDistribution, unwhitened: VariationalStrategy | None) -> None:
    """Give the one that is lent the moments of the model's own."""
    mean, root = (part.double() for part in moments_of(own))
    if unwhitened is not None:
        centre, L = _prior(unwhitened)
        mean = torch.linalg.solve_triangular(L, (mean - centre)[..., None], upper=False)[..., 0]
        root = torch.linalg.solve_triangular(L, root, upper=False)
    q = lent.posterior
    q.initialize_(mean.to(q.dtype), q.kept_covariance(root.to(q.dtype)))


@torch.no_grad()
def _take(own: Any, lent: NaturalGradientVariationalDistribution, unwhitened: VariationalStrategy | None) -> None:
    """Give the model's own the moments of the one that was lent, by the method with which a strategy starts it."""
    mean, (root, _) = lent.posterior.mean.double(), cholesky(lent.posterior.covariance.double())
    if unwhitened is not None:
        centre, L = _prior(unwhitened)
        mean, root = centre + (L @ mean[..., None])[..., 0], L @ root
    covariance = CholLinearOperator(TriangularLinearOperator(root.to(own.dtype)))
    noise, own.mean_init_std = own.mean_init_std, 0.0
    with torch.random.fork_rng([own.device] if own.device.type == "cuda" else []):  # which draws, as no file knows
        own.initialize_variational_distribution(MultivariateNormal(mean.to(own.dtype), covariance))
    own.mean_init_std = noise
