"""`python -m examples.compare_methods`: settings, runs, published values, files, sentences."""

import gzip
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.io
import torch

from examples.compare_methods import bounds, comparison, datasets, experiments, plots, settings
from examples.compare_methods.__main__ import main
from torchngvi.errors import InputError, PairError

COMPARE = Path(__file__).parents[2] / "configs" / "compare.toml"
NEEDS_DATA = pytest.mark.skipif(
    not (Path(os.environ.get("TORCHNGVI_DATA", ".")) / "libsvm").is_dir(),
    reason="needs TORCHNGVI_DATA, a folder with libsvm/*.svm.gz",
)
# prior precision, and train, test NLL and accuracy at the optimum, with exact expectations
CONVERGED = {
    "australian_scale": (1e-5, 196.7765, 54.598, 0.8768),
    "breast-cancer_scale": (1e-1, 52.8071, 13.610, 0.9562),
}
# prior precision, and train at the optimum with the best 20 pieces and with the published ones
PIECES = {
    "australian_scale": (1e-5, 196.8165, 196.8276),
    "diabetes_scale": (1e-2, 301.1736, 301.1826),
    "breast-cancer_scale": (1e-1, 52.8477, 52.8626),
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def one_case(**keys):
    contenders = keys.pop("methods", [{"method": "vn", "lr": 0.3}, {"method": "srvn", "lr": 0.3}])
    case = {"name": "c", "data": "synthetic", "rows": 60, "features": 3, "iterations": 5, **keys}
    return {"title": "t", "cases": [{**case, "methods": contenders}], "starts": 2, "start_sd": 0.5}


class TestSettings:
    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            ({"iteratons": 3}, r"unknown key 'iteratons' in cases\[0\] .* Did you mean 'iterations'\?"),
            ({"methods": [{"method": "srvm"}]}, r"method must be one of .* Did you mean 'srvn'\?"),
            ({"methods": [{"method": "bwgd"}]}, "method bwgd needs a step .* set lr"),
            ({"methods": [{"method": "bwgd", "posterior": "natural", "lr": 1}]}, "BuresWasserstein moves q by Affine"),
            ({"methods": [{"method": "vn", "lr": -1}]}, "lr must be positive"),
            ({"methods": [{"method": "vn", "draws": 4}]}, "steps found by trial need exact values"),
            ({"methods": [{"method": "vn"}, {"method": "vn"}]}, "give one a label"),
            ({"methods": []}, "names no methods"),
            ({"iterations": 2.5}, "must be a whole number; got 2.5"),
            ({"iterations": 0}, "iterations must be positive"),
            ({"estimator": "exact"}, "estimator must be one of"),
            ({"methods": "vn"}, "must be a list"),
            ({"methods": ["vn"]}, "must be a table"),
        ],
    )
    def test_what_is_refused(self, keys, sentence):
        with pytest.raises((InputError, PairError), match=sentence):
            settings.parsed(one_case(**keys))

    def test_the_file_of_settings_parses(self):
        experiment = settings.read(COMPARE)
        assert experiment.cases
        assert settings.read(COMPARE, full=True) == experiment

    def test_columns(self):
        with pytest.raises(InputError, match="the metric of a column .* Did you mean 'objective'"):
            settings.parsed({**one_case(), "columns": ["objectiv over iteration"]})

    def test_a_title_is_needed(self):
        with pytest.raises(InputError, match="the experiment has no title"):
            settings.parsed({"cases": []})


