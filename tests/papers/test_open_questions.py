"""The studies of open questions: local coordinates, ratios and floors against closed forms, short runs."""

import pandas as pd
import pytest
import torch

from examples.papers import open_questions
from examples.papers.open_questions import mean_field
from examples.papers.open_questions.batches import expected, geometric_constant
from examples.papers.open_questions.floor import METHODS, biases, estimator, gaussian, stationary
from examples.papers.open_questions.local import Ends, flattened, hessian, moved, noise, unflattened
from examples.papers.open_questions.normalised import noise_vectors, normalised_floor
from examples.papers.open_questions.problems import counts, exact_loss, few, repeated, solved
from examples.papers.open_questions.rate import copied, inner, ratios, smoothness
from torchngvi import VN, CholeskyGaussian, DiagonalGaussian, GeneralizedLinear, Snngm
from torchngvi.expectations import BonnetPrice, Independent, Quadrature
from torchngvi.momentum import NormalizedMomentum
from torchngvi.stepsizes import Constant
from torchngvi.theory.wu2024 import limiting_variance

DTYPE = torch.float64


def somewhere(dim=3, members=4):
    generator = torch.Generator().manual_seed(5)
    root = 0.3 * torch.randn(members, dim, dim, dtype=DTYPE, generator=generator).tril(-1)
    root = root + torch.diag(torch.linspace(0.5, 1.2, dim, dtype=DTYPE))
    mean = torch.randn(members, dim, dtype=DTYPE, generator=generator)
    return CholeskyGaussian(dim, (members,), mean=mean, scale=root, dtype=DTYPE)


class TestLocal:
    def test_lengths_are_those_of_the_natural_norm(self):
        q = somewhere()
        g = q.local(Quadrature()(q, counts(dim=3)))
        u = flattened(g.a, g.P)
        assert u.square().sum(-1).numpy() == pytest.approx(q.norm2(g).numpy(), rel=1e-12)
        a, P = unflattened(u, 3)
        assert a.numpy() == pytest.approx(g.a.numpy())
        assert P.numpy() == pytest.approx(g.P.numpy())

    def test_half_a_squared_length_is_the_divergence(self):
        q, _ = solved(few())
        u = 1e-3 * torch.randn(5, 14, dtype=DTYPE, generator=torch.Generator().manual_seed(0))
        assert moved(q, u).kl(q).detach().numpy() == pytest.approx(0.5 * u.square().sum(-1).numpy(), rel=3e-3)

    def test_the_hessian_of_a_conjugate_model_is_the_identity(self):
        q, _ = solved(gaussian())
        assert hessian(q, gaussian()).numpy() == pytest.approx(torch.eye(9).numpy(), abs=1e-7)

    @pytest.mark.parametrize("make", [counts, few])
    def test_the_hessian_is_that_of_the_loss(self, make):
        model = make()
        q, least = solved(model)
        J, u = hessian(q, model), 1e-2 * torch.randn(6, len(hessian(q, model)), dtype=DTYPE,
                                                     generator=torch.Generator().manual_seed(0))  # fmt: skip
        rise = 0.5 * (exact_loss(moved(q, u), model) + exact_loss(moved(q, -u), model)) - least
        assert rise.numpy() == pytest.approx((0.5 * ((u @ J) * u).sum(-1)).numpy(), rel=5e-3)

    def test_the_noise_of_mini_batches_has_the_trace_of_the_theorem(self):
        """V∞ = tr(F Cov η̂) of `limiting_variance`, over all rows as batches of one."""
        model = gaussian()
        q, _ = solved(model)
        index = torch.arange(12)
        single = GeneralizedLinear(model.X[index[:, None]], model.y[index[:, None]], "gaussian",
                                   weights=torch.full((12, 1), 12.0, dtype=DTYPE))  # fmt: skip
        star = repeated(q, 12)
        u = flattened(*star.local(Quadrature()(star, single)))
        assert float((u - u.mean(0)).square().sum(-1).mean()) == pytest.approx(limiting_variance(model, q, 1), rel=1e-9)

    def test_price_on_a_gaussian_model_leaves_the_noise_of_the_mean(self):
        q, _ = solved(gaussian())
        covariance = noise(
            repeated(q, 50), gaussian(), BonnetPrice(Independent(1, torch.Generator().manual_seed(0))), 40
        )
        A = torch.eye(3, dtype=DTYPE) - q.scale_tril.mT @ q.scale_tril  # the prior's share of the gradient is exact
        assert covariance[:3, :3].numpy() == pytest.approx((A @ A).numpy(), abs=0.08)
        assert float(covariance[3:, 3:].abs().max()) < 1e-20

    def test_limits(self):
        """Conjugate: 2/3 V∞ under 2/(2 + t), ½ V∞ under 1/t; a slope of J at ¼ or below breaks the rate."""
        ends = Ends(torch.ones(2, dtype=DTYPE), torch.tensor([1.0, 2.0], dtype=DTYPE))
        assert float(ends.decreasing(2.0)) == pytest.approx(2.0)
        assert float(ends.decreasing(1.0)) == pytest.approx(1.5)
        assert float(Ends(torch.tensor([0.25, 1.0]), torch.ones(2)).decreasing(2.0)) == float("inf")


