"""All rows of the benchmark, by device.

    rows_on_cpu     small enough for a laptop
    rows_on_gpu     the workloads of servers

A row says what is computed, who computes it, and what the twin should reach (`twinattn.bench.row`).
"""

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
