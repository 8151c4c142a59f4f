"""The rows of the benchmark, by device: those of a CPU are small enough for a laptop, those of a GPU are of servers."""

from twinattn.bench.row import Row
from twinattn.bench.rows_on_cpu import rows_on_cpu
from twinattn.bench.rows_on_gpu import rows_on_gpu


def rows(device_type: str, *, quick: bool) -> list[Row]:
    """List the rows for a device.

    Args:
        device_type: "cpu" or "cuda".
        quick: an eighth of every length, to see that everything works.

    Returns:
        The rows, in the order of the report.
    """
    return list((rows_on_cpu if device_type == "cpu" else rows_on_gpu)(8 if quick else 1))
