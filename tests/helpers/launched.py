"""Our kernels that are not named kernels: jitted functions that are launched, beside those named `.._kernel`."""

LAUNCHED = ("attend", "attend_pairs", "reduce_splits", "reduce_pairs")
