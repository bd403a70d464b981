"""Outcomes that are categories without an order: one linear predictor of each category against the first."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import check_refusal, close
from test_bambi import model, prior

import torchngvi
from torchngvi.adapters.bambi import from_bambi
from torchngvi.cli import main
from torchngvi.tables import MixedModel, Normal, check_family, compare, fit_many, load, regression
from torchngvi.tables.families import Multinomial, family_of


def table(rows=150, seed=0, labels=("bus", "car", "train")):
    """Rows of two numbers and a column of categories, the outcome drawn by Gumbel's noise."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"x": rng.normal(2.0, 3.0, rows), "z": rng.normal(size=rows)})
    frame["sex"] = rng.choice(["f", "m"], rows)
    slopes = rng.normal(size=(3, len(labels))) * np.array([[0.5], [0.3], [1.0]])
    noise = rng.gumbel(size=(rows, len(labels)))
    utility = np.stack([frame.z, frame.x - 2, np.ones(rows)], 1) @ slopes + noise
    frame["y"] = np.array(labels, dtype=object)[utility.argmax(1)]
    return frame


@pytest.fixture(scope="module")
def fitted():
    return regression("y ~ x * sex + z", table(), "multinomial").fit(progress=False)


@pytest.mark.accuracy
@pytest.mark.parametrize(
    ("formula", "priors"),
    [
        ("y ~ x + sex", None),
        ("y ~ x + sex", {"b": Normal(0.1, 0.7), "Intercept": Normal(1.0, 2.0)}),
        ("y ~ 0 + x", "flat"),
        ("y ~ 0 + sex + x", {"b": Normal(0.1, 0.7)}),
        ("y ~ 1", {"Intercept": Normal(1.0, 2.0)}),
    ],
)
def test_two_categories_are_those_of_bernoulli(formula, priors):
    frame = table(labels=("no", "yes"))
    frame["w"] = np.random.default_rng(1).integers(0, 3, len(frame)).astype(float)
    one, two = (
        regression(formula, frame, family, priors=priors, weights="w").fit(progress=False)
        for family in ("bernoulli", "categorical")
    )
    for part in ("mean", "sd", "low", "high"):
        close(getattr(two.summary().fixed, part), getattr(one.summary().fixed, part), 1e-9)
    assert two.fixed_names == tuple(f"yes: {name}" for name in one.fixed_names)
    assert two.log_evidence == pytest.approx(one.log_evidence, abs=1e-9)
    close(two.predict(frame).mean[:, 1], one.predict(frame).mean, 1e-9)
    close(two.predict(frame, kind="linear").mean[:, 0], one.predict(frame, kind="linear").mean, 1e-9)
    close(two.leave_one_out().density, one.leave_one_out().density, 1e-8)
    assert len(two.remarks) == len(one.remarks)


def by_importance(frame, sd, draws=200_000):
    """Means and sds of the coefficients of `y ~ x + z` under N(0, sd²) of each, without the code that is tested."""
    X = torch.tensor(np.stack([np.ones(len(frame)), frame.x, frame.z], 1))
    y = torch.tensor(np.unique(frame.y, return_inverse=True)[1])
    K = int(y.max())

    def log_joint(b):  # (.., K 3)
        eta = torch.einsum("np,...kp->...nk", X, b.unflatten(-1, (K, 3)))
        every = torch.cat([torch.zeros_like(eta[..., :1]), eta], -1).log_softmax(-1)
        data = every.gather(-1, y.expand(every.shape[:-1])[..., None]).sum((-1, -2))
        return data - 0.5 * (b / sd).square().sum(-1)

    mode = torch.zeros(3 * K, dtype=torch.float64)
    for _ in range(40):
        H = torch.autograd.functional.hessian(log_joint, mode)
        mode = mode - torch.linalg.solve(H, torch.autograd.functional.jacobian(log_joint, mode))
    root = torch.linalg.cholesky(torch.linalg.inv(-H))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(draws, 3 * K, generator=generator, dtype=torch.float64)
    stretch = (5 / torch._standard_gamma(torch.full((draws, 1), 2.5, dtype=torch.float64), generator) / 2).sqrt()
    t = z * stretch
    log_q = -0.5 * (5 + 3 * K) * torch.log1p(t.square().sum(-1) / 5)
    b = mode + t @ root.mT
    weights = (torch.cat([log_joint(part) for part in b.split(5_000)]) - log_q).softmax(0)
    mean = weights @ b
    return mean, (weights @ (b - mean).square()).sqrt()


