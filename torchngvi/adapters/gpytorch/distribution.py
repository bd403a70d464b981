"""A variational distribution of GPyTorch that holds a posterior of this library.

Its mean and covariance are functions of the posterior's probes p = 0 and R = 0,

    u = m + C p + C (I + R) z        q(u) = N(m + C p, C (I + R)(I + R)ᵀ Cᵀ)

so that ``loss.backward()``, whatever the strategy and the objective, leaves a = Cᵀg in ``mean_probe.grad`` and
P in ``root_probe.grad``: the natural gradient in the frame of q.  Nothing is differentiated through a
Cholesky factorisation of S, which is where GPyTorch's own natural gradient loses its digits.

Hensman, Matthews and Ghahramani (2015) for the bound; Salimbeni, Eleftheriadis and Hensman (2018) for natural
gradients of it, here those of Khan and Rue (2023).
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.mlls._approximate_mll import _ApproximateMarginalLogLikelihood
from gpytorch.variational import BatchDecoupledVariationalStrategy, CholeskyVariationalDistribution
from gpytorch.variational._variational_distribution import _VariationalDistribution
from gpytorch.variational._variational_strategy import _VariationalStrategy
from linear_operator.operators import CholLinearOperator, DiagLinearOperator, TriangularLinearOperator
from torch import Tensor

from torchngvi.adapters.gpytorch.memory import forget
from torchngvi.errors import InputError
from torchngvi.methods import VN
from torchngvi.numerics.linalg import cholesky
from torchngvi.optim import NaturalGradientVI
from torchngvi.posteriors import CholeskyGaussian
from torchngvi.posteriors.flat.flat_gaussian import FlatGaussian
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.renamed import renamed

_SAME = 1e-3  # relative error at which two weights of the KL divergence differ


class _Watched:
    """Of a linear operator: tells how much of its log determinant a loss holds."""

    watch: Callable[[Tensor], None] | None = None  # called in the backward pass, with that weight

    def inv_quad_logdet(self, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """As GPyTorch's; the gradient that reaches the log determinant is shown."""
        inv_quad, logdet = super().inv_quad_logdet(*arguments, **options)  # type: ignore[misc]
        if self.watch is not None and logdet is not None and logdet.requires_grad:
            logdet.register_hook(self.watch)
        return inv_quad, logdet

    def _expand_batch(self, batch_shape: Any) -> "_Watched":
        expanded = super()._expand_batch(batch_shape)  # type: ignore[misc]
        expanded.watch = self.watch
        return expanded


class _DiagonalCovariance(_Watched, DiagLinearOperator):
    """diag(c)²."""


class _RootCovariance(_Watched, CholLinearOperator):
    """C Cᵀ for a triangular root, upper or lower, where GPyTorch's own takes every root for a lower one."""

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        """(C Cᵀ)⁻¹ x by two substitutions."""
        solved = self.root._transpose_nonbatch().solve(self.root.solve(right_tensor))
        return solved if left_tensor is None else left_tensor @ solved

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        return super()._solve(rhs, preconditioner, num_tridiag) if num_tridiag else self.solve(rhs)

    def _cholesky(self, upper: bool = False) -> TriangularLinearOperator:
        """The lower factor, or its transpose: C, or of an upper C the one with Cᵀ = Q Lᵀ, without forming C Cᵀ."""
        lower = self.root
        if lower.upper:
            R = torch.linalg.qr(lower.to_dense().mT).R
            signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(R)
            lower = TriangularLinearOperator(R.mT * signs[..., None, :])
        return lower._transpose_nonbatch() if upper else lower


