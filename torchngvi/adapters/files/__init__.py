"""Files of rows that are read in batches: NumPy's npy, Parquet and csv, for models of more rows than memory holds.

A reader is iterated over for one pass after another, and knows how many rows there are::

    batches = Parquet("day_*.parquet", target="click", rows=100_000)
    model = Streamed.linear(batches, batches.num_data, classes=(0, 1))

npy and Parquet files are also read at any place: the start of a fit takes rows from all over them, and ``share`` gives
each of several processes its part.  To read ahead, hand a reader to a ``DataLoader`` with ``batch_size=None`` and one
worker.  Parquet needs the extra "parquet".
"""

from torchngvi.extras import needing

with needing("torchngvi.adapters.files", "parquet"):
    from torchngvi.adapters.files.reader import Csv, Npy, Parquet, Reader

__all__ = ["Csv", "Npy", "Parquet", "Reader"]