@pytest.mark.accuracy
def test_the_posterior_is_that_of_a_long_importance_sample():
    frame = table(60).assign(x=lambda rows: rows.x - rows.x.mean(), z=lambda rows: rows.z - rows.z.mean())
    mean, sd = by_importance(frame, 1.5)
    flat = dict.fromkeys(("b", "Intercept"), Normal(0.0, 1.5))
    found = regression("y ~ x + z", frame, "multinomial", priors=flat).fit(progress=False).summary().fixed
    assert float(((found.mean - mean) / sd).abs().max()) < 0.05
    assert float((found.sd / sd - 1).abs().max()) < 0.05


def test_the_mode_under_flat_priors_is_the_maximum_of_statsmodels():
    result = regression("y ~ x + z", table(400), "multinomial", priors="flat").fit(progress=False)
    mode = result.fitted.coordinates.to_user(result.fitted.mode[None]).coefficients[0]
    # MNLogit of statsmodels 0.15.0 on the same table
    expected = [-1.039096, -0.201231, -0.830769, -0.071693, -0.216576, -0.674009]
    sds = torch.tensor([0.18811, 0.05733, 0.17053, 0.13989, 0.04332, 0.12921]).double()
    assert float(((mode - torch.tensor(expected)) / sds).abs().max()) < 1e-3  # the root of the end of a search
    assert float((result.summary().fixed.sd / sds - 1).abs().max()) < 0.05


@pytest.mark.accuracy
def test_predictions_do_not_depend_on_which_category_is_the_reference():
    frame, levels = table(300), ("train", "bus", "car")
    other = frame.assign(y=pd.Categorical(frame.y, levels))
    one, two = (regression("y ~ x + z", of, "multinomial", priors="flat").fit(progress=False) for of in (frame, other))
    assert (one.outcomes, two.outcomes) == (("bus", "car", "train"), levels)
    (car, train), (bus, also) = one.fitted.mode.split(3), two.fitted.mode.split(3)
    close(torch.cat([bus, also]), torch.cat([-train, car - train]), 1e-4)
    p, q = one.predict(frame), two.predict(frame)
    apart = (q.mean[:, [1, 2, 0]] - p.mean) / p.sd
    assert float(apart.abs().max()) < 5 * math.sqrt(2 / 1000)
    assert two.log_evidence == pytest.approx(one.log_evidence, abs=0.05)