class NaturalGradientVariationalDistribution(_VariationalDistribution):
    """q(u) = N(m, S) for any variational strategy, stepped by the optimizers of this library.

    The posterior is the submodule ``posterior``; its coordinates are buffers, so that ``model.parameters()`` holds
    hyper-parameters and inducing points only, and Adam never meets q.

    Args:
        num_inducing_points: M.
        batch_shape: of the model, as in GPyTorch.
        mean_init_std: standard deviation of the noise on the mean where training starts.
        posterior: the class of q: `CholeskyGaussian`, `NaturalGaussian` or `PrecisionCholeskyGaussian`;
            `DiagonalGaussian` for mean field; a Gaussian over a flat vector, such as `FlatCholesky`, for `IFVB`.

    Raises:
        InputError: a posterior that is none, fewer than one inducing point.

    >>> q = NaturalGradientVariationalDistribution(4, batch_shape=torch.Size([2]))
    >>> q().batch_shape, q().event_shape, list(q.parameters())
    (torch.Size([2]), torch.Size([4]), [])
    """

    _like: Tensor

    @renamed(family="posterior")
    def __init__(
        self,
        num_inducing_points: int,
        batch_shape: Sequence[int] = (),
        mean_init_std: float = 1e-3,
        *,
        posterior: type[Gaussian] | type[FlatGaussian] = CholeskyGaussian,
    ) -> None:
        super().__init__(num_inducing_points, torch.Size(batch_shape), mean_init_std)
        if not (isinstance(posterior, type) and issubclass(posterior, Gaussian | FlatGaussian)):
            raise InputError(
                f"posterior is a Gaussian posterior such as CholeskyGaussian or NaturalGaussian; got {posterior!r}."
            )
        self.posterior: Gaussian | FlatGaussian
        if issubclass(posterior, FlatGaussian):
            self.posterior = posterior.standard(num_inducing_points, batch_shape)
        else:
            self.posterior = posterior(num_inducing_points, batch_shape)  # type: ignore[call-arg]
        self.register_buffer("_like", torch.empty(0), persistent=False)  # of the model's dtype
        self._entropy_weights: list[tuple[bool, Tensor]] | None = None  # kept while `natural_optimizer` asks
        self.kept_factor: tuple[object, Tensor] | None = None  # of K_ZZ, for `SparseGP`

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "kept_factor": None, "_entropy_weights": None}

    @property
    def device(self) -> torch.device:
        """Of the posterior."""
        return self.posterior.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model; the posterior may have another: ``q.posterior.double()`` in a float32 model."""
        return self._like.dtype

    def forward(self) -> MultivariateNormal:
        """q(u), differentiable in the probes.

        Raises:
            InputError: the probes are no longer zero.
        """
        if any(bool(probe.any()) for probe in (self.posterior.mean_probe, self.posterior.root_probe)):
            raise InputError(
                "the probes of q have to stay zero, and another optimizer has moved them. Give it model.parameters() "
                "and likelihood.parameters(), which leave q out, not buffers()."
            )
        mean, covariance = self._moments()
        if self._entropy_weights is not None:
            covariance.watch = self._weigh
        return MultivariateNormal(mean, covariance)

    def _moments(self) -> tuple[Tensor, "_DiagonalCovariance | _RootCovariance"]:
        """Mean and covariance in the dtype of the model, differentiable in the probes."""
        if isinstance(self.posterior, FlatGaussian):
            mean, root = self.posterior.moments()
            return mean.to(self.dtype), _RootCovariance(TriangularLinearOperator(root.to(self.dtype)))
        frame = self.posterior.probed()
        mean = frame.mean.to(self.dtype)
        if frame.structure.widest == 1:
            return mean, _DiagonalCovariance(frame.variance.to(self.dtype))
        return mean, _RootCovariance(TriangularLinearOperator(frame.dense().to(self.dtype), upper=frame.upper))

    def _weigh(self, weight: Tensor) -> None:
        """Keep the weight of the log determinant in a loss, and whether the probes had no gradient before it."""
        q = self.posterior
        gradient = q.root_probe.grad if q.framed else q.mean_probe.grad
        if self._entropy_weights is not None:
            self._entropy_weights.append((gradient is None or not bool(gradient.any()), weight.sum()))

    @torch.no_grad()
    def initialize_variational_distribution(
        self,
        prior_dist: MultivariateNormal,  # over (*batch, M), or broadcasting to it
    ) -> None:
        """Start at the prior, with a little noise on the mean; a strategy calls it once.

        Raises:
            InputError: a prior covariance without a Cholesky factor.
        """
        mean = prior_dist.mean.expand(self.shape())
        covariance = prior_dist.covariance_matrix.expand(*self.shape(), self.num_inducing_points)
        root, ok = cholesky(covariance)
        if not bool(ok.all()):
            raise InputError(
                "the prior covariance of the inducing values is not positive definite: inducing points coincide, or "
                "the jitter is too small for this dtype. Raise jitter_val, or use float64."
            )
        noise = self.mean_init_std * torch.randn_like(mean)
        self.posterior.initialize_(mean + noise, self.posterior.kept_covariance(root.tril()))

    @torch.no_grad()
    def to_cholesky(self) -> CholeskyVariationalDistribution:
        """The same q(u) as GPyTorch's own distribution, for what accepts no other: ``get_fantasy_model``.

        >>> q = NaturalGradientVariationalDistribution(2)
        >>> q.to_cholesky()().covariance_matrix.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
        """
        other = CholeskyVariationalDistribution(self.num_inducing_points, self.batch_shape, self.mean_init_std)
        other = other.to(dtype=self.dtype, device=self.device)
        other.variational_mean.copy_(self.posterior.mean)
        other.chol_variational_covar.copy_(self.posterior.scale_tril)
        return other


def variational_posteriors(model: torch.nn.Module) -> list[Gaussian | FlatGaussian]:
    """The posteriors of every layer, task and latent function of a model, for one of our optimizers.

    Raises:
        InputError: a model without any, or one that does not fit its inducing points or kernels.

    >>> q = NaturalGradientVariationalDistribution(4)
    >>> variational_posteriors(q) == [q.posterior]
    True
    """
    found = [d.posterior for d in model.modules() if isinstance(d, NaturalGradientVariationalDistribution)]
    if found:
        for strategy in model.modules():
            if isinstance(strategy, _VariationalStrategy):
                check_shapes(strategy)
        return found
    others = sorted({type(d).__name__ for d in model.modules() if isinstance(d, _VariationalDistribution)})
    if not others:
        raise InputError(
            f"{type(model).__name__} has no variational distribution; give an ApproximateGP, or the whole DeepGP."
        )
    why = "no other variational distribution steps by natural gradients here"
    if "DeltaVariationalDistribution" in others:
        why = "a point mass has no covariance, and no natural gradient"
    elif any(isinstance(m, gpytorch.variational.NNVariationalStrategy) for m in model.modules()):
        why = "the nearest-neighbour strategy takes GPyTorch's mean field only"
    raise InputError(
        f"{type(model).__name__} holds {', '.join(others)}, and {why}. "
        "Give its strategy a NaturalGradientVariationalDistribution, or leave q to Adam."
    )


def check_shapes(strategy: _VariationalStrategy) -> None:
    """Hold q against the inducing points and the kernels of its strategy.

    Raises:
        InputError: another number of inducing values than points, or fewer posteriors than the batch of models needs.
    """
    q = getattr(strategy, "_variational_distribution", None)
    if not isinstance(q, NaturalGradientVariationalDistribution):
        return
    Z = strategy.inducing_points
    if q.num_inducing_points != Z.shape[-2]:
        raise InputError(
            f"q holds {q.num_inducing_points} inducing values where the strategy has {Z.shape[-2]} inducing points: "
            f"build NaturalGradientVariationalDistribution({Z.shape[-2]})."
        )
    kernels = [module for module in strategy.model.children() if isinstance(module, Kernel)]
    wanted = torch.broadcast_shapes(Z.shape[:-2], *(kernel.batch_shape for kernel in kernels))
    if isinstance(strategy, BatchDecoupledVariationalStrategy):  # one dimension is of the mean and of the covariance
        sizes = list(wanted)
        del sizes[strategy.mean_var_batch_dim or -1]
        wanted = torch.Size(sizes)
    padded = (1,) * (len(q.batch_shape) - len(wanted)) + wanted
    if len(padded) > len(q.batch_shape) or any(
        size not in (1, own) for size, own in zip(padded, q.batch_shape, strict=True)
    ):
        raise InputError(
            f"q has the batch shape {tuple(q.batch_shape)} where the inducing points and kernels have {tuple(wanted)}: "
            f"build NaturalGradientVariationalDistribution({Z.shape[-2]}, batch_shape={tuple(wanted)})."
        )


def natural_optimizer(
    mll: _ApproximateMarginalLogLikelihood,
    lr: float | Tensor = 0.1,
    method: type[NaturalGradientVI] = VN,
    **options: Any,
) -> NaturalGradientVI:
    """The optimizer of q for ``loss = -mll(model(x), y); loss.backward(); natural.step()``.

    GPyTorch's objectives are divided by the number of data and weigh the KL divergence by β.  The optimizer takes
    both back: lr = 1 is the full step, whatever β.  The first step checks it, by the weight that the KL divergence
    really has in the loss.  Every step uses q's gradients up, so that nothing need clear them, and clears GPyTorch's
    memory of q.

    Args:
        mll: `VariationalELBO`, `PredictiveLogLikelihood`, `GammaRobustVariationalELBO`, or a
            `DeepApproximateMLL` over one of them.
        lr: the step size; a torch scheduler may change it.
        method: `VN`, `SRVN`, `IBLR`, `NGVI`, ...; or `BBVI`, whose steps are Euclidean in the coordinates of q.
        options: of the method, such as ``step_size=KLRadius(0.1)``, or the ``smoothness`` of `BBVI`, the largest
            curvature of num_data/β times the loss in the mean of q.

    Raises:
        InputError: a method that does not step Gaussians by gradients of the loss, or that does not have these options;
            a model without posteriors, or with one of another shape than its inducing points; ``num_data`` or ``beta``
            not positive; at the first step, a loss that is not -mll(...), or its sum over a batch of models.
        PairError: a family that the method cannot move.
    """
    if not isinstance(mll, _ApproximateMarginalLogLikelihood):
        raise InputError(
            f"natural_optimizer reads the model and the number of data from the objective; got {type(mll).__name__}. "
            "Give a VariationalELBO, or build VN(variational_posteriors(model), lr=..., loss_scale=num_data)."
        )
    if not (mll.num_data > 0 and mll.beta > 0):
        raise InputError(
            f"the objective has num_data = {mll.num_data} and beta = {mll.beta}: the number of data and the weight of "
            "the KL divergence must be larger than 0."
        )
    _check_method(method, options)
    posteriors, scale = variational_posteriors(mll.model), mll.num_data / mll.beta
    groups = [{"posterior": q, "loss_scale": float(scale)} for q in posteriors]
    optimizer = method(groups, lr=lr, **options)
    optimizer.zero_grad()  # of passes before it
    _check_scale_once(optimizer, mll)
    optimizer.register_step_post_hook(lambda *_: forget(mll.model))
    return optimizer


def _check_method(method: Any, options: dict[str, Any]) -> None:
    """A method that steps q by the gradients in its probes, with options that it has."""
    if not (isinstance(method, type) and issubclass(method, NaturalGradientVI)):
        raise InputError(
            f"method is a class that steps Gaussian posteriors by gradients of the loss; got "
            f"{getattr(method, '__name__', repr(method))}. Give VN, SRVN, IBLR, NGVI or BBVI; IFVB for a FlatCholesky."
        )
    try:
        inspect.signature(method).bind(None, lr=None, **options)
    except TypeError as error:
        known = [name for name in inspect.signature(method).parameters if name not in ("posterior", "lr", "loss_scale")]
        raise InputError(
            f"{method.__name__} cannot be built with the options given: {error}. Beside mll, lr and method give "
            f"natural_optimizer options of {method.__name__}, which are {', '.join(known)}."
        ) from error


def _check_scale_once(optimizer: NaturalGradientVI, mll: _ApproximateMarginalLogLikelihood) -> None:
    """At the first step, ask whether the KL divergence had the weight β/num_data in the loss."""
    distributions = [d for d in mll.model.modules() if isinstance(d, NaturalGradientVariationalDistribution)]
    for distribution in distributions:
        distribution._entropy_weights = []

    def check(*_: Any) -> None:
        handle.remove()
        wanted = mll.beta / mll.num_data
        for distribution in distributions:
            weights, distribution._entropy_weights = distribution._entropy_weights or [], None
            # the KL divergence holds -½ log|S| of each posterior; gradients were last empty at one of these
            starts = [start for start, (empty, _) in enumerate(weights) if empty] or [0]
            members = distribution.batch_shape.numel()
            sums = [-2 * float(sum(w for _, w in weights[start:])) / members for start in starts]
            if weights and not any(abs(weight - wanted) <= _SAME * wanted for weight in sums):
                raise InputError(
                    f"the KL divergence has the weight {sums[-1]:.4g} in the loss where the objective has "
                    f"{wanted:.4g} = beta / num_data (num_data = {mll.num_data}): natural steps would have a wrong "
                    "size. Use loss = -mll(model(x), y), summed over a batch of models, not averaged, of one batch a "
                    "step; natural.zero_grad() drops gradients of passes before it."
                )

    handle = optimizer.register_step_pre_hook(check)
