"""Plans and scales as lists of tensors and of whole numbers, which operators of PyTorch take, and put together again.

`ops` says what is in the lists. Of lists, the last plans that were put together are remembered.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_args, get_origin

import torch
from torch import Tensor

from refattn.batch import Batch
from refattn.checks import describe, tensors_of
from refattn.plan import CascadePlan, ContextChunk, Plan, PrefillPlan
from refattn.scales import Fp8Scales, Int8Scales
from refattn.states import StatePlan
from refattn.trees import TreePlan, Trees

PLANS = (Plan, CascadePlan, TreePlan, PrefillPlan)  # a list of sizes begins with an index into these
TABLES = tensors_of(Plan)  # fields of a plan, beside its batch
SIZES = {one.name: one.type for one in fields(Plan) if one.init and one.name not in ("batch", *TABLES)}
OF_BATCH = 3, 4  # tensors and whole numbers of a `Batch`
REMEMBERED = 16  # plans: a step has one for each kind of layer

AnyPlan = Plan | CascadePlan | TreePlan | PrefillPlan
Lists = tuple[list[Tensor | None], list[int]]


def lists_of_plan(plan: AnyPlan) -> Lists:
    """Return the tables and the sizes of a plan: first those of the plans in it, then its own.

    Raises:
        ValueError: if it is none.
    """
    check_type(plan)
    plans: Sequence[Any] = [plan]
    own: Lists = ([], [])
    if isinstance(plan, CascadePlan):
        plans, own = plan.levels, _batch_lists(plan.batch)
    elif isinstance(plan, TreePlan):
        plans, own = (plan.whole, plan.prefix), ([plan.trees.parents, plan.trees.lens, plan.depths, plan.ancestors], [])
    elif isinstance(plan, PrefillPlan):
        plans = [plan.own, *(chunk.plan for chunk in plan.chunks)]
        own = [chunk.slots for chunk in plan.chunks], [plan.block_size, _or_minus_one(plan.blocks)]
    tables: list[Tensor | None] = []
    sizes = [PLANS.index(type(plan))]
    for x in plans:
        batch_tables, batch_sizes = _batch_lists(x.batch)
        tables += [*batch_tables, *(getattr(x, name) for name in TABLES)]
        sizes += [*batch_sizes, *(size for name in SIZES for size in _sizes_of(getattr(x, name)))]
    return tables + own[0], sizes + own[1]


def check_type(plan: object) -> None:
    """Check that a plan is one of a path.

    Raises:
        ValueError: if it is none.
    """
    if type(plan) not in PLANS:
        raise ValueError(f"plan: expected a plan of the path, got {type(plan).__name__}")


_plans: OrderedDict[tuple[object, ...], tuple[list[Any], AnyPlan]] = OrderedDict()


def same_plan(tables: list[Any], sizes: list[int]) -> AnyPlan:
    """Return the plan of such lists: for the same tensors, unwritten since, the same one.

    The tensors are kept with it, so that no other can have their identity.
    """
    try:
        key = (*sizes, *[None if x is None else (id(x), x._version) for x in tables])
    except RuntimeError:  # tensors made in inference mode have no version
        return plan_of_lists(tables, sizes)
    found = _plans.pop(key, None)
    if found is None:
        found = list(tables), plan_of_lists(tables, sizes)
    _plans[key] = found  # the newest
    while len(_plans) > REMEMBERED:
        _plans.popitem(last=False)
    return found[1]


def plan_of_lists(tables: list[Any], sizes: list[int]) -> AnyPlan:
    """Return the plan of such lists."""
    kind, *sizes = sizes
    (of_batch, sizes_of_batch), plans = OF_BATCH, []
    of_plan = sizes_of_batch + sum(len(get_args(x)) if get_origin(x) is tuple else 1 for x in SIZES.values())
    for _ in range(len(sizes) // of_plan):
        batch, its_own = _batch(tables[:of_batch], sizes[:sizes_of_batch]), iter(sizes[sizes_of_batch:of_plan])
        its_sizes = {name: _from_sizes(its_kind, its_own) for name, its_kind in SIZES.items()}
        tables, sizes = tables[of_batch:], sizes[of_plan:]
        plans.append(Plan(batch, **its_sizes, **dict(zip(TABLES, tables, strict=False))))
        tables = tables[len(TABLES) :]
    if PLANS[kind] is CascadePlan:
        return CascadePlan(_batch(tables, sizes), tuple(plans))
    if PLANS[kind] is TreePlan:
        parents, lens, depths, ancestors = tables
        whole, prefix = plans
        return TreePlan(whole, prefix, Trees(parents, lens), depths, ancestors)
    if PLANS[kind] is PrefillPlan:
        own, *chunks = plans
        return PrefillPlan(own, tuple(map(ContextChunk, chunks, tables)), sizes[0], _or_none(sizes[1]))
    return plans[0]


def lists_of_states(plan: StatePlan) -> Lists:
    """Return the tables and the sizes of a plan of states.

    Raises:
        ValueError: if it is none.
    """
    if type(plan) is not StatePlan:
        raise ValueError(f"plan: expected a StatePlan, from recurrent.plan, got {type(plan).__name__}")
    tables, sizes = _batch_lists(plan.batch)
    own = plan.state_indices, plan.has_initial_state, plan.num_accepted, plan.checkpoint_indices
    return [*tables, *own], [*sizes, _or_minus_one(plan.block_size)]


def states_of_lists(tables: list[Any], sizes: list[int]) -> StatePlan:
    """Return the plan of states of such lists."""
    state_indices, has_initial_state, num_accepted, checkpoint_indices = tables[3:]
    kept = num_accepted, checkpoint_indices, _or_none(sizes[-1])
    return StatePlan(_batch(tables[:3], sizes[:-1]), state_indices, has_initial_state, *kept)


def _batch_lists(batch: Batch) -> Lists:
    known = [_or_minus_one(batch.num_keys), _or_minus_one(batch.num_tokens)]
    return [batch.cu_seqlens_q, batch.seq_lens, batch.block_table], [batch.max_query_len, batch.max_seq_len, *known]


def _batch(tables: list[Any], sizes: list[int]) -> Batch:
    cu_seqlens_q, seq_lens, block_table = tables
    lengths, known = sizes[:2], map(_or_none, sizes[2:])
    return Batch(cu_seqlens_q, seq_lens, block_table, *lengths, *known)


def _sizes_of(value: int | bool | tuple[int, ...] | None) -> Sequence[int]:
    """Return a field of a plan that is no tensor as whole numbers."""
    return value if isinstance(value, tuple) else [int(value) if isinstance(value, bool) else _or_minus_one(value)]


def _from_sizes(kind: Any, sizes: Iterator[int]) -> Any:
    """Return a field of a plan, of the type that it is declared with, from the next of its whole numbers."""
    if get_origin(kind) is tuple:
        return tuple(next(sizes) for _ in get_args(kind))
    size = next(sizes)
    return bool(size) if kind is bool else size if kind is int else _or_none(size)


def _or_minus_one(number: int | None) -> int:
    return -1 if number is None else number


def _or_none(number: int) -> int | None:
    return None if number == -1 else number


def lists_of_scales(
    scales: Fp8Scales | Int8Scales | None,
) -> tuple[list[Tensor | None], list[float], torch.dtype | None]:
    """Return the tensors of scales, their numbers, where 0 stands for none, and the format, which is None for int8.

    Raises:
        ValueError: if they are scales of four bits, which operators do not take.
    """
    if scales is None:
        return [], [], None
    if not isinstance(scales, Fp8Scales | Int8Scales):
        raise ValueError(f"scales: expected Fp8Scales or Int8Scales for an operator of PyTorch, got {describe(scales)}")
    if isinstance(scales, Int8Scales):
        return [scales.key, scales.value], [], None
    parts = (scales.key, scales.value, scales.query)
    tensors = [x if isinstance(x, Tensor) else None for x in parts]
    return tensors, [0.0 if x is None or isinstance(x, Tensor) else x for x in parts], scales.format


def scales_of_lists(tensors: list[Tensor | None], numbers: list[float], kind: torch.dtype | None) -> Any:
    """Return the scales of such lists; None where there are none."""
    if not tensors:
        return None
    if kind is None:
        token_scales, channel_scales = tensors
        assert token_scales is not None
        return Int8Scales(token_scales, channel_scales)
    key, value, query = (number or tensor for tensor, number in zip(tensors, numbers, strict=True))
    assert key is not None and value is not None
    return Fp8Scales(key, value, query, kind)