class TestRuns:
    def test_log(self):
        experiment = settings.parsed(one_case())
        log = experiments.run_all(experiment, say=lambda _: None)
        assert set(log["start"]) == {0, 1}
        assert set(log["method"]) == {"vn", "srvn"}
        assert log["iteration"].max() == 5
        assert np.isfinite(log[["objective", "train", "test_nll", "test_accuracy"]]).all(axis=None)
        first = log[log["iteration"] == 0].pivot_table(index="start", columns="method", values="objective")
        assert (first["vn"] == first["srvn"]).all()  # the same starts

    def test_test_nll_is_the_sum_of_expected_losses(self):
        experiment = settings.parsed(one_case())
        case = experiment.cases[0]
        problem = experiments.build(case)
        q = experiments.start(case, case.methods[0], problem, experiment)
        row = experiments.run(case, case.methods[0], experiment, problem).iloc[0]
        held_out = problem.held_out
        with torch.no_grad():
            moments = held_out.likelihood.expected(
                q.mean @ held_out.X.mT, q.frame().rows(held_out.X).square().sum(-1), held_out.y
            )
        assert row["test_nll"] == pytest.approx(float(moments.value.sum(-1)[0]), rel=1e-12)

    def test_the_starts_draw_rows_of_their_own(self):
        """From one mean, so that they would stay together on the same rows; their average batch is that of all rows."""
        methods = [{"method": "srvn", "lr": 0.1, "batch": 16}]
        experiment = settings.parsed(one_case(methods=methods, iterations=3) | {"start_sd": 0.0, "starts": 4})
        log = experiments.run_all(experiment, say=lambda _: None)
        assert log[log["iteration"] == 0]["objective"].nunique() == 1
        assert log[log["iteration"] == 3]["objective"].round(6).nunique() == 4
        model = experiments.build(experiment.cases[0]).model
        rows = torch.arange(len(model.y) // 2 * 2).reshape(2, -1)
        batch = experiments._minibatch(model, rows)
        assert torch.equal(batch.X, model.X[rows])
        assert torch.equal(batch.y, model.y[rows])
        assert batch.weights == pytest.approx(torch.full(rows.shape, len(model.y) / rows.shape[1]).numpy())

    @pytest.mark.parametrize(
        "contender",
        [
            {"method": "vn"},
            {"method": "vn", "posterior": "natural", "lr": 0.3},
            {"method": "srvn", "posterior": "diagonal", "lr": 0.3},
            {"method": "srvn", "lr": 0.1, "batch": 16, "draws": 4},
            {"method": "svgd", "lr": 0.01},
            {"method": "covariance_gd", "lr": 0.01},
            {"method": "iblr", "posterior": "precision", "lr": 0.3},
            {"method": "snngm", "posterior": "precision", "batch": 16, "draws": 4},
        ],
        ids=lambda contender: "-".join(map(str, contender.values())),
    )
    def test_every_kind_of_run_descends(self, contender):
        log = experiments.run_all(settings.parsed(one_case(methods=[contender], iterations=20)), say=lambda _: None)
        means = log.groupby("iteration")["objective"].mean()
        assert means.iloc[-1] < means.iloc[0]

    def test_regularisers(self):
        values = []
        for penalty in ("", "mean", "expected"):
            experiment = settings.parsed(one_case(penalty=penalty))
            values.append(experiments.run_all(experiment, say=lambda _: None)["objective"].iloc[0])
        assert values[0] < min(values[1:])

    @NEEDS_DATA
    @pytest.mark.parametrize("name", CONVERGED)
    def test_values_of_table_3(self, name):
        """By the path of ``reproduce``, with steps found by trial."""
        beta, train, nll, right = CONVERGED[name]
        keys = one_case(data=name, prior_precision=beta, iterations=80, points=4, methods=[{"method": "vn"}])
        last = comparison.last_values(experiments.run_all(settings.parsed(keys), say=lambda _: None)).iloc[0]
        assert round(last["train"], 4) == train
        assert round(last["test_nll"], 3) == nll
        assert round(last["test_accuracy"], 4) == right

    @pytest.mark.sparse(2)
    @NEEDS_DATA
    @pytest.mark.parametrize("name", PIECES)
    @pytest.mark.parametrize("place", [0, 1], ids=["best", "published"])
    def test_values_with_20_pieces(self, name, place):
        """The published table of pieces gives every printed digit, cut off; the best 20 pieces are below it."""
        beta, *values = PIECES[name]
        keys = one_case(data=name, prior_precision=beta, iterations=80, points=4, methods=[{"method": "vn"}],
                        estimator="piecewise", bound=(bounds.PUBLISHED if place else ""))  # fmt: skip
        if place and not datasets.beside(bounds.PUBLISHED).is_file():
            pytest.skip(f"needs {bounds.PUBLISHED} in TORCHNGVI_DATA")
        last = comparison.last_values(experiments.run_all(settings.parsed(keys), say=lambda _: None)).iloc[0]
        assert round(last["train"], 4) == values[place]

    @pytest.mark.accuracy
    @NEEDS_DATA
    def test_published_path(self, capsys):
        """SR-VN and BW-GD on Mushrooms, ten steps of Table 2 from m0 = 0, C0 = 1: BW-GD is behind."""
        methods = [{"method": "srvn", "lr": 2.5e-4}, {"method": "bwgd", "lr": 8.5e-5}]
        keys = one_case(data="mushrooms", prior_precision=1e-2, iterations=10, points=2, methods=methods)
        log = experiments.run_all(settings.parsed({**keys, "starts": 1, "start_sd": 0.0}))
        train = comparison.last_values(log).set_index("method")["train"]
        assert train["srvn"] < train["bwgd"]
        assert "mushrooms" not in capsys.readouterr().err


class TestCommands:
    @pytest.mark.accuracy
    def test_compare_from_flags(self, capsys):
        code = main(["--data", "breast_cancer", "--methods", "vn", "bwgd=1e-3", "--iterations", "4",
                     "--starts", "2", "--out", "here"])  # fmt: skip
        assert code == 0
        assert {path.name for path in Path("here").iterdir()} == {
            "log.csv",
            "manifest.json",
            "settings.json",
            "compare.png",
            "compare.svg",
        }
        assert set(pd.read_csv("here/log.csv")["method"]) == {"vn", "bwgd=1e-3"}
        assert "bwgd=1e-3" in capsys.readouterr().out

    def test_gaussian_noise_of_a_file_is_one(self):
        """As before it could be set: the published quadratics have the noise 1, and those of flags that of fit."""
        case = settings.parsed(one_case(family="gaussian")).cases[0]
        assert experiments.build(case).model.likelihood.noise == 1
        assert experiments.build(settings.replaced(case, noise=2.0)).model.likelihood.noise == 2

    @pytest.mark.accuracy
    def test_compare_from_a_file(self):
        text = COMPARE.read_text().replace("iterations = 60", "iterations = 3")
        Path("mine.toml").write_text(text)
        assert main(["mine.toml"]) == 0
        assert Path("runs/mine/compare.png").stat().st_size > 10_000

    @pytest.mark.parametrize(
        ("flags", "sentence"),
        [
            ([], "data is missing"),
            (["--data", "breast_cancer", "--methods", "vn=fast"], "METHOD or METHOD=LR"),
            (["--data", "breast_cancr"], "Did you mean 'breast_cancer'?"),
            (["--data", "iris", "--family", "studnt_t"], "got 'studnt_t'. Did you mean 'student_t'?"),
            (
                ["--data", "iris", "--dispersion", "2"],
                "dispersion belongs to family negative_binomial; got dispersion 2 with family bernoulli_logit.",
            ),
            (["--data", "iris", "--family", "t", "--dof", "0"], "dof must be positive and finite; got 0."),
            (["table.toml"], "table.toml is of kind 'table': say python -m examples.papers table.toml."),
            ([str(COMPARE), "--starts", "2"], "from a file or from flags"),
        ],
        ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
    )
    def test_sentences(self, flags, sentence, capsys):
        methods = '[[cases.methods]]\nmethod = "vn"\n'
        Path("table.toml").write_text(f'title = "t"\nkind = "table"\n[[cases]]\nname = "c"\ndata = "iris"\n{methods}')
        assert main(flags) == 2
        assert sentence in capsys.readouterr().err
        assert not Path("runs").exists()


class TestFigures:
    """What is drawn of a log: gaps to the optimum, bands, seconds; and the table of a run that diverged."""

    def log(self, **keys):
        self.experiment = settings.parsed(one_case(**keys) | {"columns": ["objective over iteration"]})
        return experiments.run_all(self.experiment, say=lambda _: None)

    def test_gaps_are_to_the_optimum(self):
        """A run that ends early is not at zero: linear regression, whose evidence is known in closed form."""
        short = [{"method": "srvn", "lr": 0.01}]
        log = self.log(methods=short, family="gaussian")
        model = experiments.build(self.experiment.cases[0]).model
        covariance = torch.eye(len(model.y), dtype=torch.float64) + model.X @ model.X.mT  # prior N(0, I), noise 1
        evidence = torch.distributions.MultivariateNormal(torch.zeros_like(model.y), covariance).log_prob(model.y)
        assert log["optimum"].to_numpy() == pytest.approx(-float(evidence), rel=1e-12)
        gaps, unit = comparison._drawn(log, "objective")
        assert unit == "nats above the optimum"
        assert gaps.min() == pytest.approx(float(log["objective"].min() + evidence), rel=1e-9)
        assert gaps.min() > 1
        line = comparison.curves(log, self.experiment).axes[0].lines[0]
        assert line.get_ydata()[-1] == pytest.approx(gaps[log["iteration"] == 5].mean(), rel=1e-12)
        table = comparison.compared(log)
        assert table.below[0] == pytest.approx(gaps[log["iteration"] == 5].mean(), rel=1e-9)

    @pytest.mark.accuracy
    def test_the_optimum_is_that_of_the_family(self):
        methods = [{"method": "vn", "posterior": kind} for kind in ("cholesky", "diagonal")]
        for method in methods:
            method["label"] = method["posterior"]
        log = self.log(methods=methods, iterations=60)
        last = log[log["iteration"] == 60].groupby("method")[["objective", "optimum", "train", "train_optimum"]].mean()
        assert last["objective"].to_numpy() == pytest.approx(last["optimum"].to_numpy(), rel=1e-9)
        assert last["train"].to_numpy() == pytest.approx(last["train_optimum"].to_numpy(), rel=1e-6)
        assert last["optimum"]["diagonal"] > last["optimum"]["cholesky"]

    @pytest.mark.parametrize("keys", [{"penalty": "mean"}, {"family": "student_t", "noise": 1.0}])
    def test_an_optimum_that_is_not_known_is_not_made_up(self, keys):
        """The values are drawn, and no distance from the smallest of them."""
        log = self.log(methods=[{"method": "vn", "lr": 0.3}], **keys)
        assert log["optimum"].isna().all()
        values, unit = comparison._drawn(log.drop(columns="stationary"), "objective")
        assert unit == "nats"
        assert values.tolist() == log["objective"].tolist()
        assert values.min() > 1

    def test_under_a_penalty_gaps_are_from_a_stationary_point(self):
        """It is where the runs end, and not the smallest value of a run that ends early."""
        log = self.log(methods=[{"method": "vn", "lr": 0.3}], penalty="mean", iterations=80)
        assert log["objective"].min() == pytest.approx(log["stationary"].iloc[0], rel=1e-9)
        early = log[log["iteration"] <= 4]
        gaps, unit = comparison._drawn(early, "objective")
        assert unit == "nats above the stationary point"
        assert gaps.min() == pytest.approx(float(early["objective"].min() - log["objective"].min()), rel=1e-6)

    def test_the_line_of_the_optimum_beside_test_losses(self):
        log = self.log(methods=[{"method": "vn", "lr": 0.9}], iterations=60, test_fraction=0.25)
        last = log[log["iteration"] == 60]["test_nll"]
        # the search ends at a natural norm of 1e-6, which is first order in a loss that is not minimised
        assert log["test_nll_optimum"].iloc[0] == pytest.approx(last.mean(), abs=1e-6)
        experiment = settings.replaced(self.experiment, columns=("test_nll over iteration",))
        axes = comparison.curves(log, experiment).axes[0]
        assert axes.lines[0].get_ydata() == pytest.approx(log.groupby("iteration")["test_nll"].mean().to_numpy())
        assert axes.lines[1].get_ydata()[0] == log["test_nll_optimum"].iloc[0]
        assert axes.get_ylabel() == "sum of the test losses\nnats"

    def test_a_figure_has_the_cases_of_its_experiment(self):
        """Figures that share runs are drawn from one log."""
        log = self.log()
        other = log.assign(case="another")
        figure = comparison.curves(pd.concat([log, other]), self.experiment)
        assert len(figure.axes) == 1
        assert len(figure.legends) == 1
        assert figure.legends[0].get_texts()[0].get_text() == "variational Newton (VN)"

    def test_the_band_is_of_the_starts(self):
        log = self.log()
        axes = comparison.curves(log, self.experiment).axes[0]
        gaps = (log["objective"] - log["optimum"])[log["method"] == "vn"].groupby(log["iteration"])
        assert axes.lines[0].get_ydata() == pytest.approx(gaps.mean().to_numpy(), rel=1e-9)
        edges = {float(y) for y in axes.collections[0].get_paths()[0].vertices[:, 1]}
        for iteration in range(6):
            for edge in (gaps.min()[iteration], gaps.max()[iteration]):
                assert min(abs(y - edge) for y in edges) < 1e-9 * edge

    @pytest.mark.accuracy
    def test_a_run_that_diverged_is_told_in_its_cells(self, capsys):
        assert main(["--data", "breast_cancer", "--methods", "vn", "root_gd=1e3", "--iterations", "30",
                     "--starts", "2"]) == 0  # fmt: skip
        said = capsys.readouterr().out.splitlines()
        assert re.search(r"breast_cancer +vn +\d+ .*-\d+\.\d+ +0\.\d+ ", "\n".join(said))
        assert re.search(r"breast_cancer +root_gd=1e3 .* diverged +diverged +diverged +diverged", "\n".join(said))
        assert max(map(len, said)) < 130

    def test_a_start_that_diverges_ends_the_line_and_the_band(self):
        """A step of 0.1 from here: more than 1e9 nats after three steps, of which none is drawn."""
        log = self.log(methods=[{"method": "srvn", "lr": 0.1}], family="gaussian")
        means = log.groupby("iteration")["objective"].mean()
        assert means[2] > 1e5
        assert means[3] > 1e13
        axes = comparison.curves(log, self.experiment).axes[0]
        assert axes.lines[0].get_xdata().tolist() == [0, 1]
        assert axes.collections[0].get_paths()[0].vertices[:, 1].max() < 1e3

    def test_one_start_that_diverged_is_not_left_out_of_the_mean(self):
        log = self.log(methods=[{"method": "vn", "lr": 0.3}])
        log.loc[(log["iteration"] == 5) & (log["start"] == 1), "objective"] = np.nan
        assert comparison.last_values(log)["objective"].isna().all()
        assert len(comparison.curves(log, self.experiment).axes[0].lines[0].get_ydata()) == 5

    @pytest.mark.accuracy
    def test_equal_figures_are_equal_files(self):
        log = self.log()
        for name in ("one", "two"):
            Path(name).mkdir()
            plots.save(comparison.curves(log, self.experiment), Path(name) / "curves")
        assert Path("one/curves.svg").read_bytes() == Path("two/curves.svg").read_bytes()
        assert Path("one/curves.svg").read_text().startswith("<?xml")


class TestData:
    @pytest.fixture(autouse=True)
    def _no_network(self, monkeypatch):
        """A data set of four rows, and a site that does not answer."""
        self.X, self.y = np.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [0.0, 0.25]]), np.array([2.0, 4.0, 4.0, 2.0])
        source = datasets.Source("small", 4, 2, datasets.content(self.X, self.y))
        monkeypatch.setattr(datasets, "SOURCES", {"small": source})
        monkeypatch.setattr(datasets, "SITE", Path("site").absolute().as_uri() + "/")
        monkeypatch.delenv("TORCHNGVI_DATA", raising=False)

    def text(self):
        rows = (f"{label:g} 1:{a:g} 2:{b:g}" for (a, b), label in zip(self.X, self.y, strict=True))
        return "\n".join(rows) + "\n"

    def test_download_goes_to_the_cache(self):
        Path("site").mkdir()
        Path("site/small").write_text(self.text())
        X, y = datasets.load("small")
        assert (X == self.X).all()
        assert y.tolist() == [0.0, 1.0, 1.0, 0.0]
        Path("site/small").unlink()
        assert (datasets.load("small")[0] == self.X).all()
        assert [path.name for path in datasets.cache().iterdir()] == ["small.svm"]

    def test_the_folder_of_the_user_comes_first(self, monkeypatch):
        monkeypatch.setenv("TORCHNGVI_DATA", "data")
        Path("data/libsvm").mkdir(parents=True)
        with gzip.open("data/libsvm/small.svm.gz", "wt") as file:
            file.write(self.text())
        assert (datasets.load("small")[0] == self.X).all()

    def test_missing(self):
        with pytest.raises(datasets.MissingDataError, match="small is not here.*Set TORCHNGVI_DATA"):
            datasets.load("small")
        assert not datasets.cache().exists()

    def test_other_content(self):
        datasets.cache().mkdir(parents=True)
        (datasets.cache() / "small.svm").write_text(self.text().replace("0.5", "0.6"))
        with pytest.raises(InputError, match="is not the published small"):
            datasets.load("small")

    def test_unknown(self):
        with pytest.raises(InputError, match="'smal' is not known. Did you mean 'small'"):
            datasets.load("smal")

    def test_a_case_without_data_is_skipped(self):
        said = []
        experiment = settings.parsed(one_case(data="small"))
        with pytest.raises(InputError, match="nothing was run"):
            experiments.run_all(experiment, said.append)
        assert said[0].startswith("c is skipped: data set small is not here")


