"""Operations over four-bit pages: each known mistake is found and named, and other orders of sums are right."""

import inspect

import pytest
import torch

from refattn.four_bits import E2M1
from twinattn.kit.check import check
from twinattn.kit.operations import OPERATIONS, Case, of_operation
from twinattn.kit.operations.written_four_bits import in_place, int4_rows, nvfp4_rows, turned

READS = ("int4_attention", "nvfp4_attention")
WRITES = ("int4_write", "nvfp4_write")
# One of these properties finds each mistake.
CHEAP = ("output", "together", "ties", "one sign", "even range", "any size", "small groups", "saturates", "keeps nan")


def with_arguments(operation, function):
    """Return a function of keyword arguments with a parameter for each argument of an operation."""
    sizes = {name: x[0] for name, x in operation.sizes.items()} | dict(operation.options)
    words = [x for x in operation.draw(Case(operation.name, sizes), torch.float32).arguments if x != "exact_halves"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature([inspect.Parameter(x, keyword) for x in words])
    return function


def reading(operation, mistake):
    """Return a function of attention that makes a mistake, in float64."""

    def attend(**a):
        found = mistake.oracle(a, torch.float64)
        return found["out"].to(a["query"].dtype), found["lse"].float()

    return with_arguments(operation, attend)


def writing(operation, mistake):
    """Return a write that makes a mistake, in float64."""
    wrong = dict(mistake.oracle.keywords)
    put, of_values = wrong.pop("put", in_place), wrong.pop("of_values", "value")
    value_turn, value_number = wrong.pop("value_turn", None), wrong.pop("value_number", "value_scale")

    def write(**a):
        rows, slots = {}, a["slot_mapping"]
        for name in ("key", "value"):
            x = a[name][: len(slots)].double()
            if operation.name == "int4_write":
                turn = wrong.get("turn", turned) if name == "key" or value_turn is None else value_turn
                rows[name] = int4_rows(x, True, **{**wrong, "turn": turn}).parts[0]
            else:
                rows[name] = nvfp4_rows(x, a["key_scale" if name == "key" else value_number], True, **wrong)[0]
        for name in ("key", "value"):
            pool, scales = a[f"{name}_cache"], a[f"{name}_scales"]
            scale = rows[of_values if name == "value" else name][1]
            pool.copy_(at_slots(pool, rows[name][0], slots))
            scales.copy_(put(scales.clone(), lambda x, scale=scale: at_slots(x, scale, slots)))

    return with_arguments(operation, write)


def at_slots(pool, rows, slots):
    """Return a pool with rows at slots; -1 is padding."""
    after = pool.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            after[slot // pool.shape[1], slot % pool.shape[1]] = row
    return after


MISTAKES = [(path, x) for path in (*READS, *WRITES) for x in OPERATIONS[path].mistakes]


@pytest.mark.parametrize(("path", "mistake"), MISTAKES, ids=[x.name for _, x in MISTAKES])
def test_each_known_mistake_is_found_and_named(path, mistake):
    """Scales in another layout, too: their sizes differ so much that no tolerance lets one pass for another."""
    operation = OPERATIONS[path]
    planted = (reading if path in READS else writing)(operation, mistake)
    asked = [x.name for x in of_operation(operation) if x.name in CHEAP]
    findings = check(planted, path, examples=8, only=asked, dtypes=operation.dtypes[:2]).findings
    named = [{name for name, _ in x.mistakes} for x in findings if x.outcome == "wrong"]
    assert named and any(mistake.name in names for names in named), findings
    if path in READS:  # found in the first batch of all, and by its name alone
        assert named[0] == {mistake.name} or named[1] == {mistake.name}


# --- right, in another style ---


def int4_by_a_matrix(key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales):
    """One product in float32, and its reciprocal in place of a division."""
    for x, pool, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        d = x.shape[-1]
        signs = [[(-1.0) ** (i & j & (d & -d) - 1).bit_count() * (i // (d & -d) == j // (d & -d)) for j in range(d)]
                 for i in range(d)]  # fmt: skip
        y = x.float() @ torch.tensor(signs) * (d & -d) ** -0.5
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            low, high = y[token].amin(-1).clamp(max=0), y[token].amax(-1).clamp(min=0)
            scale = ((high - low) * (1 / 15)).clamp(min=1e-37)
            zero = (low / -scale).round().nan_to_num(0)
            elements = ((y[token] * (1 / scale)[:, None]).round() + zero[:, None]).nan_to_num(0).clamp(0, 15).byte()
            pool[slot // pool.shape[1], slot % pool.shape[1]] = elements[:, ::2] + 16 * elements[:, 1::2]
            bits = scale.view(torch.int32) // 16 * 16 + zero.int()
            scales[slot // pool.shape[1], slot % pool.shape[1]] = bits.view(torch.float32)


def nvfp4_by_distances(
    key, value, key_cache, value_cache, slot_mapping, key_scales, value_scales, key_scale, value_scale
):
    """The nearest of all numbers in float64, with no sign for zeros, and scales of zeros of 1."""
    levels = torch.tensor(E2M1, dtype=torch.float64)
    for x, pool, scales, number in (
        (key, key_cache, key_scales, key_scale),
        (value, value_cache, value_scales, value_scale),
    ):
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            groups = x[token].double().unflatten(-1, (-1, 16)) / float(torch.tensor(number))
            largest = groups.abs().amax(-1)
            scale = (largest / 6).clamp(max=448).to(torch.float8_e4m3fn)
            scale[largest == 0] = 1
            sizes = (groups / scale.double()[..., None]).abs().clamp(max=6)
            distances = (sizes[..., None] - levels).abs()
            first = distances.argmin(-1)  # at a tie the lower one, and then the even one of both
            tied = distances.gather(-1, (first + 1).clamp(max=7)[..., None])[..., 0] == distances.amin(-1)
            nearest = torch.where(tied & (first % 2 == 1) & (first < 7), first + 1, first)
            elements = (nearest + 8 * ((groups < 0) & (nearest > 0))).flatten(-2).byte()
            block, row = divmod(slot, pool.shape[1])
            pool[block, row] = elements[:, ::2] + 16 * elements[:, 1::2]
            scales[block, row] = scale


@pytest.mark.parametrize("path", READS)
def test_an_out_without_a_default_is_none_where_no_memory_is_given(path):
    operation = OPERATIONS[path]

    def attend(*, out, **a):
        found = operation.oracle(a, torch.float64)
        result = found["out"].to(a["query"].dtype)
        return result if out is None else out.copy_(result), found["lse"].float()

    parameters = inspect.signature(with_arguments(operation, attend)).parameters.values()
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY)
    attend.__signature__ = inspect.Signature([*parameters, out])
    findings = check(attend, path, examples=2, only=["output", "out", "empty"], dtypes=[torch.float32]).findings
    assert {x.outcome for x in findings} == {"honoured"}, findings


@pytest.mark.parametrize(
    ("path", "function"), [("int4_write", int4_by_a_matrix), ("nvfp4_write", nvfp4_by_distances)], ids=WRITES
)
def test_right_writes_in_another_style_pass(path, function):
    names = [x.name for x in of_operation(OPERATIONS[path]) if x.name not in ("many", "offsets", "past tiles", "ties")]
    names += ["ties"] if path == "nvfp4_write" else []  # a reciprocal of 15 has no exact halves
    report = check(function, path, examples=4, only=names, dtypes=OPERATIONS[path].dtypes[:2])
    assert [(x.property, x.detail, x.example) for x in report.failures] == []
