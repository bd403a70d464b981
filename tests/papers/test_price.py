"""The studies of Price's gradient: the transport against closed forms, variances, short runs."""

import pandas as pd
import pytest
import torch

from examples.papers import kim2026
from examples.papers.kim2024.runs import optimum, reference_target
from examples.papers.kim2026.noise import exact_variance
from examples.papers.kim2026.runs import ESTIMATORS, GEOMETRIES, divergence, steps_to
from examples.papers.kim2026.transport import ProximalBuresWasserstein
from torchngvi import CholeskyGaussian, NaturalGradientVI
from torchngvi.errors import RejectedStepWarning
from torchngvi.expectations import Hessian
from torchngvi.models import LogJoint
from torchngvi.rules import BuresWasserstein, ProximalRootGradient
from torchngvi.stepsizes import Constant
from torchngvi.theory.kim2024 import GaussianTarget

DTYPE = torch.float64


def stepped(rule, lr, target, q):
    NaturalGradientVI(q, rule, lr=lr, estimator=Hessian(2), step_size=Constant()).step(target.log_joint)
    return q


def somewhere(dim=3):
    root = torch.randn(dim, dim, dtype=DTYPE, generator=torch.Generator().manual_seed(5)).tril(-1)
    root = 0.3 * root + torch.diag(torch.linspace(0.5, 1.2, dim, dtype=DTYPE))
    return CholeskyGaussian(dim, mean=torch.linspace(-1, 1, dim, dtype=DTYPE), scale=root, dtype=DTYPE)


