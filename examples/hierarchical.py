"""Run the code of docs/hierarchical.md: eight schools, rats, and a Gaussian process of each group, with its pictures.

python examples/hierarchical.py [--out docs]
"""

import argparse
import contextlib
import re
from pathlib import Path

import matplotlib

PAGE = Path(__file__).parents[1] / "docs" / "hierarchical.md"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE.parent, help="the folder of the pictures")
    out = parser.parse_args(arguments).out
    matplotlib.use("agg")
    scope, results = {}, []
    with contextlib.chdir(out):
        for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
            exec(compile(snippet, PAGE.name, "exec"), scope)
            results.append(scope["result"])
    return list({id(result): result for result in results}.values())  # of each model one


if __name__ == "__main__":
    main()
