"""``python -m torchngvi``."""

import sys

from torchngvi.cli import main

sys.exit(main())
