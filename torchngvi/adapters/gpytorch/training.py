"""Joint training: natural steps for q, any torch optimizer for the hyper-parameters, one evaluation a batch.

A stationary run of natural steps ρ on batches is noise about an optimum: one step undoes what the step before took from
its batch.  With g_t = x_t + ξ_t in the frame of q, x the distance to the optimum and ξ the noise of a batch,

    E⟨g_t, g_t+1⟩ = -½ρ E|g|²            at rest
    E⟨g_t, g_t+1⟩ > -½ρ E|g|²            where the optimum moves on with the hyper-parameters and q lags behind

so that the cosine c of successive gradients of the mean tells which of the two prevails, and the length follows it,

    log ρ ← log ρ + 0.1 clip(c/ρ + 0.3, -1, 1)        from  min(½, max(B/N, B/(5M))),  within  [B/(10N), ½]

(at most 1/L where L latent functions are mixed, see `latents`).

At rest c/ρ is -½ and ρ falls; at a lag it rises.  -0.3 is where the lag costs about a third of what the noise costs.
(Kesten 1958 for the sign of successive errors as a signal to the step length.)

In a float32 model the sums over all data are in float64, and so is q from the first mini-batch whose step
float32 cannot take; at the end q has the model's dtype again.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.models import ApproximateGP
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from tqdm.auto import tqdm

from torchngvi.adapters.gpytorch.latents import conjugate, log_concave
from torchngvi.adapters.gpytorch.memory import forget, kept_modes
from torchngvi.adapters.gpytorch.refinement import refine_svgp, restored_dtype
from torchngvi.adapters.gpytorch.sparse_gp import Batch, SparseGP, count, pairs
from torchngvi.errors import InputError, RejectedStepWarning
from torchngvi.fitting import checkpoints, fingerprints
from torchngvi.fitting.records import FitResult
from torchngvi.methods import IBLR, VN, Method
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.stepsizes import KLRadius

_NOISE = 0.05  # nats per datum that the noise of a mini-batch may cost at first
_CAP = 0.5  # longest natural step on a part of the data
_RADIUS = 4.0  # nats a step may move q, where the likelihood is not log-concave
_RATE = 0.1  # largest change of log ρ a step
_LAG = 0.3  # -c/ρ at which ρ stays


class TrainingResult(NamedTuple):
    """What a training run did."""

    losses: list[float]  # negative ELBO per datum, the mean over the batches of each epoch
    rejections: int  # natural steps that were not taken
    refined: FitResult | None  # the verdict on q, where asked
    interrupted: bool = False  # from the keyboard, within an epoch that is not counted

    def __str__(self) -> str:
        """One line."""
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "none complete"
        if len(self.losses) > 1:
            last += f", {self.losses[-2] - self.losses[-1]:.2g} less than an epoch before"
        verdict = "" if self.refined is None else f"; q {self.refined}"
        stopped = ", then interrupted" if self.interrupted else ""
        return f"{len(self.losses)} epochs{stopped}, {last}, {self.rejections} natural steps not taken{verdict}"


def train_svgp(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper_optimizer: torch.optim.Optimizer | None = None,
    *,
    epochs: int = 10,
    refine: bool = False,
    callbacks: Iterable[Callable[[int, float], Any]] = (),
    progress: bool = True,
    checkpoint: str | Path | None = None,
) -> TrainingResult:
    """Train q by natural gradients and the hyper-parameters by any torch optimizer, from one evaluation a batch.

    Args:
        model: with a `VariationalStrategy` over a `NaturalGradientVariationalDistribution`, alone or within an
            `IndependentMultitaskVariationalStrategy` or an `LMCVariationalStrategy`.
        likelihood: see `SparseGP`.
        batches: a ``DataLoader`` of (x, y), or a list of such pairs; gone through once an epoch.
        num_data: rows of an epoch.
        hyper_optimizer: over parameters of the model and the likelihood, as you like it; without it the
            hyper-parameters stay and the epochs are not run: `refine_svgp` alone is faster and exact.
        epochs: passes over the data.
        refine: end with `refine_svgp`, at the final hyper-parameters.
        callbacks: called with the epoch and its loss; a true result ends the epochs.  They may evaluate the model, in
            whichever mode.
        progress: show a bar.
        checkpoint: a file, written after each epoch; where it exists, the run goes on from there, with torch's
            default generator, and those of a ``DataLoader`` and its samplers, as they were.

    Returns:
        What was done.  An interrupt from the keyboard ends the run, with everything as the last step left it.

    Raises:
        InputError: no data, another number of rows than ``num_data``, a hyper-optimizer that holds q or none of the
            parameters or evaluates more than once a step, a loss that is not finite, a checkpoint that cannot be
            written or is of another model, optimizer or other data: they are told by tensors in memory, and by the loss
            of the first batch of an epoch, but for an iterator, which cannot be looked into.
        PairError: a model or a likelihood it cannot serve; the message says what to use.

    >>> import gpytorch
    >>> from torchngvi.adapters.gpytorch import NaturalGradientVariationalDistribution
    >>> class Model(gpytorch.models.ApproximateGP):
    ...     def __init__(self, Z):
    ...         q = NaturalGradientVariationalDistribution(len(Z))
    ...         super().__init__(gpytorch.variational.VariationalStrategy(self, Z, q))
    ...         self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()
    ...     def forward(self, x):
    ...         return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))
    >>> x = torch.linspace(-2, 2, 100)[:, None]
    >>> model, likelihood = Model(x[::10]), gpytorch.likelihoods.GaussianLikelihood()
    >>> adam = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    >>> batches = list(zip(x.split(25), torch.sin(3 * x[:, 0]).split(25)))
    >>> result = train_svgp(model, likelihood, batches, 100, adam, epochs=5, progress=False)
    >>> len(result.losses), result.losses[-1] < result.losses[0]
    (5, True)
    """
    losses: list[float] = []
    rejections, interrupted = 0, False
    if callable(callbacks):
        raise InputError("callbacks is a list of functions of the epoch and its loss; put the one you have in a list.")
    callbacks = tuple(callbacks)
    if num_data < 1:
        raise InputError(f"num_data counts the rows of an epoch and must be at least 1; got {num_data}.")
    if hyper_optimizer is not None:
        model.train()
        likelihood.train()
        q = SparseGP(model, likelihood, []).posterior
        _check_optimizer(hyper_optimizer, q, [*model.parameters(), *likelihood.parameters()])
        file = None
        if checkpoint is not None:
            settings = _settings(model, likelihood, batches, num_data, hyper_optimizer)
            file = checkpoints.Checkpoint(checkpoint, settings, q.device, batches)
        with restored_dtype(q):
            run = _Run(model, likelihood, num_data, hyper_optimizer, file)
            losses = run.resumed(batches)
            with tqdm(total=epochs * num_data, disable=not progress, desc="SVGP", unit="row", unit_scale=True) as bar:
                bar.update(len(losses) * num_data)
                try:
                    while len(losses) < epochs:
                        losses.append(run.epoch(batches, bar))
                        if file is not None:
                            file.save(run.captured(losses))
                        with kept_modes(model, likelihood):
                            answers = [callback(len(losses) - 1, losses[-1]) for callback in callbacks]
                        if any(answers):
                            break
                except KeyboardInterrupt:
                    interrupted = True
            rejections = run.natural.rejections
    forget(model)
    refined = None
    if not interrupted and (refine or hyper_optimizer is None):
        refined = refine_svgp(model, likelihood, batches, progress=progress)
    return TrainingResult(losses, rejections, refined, interrupted)


class _Run:
    """Everything that changes from step to step."""

    def __init__(
        self,
        model: ApproximateGP,
        likelihood: Likelihood,
        num_data: int,
        hyper_optimizer: torch.optim.Optimizer,
        file: checkpoints.Checkpoint | None = None,
    ) -> None:
        self.model, self.likelihood, self.num_data, self.hyper = model, likelihood, num_data, hyper_optimizer
        self.file = file
        target = SparseGP(model, likelihood, [])
        self.latents, self.q = target.latents, target.posterior
        # where curvature may be negative the form that stays positive definite, in short steps
        self.natural: Method = (
            VN(self.q, lr=1.0) if log_concave(likelihood) else IBLR(self.q, lr=1.0, step_size=KLRadius(_RADIUS))
        )
        self.log_rho: Tensor | None = None
        self.force: Tensor | None = None  # of the batch before
        self.first: Batch | None = None  # of the last epoch
        self.began: dict[str, Any] = {}  # the generators where it began

    def epoch(self, batches: Iterable[Batch], bar: Any) -> float:
        """One pass; the mean loss per datum."""
        total, rows = torch.zeros((), dtype=torch.float64), 0
        self.began = {} if self.file is None else self.file.generators()
        for x, y in pairs(batches, self.latents):
            self.first = self.first if rows else (x, y)
            target = SparseGP(self.model, self.likelihood, [(x, y)], self.num_data, learn=True)
            rows_here = count(x)
            self._set_length(rows_here)
            self.hyper.zero_grad()
            loss = self._stepped(target)
            if loss.device.type == "cpu" and not bool(loss.isfinite()):  # elsewhere it would wait for the device
                raise InputError(_not_finite(float(loss), y))
            target.backward()
            _backward_priors(self.model, self.likelihood, self.num_data)
            self.hyper.step()
            self._follow(target.force, rows_here)
            total, rows = total + loss.detach().to(total) * (rows_here / self.num_data), rows + rows_here
            bar.update(rows_here)
            bar.set_postfix(loss=f"{float(total) / rows:.4f}", refresh=False) if not bar.disable else None
        if not rows:
            raise InputError(
                "the batches of an epoch are empty: an iterator is used up after one. Give a list or a DataLoader."
            )
        if rows != self.num_data:
            raise InputError(
                f"an epoch has {rows} rows where num_data is {self.num_data}: the expected log likelihood would have "
                "the wrong weight beside the KL divergence. "
                "Give the number of rows, and a DataLoader without drop_last."
            )
        return float(total) / self.num_data

    def _set_length(self, rows: int) -> None:
        """ρ of the next step; on all of the data of a Gaussian likelihood 1, where that is exact."""
        if self.log_rho is None:
            share = rows / self.num_data
            first = min(_CAP, self.latents.longest, max(share, 4 * _NOISE * rows / self.q.dim))
            self.log_rho = torch.tensor(first, dtype=torch.float64, device=self.q.device).log()
        whole = conjugate(self.likelihood) and rows == self.num_data
        self.natural.param_groups[0]["lr"] = self.latents.longest if whole else self.log_rho.exp().to(self.q.dtype)

    def _follow(self, force: Tensor, rows: int) -> None:
        """The length follows the cosine of successive gradients of the mean, in the frame of q."""
        assert self.log_rho is not None
        before, self.force = self.force, force.detach().to(self.q.dtype)
        if before is None:
            return
        a, b = (self.q.frame().pull(g.to(self.q.dtype)).flatten() for g in (before, self.force))
        cosine = ((a @ b) / (a.norm() * b.norm()).clamp_min(1e-300)).double()
        change = _RATE * (cosine / self.log_rho.exp() + _LAG).clamp(-1.0, 1.0)
        lowest = torch.tensor(0.1 * rows / self.num_data, dtype=torch.float64, device=change.device).log()
        rho = torch.maximum(self.log_rho + change.nan_to_num(0.0), lowest)
        self.log_rho = rho.clamp_max(math.log(min(_CAP, self.latents.longest)))

    def _stepped(self, target: SparseGP) -> Tensor:
        """The loss before the step; where float32 is not enough for it, q is in float64 from here on."""
        refused = self.natural.rejections if self.q.dtype != torch.float64 else 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RejectedStepWarning)  # there is no learning rate to lower
            loss = self.natural.step(target)
        if self.q.dtype != torch.float64 and self.natural.rejections > refused:
            warnings.warn(
                f"a natural step could not be taken in {str(self.q.dtype).removeprefix('torch.')}: q is kept in "
                "float64 for the rest of the training.",
                RejectedStepWarning,
                stacklevel=5,
            )
            self.q.double()
        assert loss is not None
        return loss

    # -------------------------------------------------------------------------------- checkpoints

    def captured(self, losses: list[float]) -> dict[str, Any]:
        """After an epoch, with the loss of its first batch there; the generators stay as they are."""
        assert self.file is not None
        assert self.first is not None
        state = self._state(self.file, losses)
        loss = self._loss_of(self.first)
        self.file.set_generators(state["generators"])
        return {**state, "began": self.began, "loss": loss}

    def _state(self, file: checkpoints.Checkpoint, losses: list[float]) -> dict[str, Any]:
        return file.captured(
            losses=losses,
            dtype=str(self.q.dtype),
            model=self.model.state_dict(),
            likelihood=self.likelihood.state_dict(),
            hyper=self.hyper.state_dict(),
            natural=self.natural.state_dict(),
            log_rho=self.log_rho,
            force=self.force,
        )

    @torch.no_grad()
    def _loss_of(self, batch: Batch) -> Tensor:
        """The negative ELBO at q by this batch; in eval mode, where nothing that is learnt moves."""
        with kept_modes(self.model, self.likelihood):
            self.model.eval()
            self.likelihood.eval()
            return SparseGP(self.model, self.likelihood, [batch], self.num_data).negative_elbo(self.q)

    def resumed(self, batches: Iterable[Batch]) -> list[float]:
        """The losses of the epochs done, with everything as it was after them; where that is refused, as it is.

        Raises:
            InputError: a file that is no checkpoint, or one of another run.
        """
        saved = None if self.file is None else self.file.load({"losses": checkpoints.are_numbers})
        if self.file is None or saved is None:
            return []
        file, before = self.file, self._state(self.file, [])

        def again() -> Tensor:
            """The loss that was saved: of the batch that the generators of then give, at what was saved."""
            file.set_generators(began)
            first = next(pairs(batches, self.latents), None)
            file.set_generators(saved["generators"])
            return loss if first is None else self._loss_of(first)  # an epoch without batches is refused

        try:
            self._restore(file, saved)
            with file.restoring(saved):
                began, loss = saved["began"], saved["loss"]
            if not isinstance(batches, Iterator):  # which would have a batch less for the epoch
                file.check_loss(loss, again(), again)
                file.set_generators(saved["generators"])
        except BaseException:  # an interrupt, a refusal: nothing has happened
            self._restore(file, before)
            raise
        return list(saved["losses"])

    def _restore(self, file: checkpoints.Checkpoint, state: dict[str, Any]) -> None:
        with file.restoring(state):
            if state["dtype"] == "torch.float64":
                self.q.double()
            self.hyper.load_state_dict(state["hyper"])
            self.model.load_state_dict(state["model"])
            self.likelihood.load_state_dict(state["likelihood"])
            self.natural.load_state_dict(state["natural"])
            self.log_rho, self.force = state["log_rho"], state["force"]


def _settings(
    model: ApproximateGP,
    likelihood: Likelihood,
    batches: Iterable[Batch],
    num_data: int,
    hyper: torch.optim.Optimizer,
) -> dict[str, str]:
    """What a checkpoint is of."""
    settings = {"method": "train_svgp", "num_data": str(num_data)}
    for name, module in (("model", model), ("likelihood", likelihood)):
        settings |= {f"{name} {path}".strip(): type(part).__name__ for path, part in module.named_modules()}
        settings |= fingerprints.of_tensors(name, module.state_dict())
    for path, kernel in model.named_modules():
        if isinstance(kernel, Kernel):
            settings |= {f"model {path} {name}": text for name, text in _settings_of(kernel).items()}
    if isinstance(batches, DataLoader):
        size = getattr(batches.batch_sampler, "batch_size", None)
        settings["batch size"] = fingerprints.described(size)
    return settings | fingerprints.of_torch_optimizer("hyper_optimizer", hyper) | fingerprints.of_data(_data(batches))


def _settings_of(kernel: Kernel) -> dict[str, str]:
    """Those that are no parameters, such as the smoothness ν of a Matérn kernel."""
    return {
        name: fingerprints.described(value)
        for name, value in sorted(vars(kernel).items())
        if not name.startswith("_") and name != "training" and isinstance(value, bool | int | float | str)
    }


def _data(batches: Iterable[Batch]) -> tuple[Tensor, ...]:
    """The data where they are in memory and have an order."""
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, TensorDataset):
        return batches.dataset.tensors
    pairs = batches if isinstance(batches, list | tuple) else ()
    return tuple(part for pair in pairs if isinstance(pair, tuple | list) for part in pair if isinstance(part, Tensor))


def _check_optimizer(optimizer: object, q: Gaussian, parameters: list[torch.nn.Parameter]) -> None:
    """One evaluation a step, of hyper-parameters of this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            f"hyper_optimizer must be a torch optimizer over hyper-parameters; got {type(optimizer).__name__}. "
            "Give torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.01)."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS evaluates a batch several times a step, and train_svgp evaluates it once. Give Adam or SGD, or "
            "let LBFGS step on DualELBO."
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if held & {id(part) for part in q.buffers()}:
        raise InputError(
            "hyper_optimizer holds the posterior, which moves by natural gradients; give it model.parameters() and "
            "likelihood.parameters(), which leave q out."
        )
    if not held & {id(p) for p in parameters}:
        raise InputError(
            "hyper_optimizer holds no parameter of this model or likelihood; was it built over an earlier model? "
            "Build it over [*model.parameters(), *likelihood.parameters()]."
        )


def _not_finite(loss: float, y: Tensor) -> str:
    missing = int(y.isnan().sum())
    what = (
        f"{missing} of {y.numel()} targets of this batch are NaN" if missing else "check the data and hyper-parameters"
    )
    return (
        f"the negative ELBO of a batch is {loss}: {what}. Everything is as the last step left it. For missing targets "
        'say gpytorch.settings.observation_nan_policy("mask").'
    )


def _backward_priors(model: ApproximateGP, likelihood: Likelihood, num_data: int) -> None:
    """Priors on hyper-parameters and added losses, as GPyTorch's objectives have them."""
    terms = [
        -prior.log_prob(closure(module)).sum() / num_data
        for owner in (model, likelihood)
        for _, module, prior, closure, _ in owner.named_priors()
    ]
    terms += [term.loss().sum() for term in model.added_loss_terms()]
    needed = [term for term in terms if term.requires_grad]
    if needed:
        torch.stack(needed).sum().backward()
