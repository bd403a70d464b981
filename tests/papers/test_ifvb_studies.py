"""The studies of Godichon-Baggioni, Nguyen and Tran (2023), made small."""

import os

import numpy as np
import pandas as pd
import pytest

from examples.papers import study
from examples.papers.reproduce import CONFIGS
from torchngvi.app.settings import read_toml

SMALL = {
    "fig1": {"iterations": 5, "seeds": 2},
    "fig2": {"iterations": 5, "seeds": 2, "draws": 20},
    "fig3": {"iterations": 5, "seeds": 2, "draws": 50, "gibbs": 200},
    "fig4": {"iterations": 5, "seeds": 2, "data": [0]},
    "fig5": {"iterations": 4, "seeds": 1, "hidden": [3]},
    "fig6": {"iterations": 3, "seeds": 1, "draws": 3, "samples": 3, "hidden": 1},
    "coupling": {"iterations": 3, "seeds": 1, "draws": 3},
}


@pytest.mark.accuracy
@pytest.mark.filterwarnings("ignore::torchngvi.errors.RejectedStepWarning")
@pytest.mark.parametrize("name", SMALL)
def test_studies_run_and_draw_from_their_log(name, tmp_path, capsys):
    settings = read_toml(str(CONFIGS / f"ifvb-{name}.toml"))
    found, arguments = study(settings, CONFIGS)
    if name in ("fig5", "fig6") and "TORCHNGVI_DATA" not in os.environ:
        pytest.skip("needs uci_regression/wine_red.npz and uci/vblab_germancredit.csv.gz: set TORCHNGVI_DATA")
    log = found.run(**(arguments | SMALL[name]))
    log.to_csv(tmp_path / "log.csv", index=False)
    again = pd.read_csv(tmp_path / "log.csv")
    found.draw(again, tmp_path / f"ifvb-{name}")
    assert (tmp_path / f"ifvb-{name}.png").stat().st_size > 10_000
    table = pd.read_csv(tmp_path / f"ifvb-{name}-table.csv")
    assert {"damped batch Fisher", "Adam"} <= set(table["method"])
    assert any("IFVB" in method for method in table["method"])
    assert "Example" in capsys.readouterr().out
    runs = again[~again["method"].isin(["Gibbs", "torchngvi.fit", "Gaussian by fit"])]
    last = runs[runs["iteration"] == runs["iteration"].max()]
    budgets = last[~last["method"].str.contains("iterate")]["log_joint_draws"]
    assert budgets.nunique() == 1  # equal for all methods
    assert np.isfinite(last["seconds"]).all()