class TestRatios:
    def test_all_are_one_on_a_conjugate_model_from_anywhere(self):
        model, q = gaussian(), somewhere()
        _, least = solved(model)
        after = copied(q)
        VN(after, lr=0.3).step(model)
        assert ratios(q, model, least)["bregman"].numpy() == pytest.approx([1.0] * 4, rel=1e-9)
        assert smoothness(q, after, model).numpy() == pytest.approx([1.0] * 4, rel=1e-9)

    def test_the_product_is_that_of_the_expectation_parameters(self):
        """⟨∇_ξ, Δm⟩ + ⟨∇_Ξ, ΔΞ⟩ with ∇_Ξ = G, ∇_ξ = g - 2Gm, Ξ = V + mmᵀ."""
        model, q = counts(dim=3), somewhere()
        after = copied(q)
        VN(after, lr=0.3).step(model)
        e = Quadrature()(q, model)
        g, H = q.unframe(q.local(e).a, q.local(e).P + torch.eye(3, dtype=DTYPE))
        G = 0.5 * (H - torch.cholesky_inverse(q.scale_tril))
        outer = [each.covariance + each.mean[..., None] * each.mean[..., None, :] for each in (q, after)]
        first = g - 2 * (G @ q.mean[..., None])[..., 0]
        expected = (first * (after.mean - q.mean)).sum(-1) + (G * (outer[1] - outer[0])).sum((-2, -1))
        assert inner(q, e, after).numpy() == pytest.approx(expected.numpy(), rel=1e-9)

    def test_near_the_optimum_the_natural_ratio_is_within_the_eigenvalues(self):
        model = few()
        star, least = solved(model)
        J = hessian(star, model)
        u = 1e-2 * torch.linalg.eigh(J)[1].mT
        found = ratios(moved(star, u), model, least)["natural"]
        assert found.numpy() == pytest.approx(torch.linalg.eigvalsh(J).numpy(), rel=2e-2)


class TestFloor:
    @pytest.mark.accuracy
    def test_price_on_a_gaussian_model_has_the_floor_in_closed_form(self):
        """½ γ/(2 - γ) tr A²/S exactly, A the likelihood's share; V stays at V*, and both methods take one step."""
        model, gamma, ends = gaussian(), 0.2, []
        star, least = solved(model)
        A = torch.eye(3, dtype=DTYPE) - star.scale_tril.mT @ star.scale_tril
        for make in METHODS.values():
            q = repeated(star, 400)
            opt = make(q, lr=gamma, estimator=estimator("Price", 2))
            found = stationary(opt, q, model, 40, looks=40)
            ends.append(found["loss"])
            exact = 0.5 * gamma / (2 - gamma) * float(A.square().sum()) / 2
            assert float((found["loss"] - least).mean()) == pytest.approx(exact, rel=0.03)
            assert found["log_det"].numpy() == pytest.approx(2 * float(star.log_det_root()), abs=1e-10)
        assert ends[0].numpy() == pytest.approx(ends[1].numpy(), abs=1e-12)

    @pytest.mark.accuracy
    def test_both_floors_are_one_and_the_variances_are_off_to_either_side(self):
        """From the same draws: E[V⁻¹] = Λ under VN, and log det V is off as derived."""
        model, gamma = gaussian(dim=1), 0.05
        star, least = solved(model)
        covariance = noise(repeated(star, 500), model, estimator("reparametrised", 4), 100)
        expected, floor = (
            biases(covariance, 1, gamma),
            float(Ends.of(torch.eye(2, dtype=DTYPE), covariance).constant(gamma)),
        )
        for method, make in METHODS.items():
            q = repeated(star, 2000)
            opt = make(q, lr=gamma, estimator=estimator("reparametrised", 4))
            found = stationary(opt, q, model, 120, looks=12)
            assert float((found["loss"] - least).mean()) == pytest.approx(floor, rel=0.08)
            away = found["log_det"] - 2 * star.log_det_root()
            assert float(away.mean()) == pytest.approx(expected[method], rel=0.15)
            if method == "VN":
                assert float(torch.exp(-away).mean()) == pytest.approx(1, abs=0.003)


