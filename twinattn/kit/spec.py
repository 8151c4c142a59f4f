"""The specification of a path, and the five kinds of proof that follow from it.

A `PathSpec` states in a few lines what a path computes: its name, its arguments, and its mask, as a rule on two
positions. From that follow

    mask          the mask, recovered from the output, equals the rule
    poison        no bit of the output depends on memory that no query may see
    formula       the reference equals the oracle, an independent softmax in float64
    twins         the fast twin equals the reference, within the one tolerance
    bad input     an error that names the argument, and nothing is written
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from refattn.batch import Batch
from twinattn.kit import oracle
from twinattn.kit.call import plan_and_attend
from twinattn.kit.cases import FINITE_POISON, HARMLESS, POISON, Case, Paged, build
from twinattn.kit.oracle import Sight
from twinattn.kit.readout import assert_same_masks, masks_by_hand, read_masks
from twinattn.kit.tolerance import assert_matches_reference


@dataclass(frozen=True)
class PathSpec:
    """The specification of a path.

    Attributes:
        name: its file in both packages.
        sees: whether a query at position `i` may see the key at position `j`.
        arguments: of its plan, except the batch and the block size.
        paged: whether keys are in pages, or in rows.
        bad_arguments: arguments that it must refuse, by a part of the error message.
    """

    name: str
    sees: Callable[[int, int], bool]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    paged: bool = True
    bad_arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the path and its arguments, as a test id."""
        return "-".join([self.name, *(f"{name}={value}" for name, value in self.arguments.items())]).replace(" ", "")

    def module(self, package: str) -> ModuleType:
        """Return the path's module of a package."""
        return import_module(f"{package}.{self.name}")

    def call(self, package: str, *tensors: Any, **options: Any) -> Any:
        """Plan and attend with the path of a package."""
        return plan_and_attend(self.module(package), *tensors, **{**self.arguments, **options})

    def check_mask(self, package: str, case: Case, *, device: str = "cpu") -> None:
        """Compare the mask that is read out of the output with the rule.

        Raises:
            AssertionError: naming the first wrong query and key.
        """
        case = replace(case, head_size=64, value_head_size=64)
        masks = read_masks(
            lambda *tensors, **options: self.call(package, *tensors, **options), case, paged=self.paged, device=device
        )
        assert_same_masks(masks, masks_by_hand(case, self.sees))

    def check_poison(
        self,
        package: str,
        case: Case,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        recomputed: bool = False,
    ) -> None:
        """Change memory that no query may see, and expect the same bits.

        Args:
            package: "refattn" or "fastattn".
            case: the batch.
            device: where the tensors are.
            dtype: their type.
            recomputed: whether the kernel multiplies such memory by 0, and another one recomputes the rows that are NaN
                then: finite poison has to give the same bits, and other poison an output within the one tolerance.

        Raises:
            AssertionError: if an output or an LSE changed.
        """
        clean = build(case, device=device, dtype=dtype, poison=HARMLESS)
        expected = self.call(package, *self._tensors(clean), return_lse=True)
        for poison in (FINITE_POISON, POISON) if recomputed else (POISON,):
            inputs = build(case, device=device, dtype=dtype, poison=poison)
            answer = self.call(package, *self._tensors(inputs), return_lse=True)
            if recomputed and poison is POISON:
                assert_matches_reference(*answer, partial(self.call, "refattn"), *self._tensors(clean))
                continue
            for name, one, other in zip(("out", "lse"), answer, expected, strict=True):
                if not torch.equal(one, other):
                    changed = (one != other).nonzero()
                    where = changed[0].tolist() if len(changed) else "NaN"
                    raise AssertionError(f"{name}: changed at {where} with memory that no query may see")

    def _tensors(self, inputs: Paged) -> tuple[Tensor, Tensor, Tensor, Batch]:
        return inputs.tensors if self.paged else inputs.rows

    def check_formula(self, case: Case) -> None:
        """Compare the reference in float64 with the oracle, one sequence at a time.

        Raises:
            AssertionError: if they differ by more than rounding.
        """
        inputs = build(case, dtype=torch.float64)
        out, lse = self.call("refattn", *self._tensors(inputs), return_lse=True)
        row, scale = 0, case.head_size**-0.5
        for key, value, mask in zip(inputs.keys, inputs.values, masks_by_hand(case, self.sees), strict=True):
            rows = slice(row, row + len(mask))
            seen = Sight(mask, torch.zeros_like(mask))  # only slopes need distances
            expected = oracle.attend(inputs.query[rows], key, value, seen, scale=scale)
            torch.testing.assert_close(out[rows], expected.out, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(lse[rows], expected.lse, rtol=1e-11, atol=1e-12)
            row = rows.stop

    def check_twins(
        self, case: Case, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        """Compare output and LSE of the fast twin with the reference; and the output with `out=` and without the LSE.

        Raises:
            AssertionError: if one of them is off.
        """
        inputs = build(case, device=device, dtype=dtype)
        tensors = self._tensors(inputs)
        out, lse = self.call("fastattn", *tensors, **options, return_lse=True)

        def reference(*tensors: Any, **options: Any) -> tuple[Tensor, Tensor]:
            answer: tuple[Tensor, Tensor] = self.call("refattn", *tensors, **options)
            return answer

        assert_matches_reference(out, lse, reference, *tensors, **options)
        memory = torch.full_like(out, torch.nan)
        given = self.call("fastattn", *tensors, **options, out=memory)
        if given is not memory or not torch.equal(given, out):
            raise AssertionError("out: the answer in memory that was given is another one")

    def check_bad_arguments(self, package: str) -> None:
        """Expect a `ValueError` with the right message for every bad argument, and unchanged tensors.

        Raises:
            AssertionError: if a bad argument passes, the message is another, or a tensor has changed.
        """
        inputs = build(Case("small", ((2, 5), (1, 20))), poison=HARMLESS)
        tensors = self._tensors(inputs)
        before = [x.clone() for x in tensors[:3]]
        for message, arguments in self.bad_arguments.items():
            try:
                self.call(package, *tensors, **arguments)
            except ValueError as error:
                if message not in str(error):
                    raise AssertionError(f"expected {message!r} in the error for {arguments}, got {error}") from error
            else:
                raise AssertionError(f"{arguments} passed; expected an error with {message!r}")
            if not all(map(torch.equal, tensors[:3], before)):
                raise AssertionError(f"{arguments} changed a tensor")
