"""Keys and tokens of a sequence on several ranks, each of which is a process."""

import multiprocessing

import pytest
import torch

from refattn.options import RecurrentOptions
from tests.helpers.batches import build
from tests.helpers.ranks import (
    CASES,
    CUTS,
    attend_on_all,
    convolve_part,
    draw_channels,
    fold_on_all,
    fold_part,
    run_process,
)
from tests.helpers.states import draw, draw_states, ints, lengths
from tests.helpers.tolerance import assert_matches_reference
from tests.table import LEFT

CALLS = [
    (CASES[0], torch.float32, dict(interleave=1)),
    (CASES[1], torch.bfloat16, dict(interleave=24, softcap=5.0)),
    (CASES[2], torch.float16, dict(interleave=2, window_size=(LEFT, 0))),
]


def check_processes(num_ranks, backend, calls, folder, folded=()):
    """Run a process per rank, and hold what they answer to the reference of one machine.

    They are forks of a process that is not this one, so PyTorch is imported once, and no thread is lost on the way.
    """
    multiprocessing.set_forkserver_preload([run_process.__module__])
    asked = dict(nprocs=num_ranks, start_method="forkserver")
    torch.multiprocessing.start_processes(run_process, (num_ranks, str(folder), backend, calls, folded), **asked)
    answers = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
    for i, (case, dtype, options) in enumerate(calls):
        out, lse = (torch.cat([answer[i][part] for answer in answers], 1) for part in (0, 1))

        def reference(*tensors, **options):
            return attend_on_all("refattn", num_ranks, *tensors, **options)

        assert_matches_reference(out, lse, reference, *build(case, dtype=dtype).tensors, **options)


@pytest.mark.covers("B88", "R213")
def test_processes_of_torch_distributed(tmp_path):
    """Of keys on several ranks, and of the last two calls tokens, which are folded into states, or convolved."""
    num_ranks = 4
    batch, cuts, tables = lengths((20, 0, 9), (3, 5, 0)), CUTS[num_ranks], dict(state_indices=ints([2, 1, 0]))
    channels, weights, inputs = draw_channels(29)
    calls = (
        (fold_part, (draw(29), draw_states(4), batch, cuts, RecurrentOptions()), tables),
        (convolve_part, (channels, inputs, batch, cuts, weights), tables),
    )
    check_processes(num_ranks, "gloo", CALLS, tmp_path, calls)
    answers = [torch.load(tmp_path / f"{rank}.pt")[-len(calls) :] for rank in range(num_ranks)]
    for (of_part, arguments, _), parts in zip(calls, zip(*answers, strict=True), strict=True):
        out, pools = fold_on_all("fastattn", num_ranks, *arguments, of_part=of_part, **tables)
        for rows, part, pool in parts:
            assert torch.equal(part, out[rows]) and torch.equal(pool, pools[0])


@pytest.mark.covers("B88")
def test_two_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs and NCCL; this machine has {torch.cuda.device_count()}")
    halves = [(case, torch.bfloat16, options) for case, _, options in CALLS]
    check_processes(2, "nccl", halves, tmp_path)