def test_derivatives_are_those_of_autograd():
    family, generator = family_of("multinomial"), torch.Generator().manual_seed(0)
    eta = torch.randn(6, 2, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    y = (torch.randint(4, (6, 1), generator=generator).double(),)
    value, slope, curvature = family.jet(eta, y, eta.new_zeros(0))
    close(value, -family.log_prob(eta, y, eta.new_zeros(0)), 0)
    (first,) = torch.autograd.grad(value.sum(), eta, create_graph=True)
    close(slope, first, 1e-12)
    for k in range(3):
        (row,) = torch.autograd.grad(first[..., k].sum(), eta, retain_graph=True)
        close(curvature[..., k, :], row, 1e-12)
    mean = family.averaged(eta, y, eta.new_zeros(0))
    close(mean[0], slope.mean(1), 1e-12)
    close(mean[1], curvature.mean(1), 1e-12)


def test_draws_have_the_probabilities_and_far_predictors_stay_finite():
    family, phi = Multinomial(("a", "b", "c")), torch.zeros(0, dtype=torch.float64)
    eta = torch.tensor([[0.3, -0.5]], dtype=torch.float64).expand(40_000, 2)
    drawn = family.draw(eta, phi, torch.Generator().manual_seed(0))
    share = torch.stack([(drawn == k).double().mean() for k in range(3)])
    close(share, family.mean(eta[0], phi), 5 * 0.5 / math.sqrt(40_000))
    far = torch.tensor([[800.0, -800.0]], dtype=torch.float64)
    for k in range(3):
        parts = family.jet(far, (torch.tensor([float(k)]).double(),), phi)
        assert all(bool(part.isfinite().all()) for part in parts)
    assert float(family.draw(far, phi, torch.Generator().manual_seed(0))) == 1.0


def test_names_blocks_and_ratios_of_the_table(fitted):
    columns = ("Intercept", "x", "sex[m]", "x:sex[m]", "z")
    assert fitted.fixed_names == tuple(f"{label}: {name}" for label in ("car", "train") for name in columns)
    said = str(fitted)
    assert said.startswith("each category of y is against bus, which comes first\nregression, multinomial: 150 rows")
    assert "odds ratios, e to the power of the fixed effects" in said
    assert "thresholds" not in said


def test_probabilities_sum_to_1_and_draws_are_codes(fitted):
    new = table(20, seed=1)
    found = fitted.predict(new, kind="probability")
    assert found.mean.shape == (20, 3)
    close(found.draws.sum(-1), torch.ones(1000, 20).double(), 1e-12)
    assert fitted.predict(new, kind="linear").mean.shape == (20, 2)
    drawn = fitted.predict(new, kind="response").draws
    assert set(drawn.unique().tolist()) == {0.0, 1.0, 2.0}
    close((drawn[..., None] == torch.arange(3.0)).double().mean(0), found.mean, 0.08)
    rows = fitted.predictions(new).table
    assert rows["outcome"].tolist()[:3] == ["bus", "car", "train"]
    linear = fitted.predictions({"x": [0.0, 1.0]}, kind="linear").table
    assert linear["outcome"].tolist() == ["car", "train"] * 2


@pytest.mark.accuracy
def test_marginal_effects_sum_to_0_and_are_differences(fitted):
    frame, h = fitted.formula.table, 1e-4
    for x in ("x", "z"):
        found = fitted.marginal_effects(x)
        close(found.draws.sum(1), torch.zeros(1000).double(), 1e-7)
        up, down = (fitted.predict(frame.assign(**{x: frame[x] + step})).draws for step in (h, -h))
        close(found.draws, ((up - down) / (2 * h)).mean(1), 1e-6)
    levels = fitted.marginal_effects("sex")
    close(levels.draws.sum(1), torch.zeros(1000).double(), 1e-12)
    pairs = fitted.contrasts("x", values=[0.0, 2.0])
    close(pairs.draws.sum(1), torch.zeros(1000).double(), 1e-12)
    ratios = fitted.contrasts("x", values=[0.0, 2.0], scale="ratio")
    assert bool((ratios.draws > 0).all())
    assert ratios.table["outcome"].tolist() == ["bus", "car", "train"]


@pytest.mark.accuracy
def test_left_out_rows_are_those_of_fits_without_them(fitted):
    found = fitted.leave_one_out()
    assert found.density.shape == (150,)
    assert not found.untrusted
    frame = fitted.formula.table
    for row in (0, 77):
        without = regression("y ~ x * sex + z", frame.drop(index=row), "multinomial").fit(progress=False)
        p = without.predict(frame.iloc[[row]]).mean[0, fitted.outcomes.index(frame.y[row])]
        assert float(found.density[row]) == pytest.approx(math.log(p), abs=0.05)
    less = regression("y ~ 1", frame, "multinomial").fit(progress=False)
    assert "predicts left-out rows better" in str(compare(fitted, less))


def test_a_saved_result_says_and_predicts_the_same(fitted, tmp_path):
    fitted.save(tmp_path / "a.pt")
    again, new = load(tmp_path / "a.pt"), table(9, seed=3)
    assert str(again) == str(fitted)
    close(again.predict(new).mean, fitted.predict(new).mean, 0)
    named = regression("y ~ x + z", table(), "multinomial", priors={"car: x": Normal(0, 0.1), "z": "normal(0, 2)"})
    result = named.fit(progress=False)
    result.save(tmp_path / "b.pt")
    assert load(tmp_path / "b.pt").settled.table() == result.settled.table()


def test_priors_by_the_name_of_a_coefficient_of_a_column_and_of_all():
    given = {"car: x": Normal(0, 0.1), "x": Normal(0, 0.2), "b": Normal(0, 0.3), "Intercept": Normal(0, 9)}
    found = dict(regression("y ~ x + z", table(), "multinomial", priors=given).priors.table())
    assert found == {
        "car: Intercept": "N(0, 9^2)",
        "car: x": "N(0, 0.1^2)",
        "car: z": "N(0, 0.3^2)",
        "train: Intercept": "N(0, 9^2)",
        "train: x": "N(0, 0.2^2)",
        "train: z": "N(0, 0.3^2)",
    }
    default = dict(regression("y ~ x", table(), "multinomial").priors.table())
    two = table()[table().y != "train"]
    assert dict(regression("y ~ x", two, "bernoulli").priors.table())["Intercept"] == default["car: Intercept"]
    said = regression("y ~ 0 + sex", table(), "multinomial").priors.describe()
    assert said.count("for each of the 2 levels") == 2
    wrong = lambda: regression("y ~ x", table(), "multinomial", priors={"bike: x": Normal(0, 1)})  # noqa: E731
    check_refusal(wrong, ("bike: x", "car: x"))


def test_pictures_and_arviz(fitted):
    pytest.importorskip("matplotlib")
    labels = [text.get_text() for text in fitted.plot().get_yticklabels()]
    assert "car: x" in labels
    assert "car: Intercept" not in labels
    assert len(labels) == 8
    assert len(fitted.plot_marginal("x", points=5).get_lines()) == 3
    fitted.plot_predictive(draws=20)
    pytest.importorskip("arviz")
    data = fitted.to_arviz()
    assert data["posterior"]["beta"].shape[-1] == 10
    assert data["log_likelihood"]["y"].shape[-1] == 150


def test_weights_count_rows():
    frame = table(60)
    twice, weighted = pd.concat([frame, frame[:20]]), frame.assign(w=[2.0] * 20 + [1.0] * 40)
    priors = dict.fromkeys(("b", "Intercept"), Normal(0.0, 2.0))
    one = regression("y ~ x", twice, "multinomial", priors=priors).fit(progress=False)
    two = regression("y ~ x", weighted, "multinomial", priors=priors, weights="w").fit(progress=False)
    assert two.log_evidence == pytest.approx(one.log_evidence, abs=0.3)  # other centres of the columns
    close(two.summary().fixed.mean, one.summary().fixed.mean, 1e-2)


LABELS = {
    "texts": (["b", "a", "c"] * 20, ("a", "b", "c")),
    "numbers": ([3, 1, 20] * 20, ("1", "3", "20")),
    "an order": (pd.Categorical(["low", "mid", "high"] * 20, ["low", "mid", "high", "none"]), ("low", "mid", "high")),
    "booleans": ([True, False, True] * 20, ("False", "True")),
}


@pytest.mark.parametrize("kind", LABELS)
def test_the_reference_is_the_first_level(kind):
    values, outcomes = LABELS[kind]
    frame = pd.DataFrame({"y": values, "x": np.random.default_rng(0).normal(size=60)})
    result = regression("y ~ x", frame, "softmax").fit(progress=False)
    assert tuple(map(str, result.outcomes)) == outcomes
    assert result.converged
    assert result.fixed_names[0] == f"{outcomes[1]}: Intercept"
    shares = result.predict(frame).mean.mean(0)
    close(shares, torch.full_like(shares, 1 / 3) if len(outcomes) == 3 else torch.tensor([1 / 3, 2 / 3]).double(), 0.03)


def test_arrays_are_fitted_as_tables_are():
    frame = table(labels=(2, 5, 7))
    X = np.stack([np.ones(len(frame)), frame.x], 1)
    one = MixedModel(X, frame.y.astype(float), family="multinomial", names=["Intercept", "x"]).fit(progress=False)
    two = regression("y ~ x", frame.assign(y=frame.y.astype(int)), "multinomial").fit(progress=False)
    close(one.summary().fixed.mean, two.summary().fixed.mean, 1e-9)
    assert one.outcomes == ("2", "5", "7")
    check_refusal(lambda: one.predict(X[:3], offset=[1.0, 0.0, 0.0]), ("offset", "multinomial"))


@pytest.mark.accuracy
def test_many_categories_one_of_them_seen_once():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"y": [f"k{k}" for k in rng.integers(0, 40, 600)], "x": rng.normal(size=600)})
    frame.loc[0, "y"] = "once"
    result = regression("y ~ x", frame, "multinomial").fit(progress=False)
    assert result.converged
    assert len(result.fixed_names) == 80
    found = result.predict(frame).mean
    seen = torch.tensor([(frame.y == label).mean() for label in result.outcomes])
    close(found.mean(0), seen, 0.01)


