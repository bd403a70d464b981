"""What stands behind the command ``torchngvi fit``: settings, tables of data, a run, its report and its figures."""
