"""When a cascade is worth it: a model of what its launches cost and what its shared reads save.

This is a policy, not a path: whatever it decides, the answers are the same. The engine applies it in every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from refattn.batch import Prefix
from refattn.checks import check_sizes, describe
from refattn.checks_of_steps import check_prefix_types, check_requests


@dataclass(frozen=True)
class Machine:
    """What the cost model knows about the hardware.

    Attributes:
        workers: tiles that are computed at the same time (SMs, cores).
        bytes_per_second: memory read by all workers together, on long sequences.
        flops_per_second: operations by all workers together, on full tiles.
        launch_seconds: what one more launch costs before anything is computed.
        tile_rows: query rows of a tile; a tile with fewer rows takes as long.
        tile_keys: keys of a tile.
    """

    workers: int
    bytes_per_second: float
    flops_per_second: float
    launch_seconds: float
    tile_rows: int
    tile_keys: int


# By these, `estimate_seconds` says what the decodes in docs/results took an H200, within a fifth.
H200 = Machine(
    workers=132,
    bytes_per_second=4.2e12,
    flops_per_second=7e14,
    launch_seconds=5e-6,
    tile_rows=128,
    tile_keys=64,
)
CPU = Machine(  # two cores with AVX-512, float32; a launch is a call of a path from Python
    workers=2,
    bytes_per_second=1.1e10,
    flops_per_second=1.2e11,
    launch_seconds=2.5e-4,
    tile_rows=16,
    tile_keys=16,
)


def estimate_seconds(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    machine: Machine,
) -> float:
    """Estimate how long a cascade over some prefixes takes; without prefixes, how long attention takes.

    A launch divides its work into tiles, `tile_rows` query rows times `tile_keys` keys of one KV head, and distributes
    them to the workers. All workers compute one tile each at the same time: a wave. A tile takes as long as reading its
    keys and values or computing its two products, whichever is longer, and every level is one more launch:

        seconds = sum over levels: launch_seconds + ceil(tiles / workers) * max(read, compute)

    The products are the same with and without a cascade. What it saves is reading (the shared keys once, not once per
    sequence) and empty rows (a tile with one query of one sequence takes as long as a full one); what it costs are the
    launches, and waves that are not full.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        prefixes: what is shared.
        num_heads: query heads, `h`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        element_size: bytes of an element.
        machine: the hardware, for example `H200` or `CPU` of this module.

    Returns:
        The estimate in seconds.

    Raises:
        ValueError: if the arguments differ in length, or a size is not positive.

    Source: the waves are those of vLLM's `use_cascade_attention`.
    """
    check_requests(query_lens, seq_lens, None)
    check_prefix_types(prefixes)
    _check_machine(machine)
    check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)
    per_worker = machine.workers / machine.bytes_per_second, machine.workers / machine.flops_per_second
    read = 2 * machine.tile_keys * head_size * element_size * per_worker[0]
    compute = 4 * machine.tile_rows * machine.tile_keys * head_size * per_worker[1]

    tiles: dict[int, int] = {}  # tiles per level

    def add_tiles(level: int, num_queries: int, num_keys: int) -> None:
        rows = num_queries * num_heads // num_kv_heads
        count = num_kv_heads * ceil(rows / machine.tile_rows) * ceil(num_keys / machine.tile_keys)
        tiles[level] = tiles.get(level, 0) + count

    for prefix in prefixes:
        above = [other for other in prefixes if other.encloses(prefix)]
        begin = max((other.end for other in above), default=0)
        add_tiles(len(above), sum(query_lens[prefix.first : prefix.last]), prefix.end - begin)
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin = max((prefix.end for prefix in prefixes if prefix.first <= i < prefix.last), default=0)
        add_tiles(-1, query_len, seq_len - begin)
    return sum(machine.launch_seconds + ceil(count / machine.workers) * max(read, compute) for count in tiles.values())


def saved_key_reads(prefixes: Sequence[Prefix]) -> int:
    """Count the keys, in tokens, that a cascade over some prefixes does not have to read again."""
    return sum(_saved_reads(prefix, prefixes) for prefix in prefixes)


def worthwhile_prefixes(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    prefixes: Sequence[Prefix],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    element_size: int,
    machine: Machine,
) -> list[Prefix]:
    """Remove from a tree of prefixes those that cost more than they save, by `estimate_seconds`.

    A block that two of many sequences share by chance would cost a level of its own. So the prefixes are ranked by the
    key reads that they save, and the best of all beginnings of that ranking is kept: all, some, or none.

    Args:
        query_lens: new tokens of each request.
        seq_lens: tokens of each request, the new ones included.
        prefixes: what is shared, from `find_prefixes`.
        num_heads: query heads, `h`.
        num_kv_heads: KV heads, `hk`.
        head_size: elements of a key and of a value, `d`.
        element_size: bytes of an element.
        machine: the hardware, for example `H200` or `CPU` of this module.

    Returns:
        The prefixes to keep, those first that save most; none if no cascade is worth it.

    Raises:
        ValueError: if the arguments differ in length, or a size is not positive.
    """
    check_prefix_types(prefixes)
    shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, element_size=element_size)

    ranking = sorted(prefixes, key=lambda prefix: _saved_reads(prefix, prefixes), reverse=True)
    choices = [ranking[:count] for count in range(len(ranking) + 1)]
    return min(choices, key=lambda chosen: estimate_seconds(query_lens, seq_lens, chosen, **shape, machine=machine))


def _saved_reads(prefix: Prefix, prefixes: Sequence[Prefix]) -> int:
    begin = max((other.end for other in prefixes if other.encloses(prefix)), default=0)
    return (prefix.last - prefix.first - 1) * (prefix.end - begin)


def _check_machine(machine: Machine) -> None:
    """Check the machine of a cost model.

    Raises:
        ValueError: if it is none.
    """
    if not isinstance(machine, Machine):
        raise ValueError(f"machine: expected a Machine, got {describe(machine)}")