def test_a_bound_from_a_file():
    pieces = pd.DataFrame(experiments.PiecewiseBound(6).pieces)
    pieces.to_csv("six.csv", index=False)
    experiment = settings.parsed(one_case(estimator="piecewise", bound="six.csv"))
    ours = settings.parsed(one_case(estimator="piecewise", pieces=6))
    logs = [experiments.run_all(each, say=lambda _: None)["objective"].iloc[-1] for each in (experiment, ours)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-12)
    with pytest.raises(InputError, match="columns low, high, a, b, c"):
        experiments.build(settings.parsed(one_case(estimator="piecewise", bound="none.csv")).cases[0])


class TestPublishedBound:
    @pytest.fixture(autouse=True)
    def _another_site(self, monkeypatch):
        """A table of 6 pieces in the place of the published one, on a site of its own."""
        self.rows = [list(piece) for piece in experiments.PiecewiseBound(6).pieces]
        low, high, a, b, c = np.array(self.rows).T
        Path("site").mkdir()
        scipy.io.savemat(f"site/{bounds.PUBLISHED}", {"bound": np.array([c, b, a, low, high])})
        monkeypatch.setattr(bounds, "SITE", Path("site").absolute().as_uri() + "/")
        monkeypatch.setattr(bounds, "SHA256", hashlib.sha256(self.file.read_bytes()).hexdigest())
        monkeypatch.delenv("TORCHNGVI_DATA", raising=False)

    file = Path("site") / bounds.PUBLISHED

    def test_download_goes_to_the_cache(self):
        assert bounds.pieces(bounds.PUBLISHED) == self.rows
        self.file.unlink()
        assert bounds.pieces(bounds.PUBLISHED) == self.rows
        assert [path.name for path in datasets.cache().iterdir()] == [bounds.PUBLISHED]

    def test_the_folder_of_the_user_comes_first(self, monkeypatch):
        monkeypatch.setenv("TORCHNGVI_DATA", "data")
        Path("data").mkdir()
        self.file.rename(Path("data") / bounds.PUBLISHED)
        assert bounds.pieces(bounds.PUBLISHED) == self.rows
        assert not datasets.cache().exists()

    def test_a_run_with_it(self):
        runs = ({"bound": bounds.PUBLISHED}, {"pieces": 6})
        logs = [experiments.run_all(settings.parsed(one_case(estimator="piecewise", **keys)), say=lambda _: None)
                for keys in runs]  # fmt: skip
        assert (logs[0]["objective"] == logs[1]["objective"]).all()

    def test_other_content(self):
        self.file.write_bytes(self.file.read_bytes() + b" ")
        with pytest.raises(
            InputError, match=r"llp.mat' is not the published llp.mat: its checksum differs. Remove it."
        ):
            bounds.pieces(bounds.PUBLISHED)

    def test_without_it_the_case_is_skipped(self):
        self.file.unlink()
        said = []
        with pytest.raises(InputError, match="nothing was run"):
            experiments.run_all(settings.parsed(one_case(estimator="piecewise", bound=bounds.PUBLISHED)), said.append)
        assert re.match(
            r"c is skipped: the published bound of 20 pieces is not here, and file:.* cannot be had .*"
            r"Set TORCHNGVI_DATA to a folder that holds llp.mat, or put the file into",
            said[0],
        )


class TestMnist:
    def test_images(self, monkeypatch):
        monkeypatch.setenv("TORCHNGVI_DATA", "data")
        Path("data/mnist").mkdir(parents=True)
        for name, content in (
            ("labels-idx1", bytes(8) + bytes([3, 7])),
            ("images-idx3", bytes(16) + bytes([0, 51, 255, 0])),
        ):
            with gzip.open(f"data/mnist/t10k-{name}-ubyte.gz", "wb") as file:
                file.write(content)
        pixels, labels = datasets.mnist_images("MNIST", "t10k")
        torch.testing.assert_close(pixels, torch.tensor([[0.0, 0.2], [1.0, 0.0]]))
        assert labels.tolist() == [3, 7]
        with pytest.raises(
            datasets.MissingDataError, match="MNIST is not here. Set TORCHNGVI_DATA to .* mnist/train-lab"
        ):
            datasets.mnist_images("MNIST")