class TestBatches:
    def test_geometric_growth_has_the_limit_in_closed_form(self):
        """And no pair of step and ratio is below ½, the limit of 1/(1 + t)."""
        ends = Ends(torch.ones(1, dtype=DTYPE), torch.ones(1, dtype=DTYPE))
        spent, gap = expected(ends, lambda t: (0.5, 1.5**t), 1.0, 10**7)[-1]
        assert spent * gap == pytest.approx(geometric_constant(0.5, 1.5), rel=1e-3)
        assert geometric_constant(0.1, 1.5) == float("inf")
        grid = [(gamma / 20, 1 + ratio / 20) for gamma in range(1, 21) for ratio in range(1, 200)]
        assert min(geometric_constant(*pair) for pair in grid) >= 0.5 - 1e-12
        for gamma in (0.05, 0.2, 0.7):  # all draws of one weight
            assert geometric_constant(gamma, 1 / (1 - gamma)) == pytest.approx(0.5)
        spent, gap = expected(ends, lambda t: (1 / (1 + t), 1), 1.0, 3000)[-1]
        assert spent * gap == pytest.approx(0.5, rel=1e-3)

    @pytest.mark.accuracy
    def test_the_recursion_tends_to_the_limits_of_constant_and_falling_steps(self):
        ends = Ends(torch.tensor([0.6, 1.5], dtype=DTYPE), torch.tensor([2.0, 1.0], dtype=DTYPE))
        _, gap = expected(ends, lambda t: (0.2, 1), 1.0, 400)[-1]
        assert gap == pytest.approx(float(ends.constant(0.2)), rel=1e-6)
        t, gap = expected(ends, lambda t: (2 / (t + 10), 1), 1.0, 20_000)[-1]
        assert t * gap == pytest.approx(float(ends.decreasing(2.0)), rel=1e-2)


class TestNormalised:
    def test_isotropic_noise_in_closed_form(self):
        """Directions on a circle, |ε| = 2: M = ½ · ½ I, N = ½ I, S = α I, and for skew ones u = -(MJ)⁻¹ E[ε̂]."""
        angle = torch.linspace(0, 2 * torch.pi, 721, dtype=DTYPE)[:-1]
        vectors = 2 * torch.stack([angle.cos(), angle.sin()], -1)
        spread, bias = normalised_floor(torch.eye(2, dtype=DTYPE), vectors, 0.03)
        assert spread == pytest.approx(0.03)
        assert bias == pytest.approx(0, abs=1e-20)
        line = torch.tensor([[-1.0, 1.0], [-1.0, -1.0], [3.0, 0.5], [-1.0, -0.5]], dtype=DTYPE)  # mean 0, and skew
        length = line.norm(dim=-1, keepdim=True)
        unit = line / length
        M = (torch.eye(2, dtype=DTYPE) - unit[:, :, None] * unit[:, None]).div(length[..., None]).mean(0)
        away = torch.linalg.solve(M, unit.mean(0))
        assert line.mean(0).tolist() == [0.0, 0.0]
        found = normalised_floor(torch.eye(2, dtype=DTYPE), line, 0.03)[1]
        assert found == pytest.approx(0.5 * float(away @ away))
        assert found > 0.01

    @pytest.mark.accuracy
    def test_price_on_a_gaussian_model_has_the_predicted_floor(self):
        model, step = gaussian(), 0.03
        star, least = solved(model)
        vectors = noise_vectors(repeated(star, 500), model, estimator("Price", 16, seed=1), 10)
        q = repeated(star, 300)
        opt = Snngm(q, lr=step, estimator=estimator("Price", 16), momentum=NormalizedMomentum("riemannian", beta=0.5))
        found = stationary(opt, q, model, 150)
        expected = sum(normalised_floor(torch.eye(9, dtype=DTYPE), vectors, step))
        assert float((found["loss"] - least).mean()) == pytest.approx(expected, rel=0.1)


