"""Check any attention kernel, property by property, on ragged and poisoned batches, with one tolerance.

    twinattn prove my_package:my_attention --path chunked_prefill

checks your kernel (`kit.check`; `kit.testing` for pytest). The names imported here need only torch; the search for
failing batches needs the extra `kit`.

    workload     a call as plain numbers, also for tests and benchmark
    oracle       the expected output in float64, without the reference
    cases        the batches of the tests, in a poisoned pool       spec, readout    five proofs of a path
    example      the workloads that the kit draws                   properties       the table of all properties
    property     one guarantee of a kernel                          draws            its random batches
    checks, hold calls of the kernel, compared with the reference   numbers, memory  extreme values; strides, offsets
    conventions  the properties that test each convention           drawn, finding   what was tested; the results
    combinations batches that pair all options                      landmarks        batches that are always tried
    kernel       how a kernel is called, and what it claims         check, isolate   run all properties of a kernel
    libraries    one caller per library                             adapters         their kernels
    mistakes     known mistakes, which name a failure               search           random workloads of every path
    tolerance    the one tolerance                                  report, field    text, HTML, tables of results
    gradients    inputs and reference of a backward                 backward         its properties
    vacuity      a user's test, run against the known mistakes      testing, plugin  for pytest
    packed       packed rows of latents                             states           slots of layers with a state
    state_checks the properties of such layers
    operations   other operations: writes, moves, metadata, drafts, ranks
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
