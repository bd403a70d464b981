"""List the experiments of the papers, or run one: ``python -m examples.papers [NAME] [--out DIR] [--full]``."""

import sys

from torchngvi.cli import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", *sys.argv[1:]]))