class TestMeanField:
    def test_on_a_gaussian_target_the_hessian_is_the_scaled_precision(self):
        """D^-½ Λ D^-½ for the means, the identity for the variances, and nothing between them."""
        model = gaussian()
        star, _ = mean_field.solved(model)
        precision = model.X.mT @ model.X + torch.eye(3, dtype=DTYPE)
        scale = precision.diagonal().rsqrt()
        expected = torch.block_diag(scale[:, None] * precision * scale, torch.eye(3, dtype=DTYPE))
        assert mean_field.hessian(star, model).numpy() == pytest.approx(expected.numpy(), abs=1e-7)
        assert star.stddev.detach().numpy() == pytest.approx(scale.numpy(), rel=1e-9)

    def test_a_full_step_is_that_of_jacobi(self):
        """m' = D⁻¹(Xᵀy - (Λ - D)m), whatever the variances were."""
        model = gaussian()
        precision = model.X.mT @ model.X + torch.eye(3, dtype=DTYPE)
        q = DiagonalGaussian(3, mean=torch.tensor([1.0, -2.0, 0.5], dtype=DTYPE), scale=0.7, dtype=DTYPE)
        before = q.mean.clone()
        VN(q, lr=1.0, step_size=Constant()).step(model)
        D = precision.diagonal()
        expected = (model.X.mT @ model.y - (precision - torch.diag(D)) @ before) / D
        assert q.mean.detach().numpy() == pytest.approx(expected.numpy(), rel=1e-9)

    @pytest.mark.accuracy
    @pytest.mark.parametrize("make", [counts, few])
    def test_full_steps_grow_by_the_largest_distance_of_an_eigenvalue_from_one(self, make):
        model = make()
        star, _ = mean_field.solved(model)
        away = (1 - torch.linalg.eigvalsh(mean_field.hessian(star, model))).abs().max()
        assert mean_field.full_step_factor(star, model) == pytest.approx(float(away), rel=3e-3)


@pytest.mark.accuracy
def test_studies_run_and_draw_from_their_log(tmp_path, capsys):
    short = {
        "rate": {"models": ("logistic, 30 rows",), "runs": 3, "length": 12, "points": 3},
        "floor": {"targets": ("Gaussian",), "steps": (0.4,), "runs": 3, "burn": 1.0},
        "batches": {"models": ("logistic, 30 rows",), "draws": 60, "runs": 2},
        "mean-field": {"models": ("logistic, 30 rows",), "runs": 2, "length": 12},
        "normalised": {"targets": ("Gaussian",), "steps": (0.2,), "runs": 2, "burn": 1.0},
        "curves": {"targets": ("logistic, 30 rows",), "steps": (0.3,), "divisions": (4,), "noisy_steps": (0.3,),
                   "runs": 2, "most": 5},
    }  # fmt: skip
    assert set(short) == set(open_questions.STUDIES)
    for name, study in open_questions.STUDIES.items():
        log = study.run(**short[name])
        log.to_csv(tmp_path / "log.csv", index=False)
        study.draw(pd.read_csv(tmp_path / "log.csv"), tmp_path / name)
        assert (tmp_path / f"{name}.png").exists()
        assert (tmp_path / f"{name}.svg").exists()
    assert "logistic, 30 rows" in capsys.readouterr().out
