"""Prove any attention kernel: the contract, property by property; ragged and poisoned batches, one tolerance.

    twinattn prove my_package:my_attention --path chunked_prefill

checks your kernel (`conformance.check`; `conformance.testing` for pytest). The names imported here need only torch;
the search for failing batches needs the extra `conformance`.

    workload     a call as plain numbers: of a test, of the kit, of the search, of the benchmark
    oracle       its right answer, in float64, without the reference
    cases        the batches of the tests, in a poisoned pool       spec, readout    five proofs of a path
    example      the workloads that the kit draws                   properties       what a kernel promises, as a table
    property     one thing that it promises                         draws            batches for it
    checks, hold what it is asked, and its right answer             numbers, memory  of any size; anywhere
    conventions  which property asks which convention               drawn, finding   what was asked, and what came of it
    combinations batches in which any two choices meet              landmarks        batches that are always tried
    kernel       how a kernel is called, and what it claims         check, isolate   whether it keeps to it
    libraries    one caller per library                             adapters         their kernels
    mistakes     known mistakes, by which a failure is named        search           random workloads of every path
    tolerance    the one tolerance                                  report, field    what came of it
    gradients    what a backward is asked, and its right answer     backward         what gradients promise
    vacuity      a user's test, run against the known mistakes    testing, plugin  for pytest
    packed       rows of bytes for latents                          states           slots of layers that keep a state
    state_checks what such layers promise
    operations   what is beside attention: writes, moves, metadata, drafts, ranks
"""

from twinattn.kit.call import plan_and_attend, prepare
from twinattn.kit.cases import CASES, HARMLESS, POISON, Case, Paged, build, poisoned
from twinattn.kit.example import Example
from twinattn.kit.kernel import claims
from twinattn.kit.readout import assert_same_masks, masks_by_hand, read_masks
from twinattn.kit.spec import PathSpec
from twinattn.kit.tolerance import assert_close, assert_matches_reference
from twinattn.kit.vacuity import vacuous
from twinattn.kit.workload import Workload

__all__ = [
    "CASES",
    "HARMLESS",
    "POISON",
    "Case",
    "Example",
    "Paged",
    "PathSpec",
    "Workload",
    "assert_close",
    "assert_matches_reference",
    "assert_same_masks",
    "build",
    "claims",
    "masks_by_hand",
    "plan_and_attend",
    "poisoned",
    "prepare",
    "read_masks",
    "vacuous",
]