@pytest.mark.accuracy
def test_many_coefficients_come_from_the_nearest_gaussian():
    """Its mean has expectations of the gradient that are 0, of other draws than those that found it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(120, 12)), columns=[f"x{k}" for k in range(12)])
    frame["y"] = rng.choice(["a", "b", "c", "d"], 120, p=[0.6, 0.3, 0.05, 0.05])
    result = regression("y ~ " + " + ".join(frame.columns[:-1]), frame, "multinomial").fit(progress=False)
    joint = result.fitted.joint
    mode, root = result.fitted.mode, result.fitted.near.root
    mean, root = joint.nearest(mode, root, torch.Generator().manual_seed(1))
    z = torch.randn(4000, len(mean), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theta = mean + torch.cat([z, -z]) @ root.mT
    slope = joint.with_gradient(theta, joint.start()[1].expand(-1, len(theta), -1)).gradient.mean(0)
    at_mode = joint.with_gradient(
        mode + torch.cat([z, -z]) @ root.mT, joint.start()[1].expand(-1, len(theta), -1)
    ).gradient.mean(0)
    assert float((slope @ root).norm()) < 0.35 * float((at_mode @ root).norm())


def test_separated_classes_stay_finite_and_are_said():
    frame = table(90).assign(y=["a"] * 30 + ["b"] * 30 + ["c"] * 30, x=np.arange(90.0))
    result = regression("y ~ x", frame, "multinomial").fit(progress=False)
    assert result.converged
    assert bool(result.summary().fixed.mean.isfinite().all())
    assert any(line.startswith("b, c against a: x separates the classes") for line in result.remarks)
    middle = result.predict(frame.iloc[[5, 45, 85]]).mean
    assert middle.argmax(1).tolist() == [0, 1, 2]


REFUSED = {
    "a grouping factor": (lambda: regression("y ~ x + (1 | sex)", table(), "multinomial"), ("sex", "bernoulli")),
    "an offset": (lambda: regression("y ~ x + offset(z)", table(), "multinomial"), ("offset", "reference")),
    "one category": (lambda: regression("y ~ x", table().assign(y="a"), "multinomial"), ("a in all rows",)),
    "60 categories": (
        lambda: regression("y ~ x", table(120).assign(y=[f"c{k // 2}" for k in range(120)]), "multinomial"),
        ("60 different values", "Put rare ones together"),
    ),
    "a missing cell": (
        lambda: regression("y ~ x", table().assign(y=["a", None, "b"] * 50), "multinomial"),
        ("misses values", "50 of y"),
    ),
    "a success": (lambda: regression("y ~ x", table(), "multinomial", positive="car"), ("'car'", "bernoulli")),
    "an ordinal outcome of texts": (lambda: regression("y ~ x", table(), "bernoulli"), ("'multinomial'",)),
    "a check of the family": (lambda: check_family(family_of("multinomial")), ("one linear predictor",)),
    "many outcomes": (
        lambda: fit_many(regression("x ~ z", table()).design, torch.zeros(2, 150), "multinomial"),
        ("one by one",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_there_is_refused_by_a_sentence(case):
    check_refusal(REFUSED[case][0], REFUSED[case][1])


@pytest.mark.accuracy
def test_the_command_line_fits_and_predicts(tmp_path, capsys):
    frame = table(80)
    frame.to_csv(tmp_path / "ways.csv", index=False)
    out = str(tmp_path / "run")
    asked = ["fit", "--data", str(tmp_path / "ways.csv"), "--formula", "y ~ x + sex", "--family", "multinomial"]
    main([*asked, "--prior", "car: x=normal(0, 0.1)", "--prior", "sex[m]=normal(0, 2)", "--out", out, "--no-progress"])
    said = " ".join(capsys.readouterr().out.split())
    assert "car: sex[m]" in said
    assert "baselines sex = f" in said
    priors = dict(torchngvi.load(out).result.settled.table())
    assert (priors["car: x"], priors["train: sex[m]"]) == ("N(0, 0.1^2)", "N(0, 2^2)")
    for kind, columns in (
        ("mean", ["class", "bus", "car", "train"]),
        ("probability", ["class", "bus", "car", "train"]),
        ("linear", ["car", "train"]),
        ("response", ["response", "low", "high"]),
    ):
        assert list(torchngvi.load(out).predict(frame, kind=kind).columns) == columns
    main(["predict", out, str(tmp_path / "ways.csv")])
    assert "probabilities of the categories of y" in capsys.readouterr().out


def test_a_number_for_the_precision_is_that_of_each_coefficient(tmp_path, capsys):
    table(80).to_csv(tmp_path / "ways.csv", index=False)
    asked = ["fit", "--data", str(tmp_path / "ways.csv"), "--target", "y", "--family", "multinomial"]
    main([*asked, "--prior-precision", "0.5", "--out", str(tmp_path / "run"), "--no-progress"])
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "(precision 0.5), intercept at the means N(0, 10^2) " in said
    scale = torchngvi.load(str(tmp_path / "run")).result.fitted.coordinates.scales[1]
    prior = torchngvi.load(str(tmp_path / "run")).result.settled.coefficients[1]
    assert prior.sd * float(scale) == pytest.approx(math.sqrt(2))


def test_a_categorical_model_of_bambi_is_the_same():
    given = model("kind ~ x + y", "categorical", "softmax", {"x": prior("Normal", mu=0.0, sigma=0.7)})
    made = from_bambi(given)
    found = dict(made.priors.table())
    assert made.family.name == "multinomial"
    assert (found["b: x"], found["c: x"]) == ("N(0, 0.7^2)", "N(0, 0.7^2)")
    several = model("kind ~ x", "categorical", "softmax", {"x": prior("Normal", mu=0.0, sigma=np.array([1.0, 2.0]))})
    check_refusal(lambda: from_bambi(several), ("prior of x", "one for all categories"))