class TestTransport:
    @pytest.mark.parametrize("geometry", GEOMETRIES)
    def test_the_target_is_a_fixed_point_at_any_step(self, geometry):
        target = reference_target(3, 4.0)
        q = CholeskyGaussian(3, dtype=DTYPE)
        q.initialize_(target.mean, optimum(target))
        stepped(GEOMETRIES[geometry](), 0.17, target, q)
        assert q.covariance @ target.precision == pytest.approx(torch.eye(3), abs=1e-12)
        assert divergence(q, target) == pytest.approx(0, abs=1e-12)

    def test_it_is_the_printed_map(self):
        """V⁺ = (I - αH) V (I - αH), then V' = ½(V⁺ + 2αI + (V⁺(V⁺ + 4αI))^½)."""
        target, q, alpha = reference_target(3, 4.0), somewhere(), 0.1
        forward = torch.eye(3, dtype=DTYPE) - alpha * target.precision
        plus = forward @ q.covariance @ forward
        values, axes = torch.linalg.eigh(plus @ (plus + 4 * alpha * torch.eye(3, dtype=DTYPE)))
        expected = 0.5 * (plus + 2 * alpha * torch.eye(3, dtype=DTYPE) + axes * values.sqrt() @ axes.mT)
        mean = q.mean - alpha * target.precision @ (q.mean - target.mean)
        stepped(ProximalBuresWasserstein(), alpha, target, q)
        assert q.covariance.numpy() == pytest.approx(expected.numpy(), rel=1e-10)
        assert q.mean.numpy() == pytest.approx(mean.numpy(), rel=1e-10)

    def test_on_axes_both_geometries_take_one_step(self):
        """Where Λ and C are diagonal, parameter space and Bures-Wasserstein space cannot be told apart."""
        target = GaussianTarget(torch.ones(3, dtype=DTYPE), torch.diag(torch.tensor([1.0, 2.0, 8.0], dtype=DTYPE)))
        ends = []
        for rule in (ProximalRootGradient(), ProximalBuresWasserstein()):
            q = CholeskyGaussian(3, scale=0.4, dtype=DTYPE)
            opt = NaturalGradientVI(q, rule, lr=0.1, estimator=Hessian(2), step_size=Constant())
            for _ in range(7):
                opt.step(target.log_joint)
            ends.append(torch.cat([q.mean, q.covariance.flatten()]))
        assert ends[0].numpy() == pytest.approx(ends[1].numpy(), abs=1e-13)

    def test_off_the_axes_they_do_not(self):
        target = reference_target(3, 4.0)
        ends = [
            stepped(rule, 0.1, target, somewhere()) for rule in (ProximalRootGradient(), ProximalBuresWasserstein())
        ]
        assert float((ends[0].covariance - ends[1].covariance).abs().max()) > 1e-3

    def test_it_starts_as_the_explicit_step(self):
        target, away = reference_target(3, 4.0), []
        for alpha in (1e-2, 1e-3):
            ends = [
                stepped(rule, alpha, target, somewhere()) for rule in (BuresWasserstein(), ProximalBuresWasserstein())
            ]
            away.append(float((ends[0].covariance - ends[1].covariance).abs().max()))
        assert 80 < away[0] / away[1] < 125

    def test_members_of_a_batch_do_not_touch_one_another(self):
        """And one whose gradient is not finite stays where it is."""
        scale = torch.stack([somewhere().scale_tril, 1e200 * torch.eye(3, dtype=DTYPE)])
        target, several = reference_target(3, 4.0), CholeskyGaussian(3, (2,), scale=scale, dtype=DTYPE)
        several.initialize_(somewhere().mean.expand(2, 3), scale)
        with pytest.warns(RejectedStepWarning):
            stepped(ProximalBuresWasserstein(), 0.1, target, several)
        alone = stepped(ProximalBuresWasserstein(), 0.1, target, somewhere())
        assert several.covariance[0].numpy() == pytest.approx(alone.covariance.numpy(), rel=1e-10)
        assert torch.equal(several.scale_tril[1], scale[1])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_divergence_and_the_variance_in_closed_form(estimator):
    target, q = reference_target(3, 4.0), somewhere()
    dense = torch.distributions.MultivariateNormal
    exact = torch.distributions.kl_divergence(
        dense(q.mean, q.covariance), dense(target.mean, precision_matrix=target.precision)
    )
    assert float(divergence(q, target)) == pytest.approx(float(exact), rel=1e-10)
    z = torch.randn(200_000, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
    C = q.scale_tril
    A, b = C.mT @ target.precision @ C, C.mT @ (target.precision @ (q.mean - target.mean))
    r = b + z @ A
    W = 0.5 * (r[:, :, None] * z[:, None] + z[:, :, None] * r[:, None]) if estimator == "reparametrised" else A[None]
    measured = (r - b).square().sum(-1).mean() + 0.5 * (W - A).square().sum((-2, -1)).mean()
    assert exact_variance(estimator, q, target) == pytest.approx(float(measured), rel=0.02)


class TestSteps:
    def test_a_natural_step_of_one_needs_the_mean_alone(self):
        """Price's H is exact, so that V is right after one step of 1, and what is left is the noise of the mean."""
        target = reference_target(2, 4.0)
        found = steps_to(
            LogJoint(target.log_joint), lambda q: divergence(q, target), 2, ("natural", "Price"), 1.0, [50.0, 1e-9],
            runs=3, limit=4,
        )  # fmt: skip
        assert found[0][0] == 1
        assert found[1][0] == -1

    def test_price_needs_fewer_than_the_reparametrised_gradient_in_every_geometry(self):
        target = reference_target(4, 4.0)
        steps = {
            (geometry, name): steps_to(
                LogJoint(target.log_joint), lambda q: divergence(q, target), 4, (geometry, name),
                1.0 if geometry == "natural" else 0.5, [0.3], runs=4, limit=400,
            )[0][0]
            for geometry in GEOMETRIES for name in ESTIMATORS
        }  # fmt: skip
        for geometry in GEOMETRIES:
            assert steps[geometry, "Price"] > 0
            assert steps[geometry, "Price"] < steps[geometry, "reparametrised"] or steps[geometry, "reparametrised"] < 0


@pytest.mark.accuracy
def test_studies_run_and_draw_from_their_log(tmp_path, capsys):
    short = {
        "geometries": {"dims": (2,), "kappas": (1.0,), "inverse_gaps": (1,), "gap": 1.0, "runs": 2, "limit": 20},
        "noise": {"dims": (2, 3), "repeats": 10},
    }
    for name, study in kim2026.STUDIES.items():
        log = study.run(**short[name])
        log.to_csv(tmp_path / "log.csv", index=False)
        study.draw(pd.read_csv(tmp_path / "log.csv"), tmp_path / name)
        assert (tmp_path / f"{name}.png").exists()
        assert (tmp_path / f"{name}.svg").exists()
    assert "parameter space" in capsys.readouterr().out
