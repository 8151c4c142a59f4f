"""Every storage of keys under every plan: the reference against the formula in float64, and each kernel against it.

A plan says who may see whom, a storage where the keys are; none of the two knows of the other.
"""

import importlib
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from refattn.batch import Prefix
from refattn.metadata import make_batch
from refattn.options import AttentionOptions
from refattn.scales import Fp8Scales, Int8Scales, Scales
from tests.helpers.kernels_present import PRESENT
from tests.helpers.pairs import every_pair_on_cpu
from tests.helpers.stored import in_four_bits
from tests.helpers.twin_files import PATHS as FILES

H, HK, D = 4, 2, 16
RANK, ROPE = 16, 8
P = 4  # tokens in a block
QUERY_LENS, SEQ_LENS = [3, 1, 4, 2], [14, 11, 9, 2]
TABLES = [[7, 2, 9, 4], [7, 2, 5], [0, 3, 8], [6]]  # the first two share two blocks
PARENTS = [[-1, 0, 0], [-1], [-1, 0, 1, 0], [-1, 0]]
SPANS = [[[11, 13]], [[10, 10]], [[4, 8]], [[-1, -1]]]  # first and last tokens that see one another
NUM_BLOCKS, PADDING = 10, 2
SCALE = 0.3

# --- who may see whom ---


@dataclass(frozen=True)
class Mask:
    """What a plan is made of, and what it shows: a window of so many keys before the query, a chunk, a tree."""

    path: str
    left: int = -1
    chunk: int = 0
    over_rows: bool = False

    def plan(self, package, device):
        """Plan the batch by a path of a twin."""
        path = importlib.import_module(f"{package}.{self.path}")
        tables = None if self.path == "varlen" or self.over_rows else TABLES
        batch = make_batch(QUERY_LENS, SEQ_LENS, tables, device=device)
        window = {} if self.left < 0 else dict(window_size=(self.left, 0))
        if self.path == "interval":
            spans = torch.tensor(SPANS, dtype=torch.int32, device=device)
            where = dict(window_size=(self.left, -1)) if window else {}
            seen = path.image_spans(batch, spans, sum(QUERY_LENS) + PADDING, **where)
            return path.plan(batch, **seen._asdict(), block_size=None if self.over_rows else P)
        if self.path == "varlen":
            return path.plan(batch, **window)
        if self.path == "local":
            return path.plan(batch, chunk_size=self.chunk, block_size=P)
        if self.path == "cascade":
            return path.plan(batch, prefixes=[Prefix(0, 2, 2 * P)], block_size=P, **window)
        trees = dict(trees=path.make_trees(PARENTS, device=device)) if self.path == "speculative" else {}
        return path.plan(batch, block_size=P, **trees, **window)

    def seen(self, i):
        """Return who sees whom in sequence `i`, and how far apart they are: `[t, s]` each."""
        query_len, seq_len = QUERY_LENS[i], SEQ_LENS[i]
        first_node = seq_len - len(PARENTS[i])
        positions, above = list(range(seq_len)), [set(range(j + 1)) for j in range(seq_len)]
        if self.path == "speculative":
            for node, parent in enumerate(PARENTS[i]):
                j = first_node + node
                before = set(range(first_node)) if parent < 0 else above[first_node + parent]
                above[j], positions[j] = before | {j}, len(before)
        rows = range(seq_len - query_len, seq_len)
        distance = torch.tensor([[positions[r] - positions[j] for j in range(seq_len)] for r in rows])
        if self.path == "interval":
            ((first, last),) = SPANS[i]
            for j in range(max(first, 0), last + 1):
                above[j] |= set(range(first, last + 1))
        visible = torch.tensor([[j in above[r] for j in range(seq_len)] for r in rows])
        if self.left >= 0:
            visible &= distance <= self.left
        if self.chunk:
            visible &= torch.tensor([[r // self.chunk == j // self.chunk for j in range(seq_len)] for r in rows])
        return visible, distance


MASKS = {
    "causal": Mask("chunked_prefill"),
    "window": Mask("sliding_window", left=5),
    "chunk": Mask("local", chunk=8),
    "cascade": Mask("cascade"),
    "cascade in a window": Mask("cascade", left=6),
    "tree": Mask("speculative"),
    "tree in a window": Mask("speculative", left=1),
    "spans in a window": Mask("interval", left=3),
}
ROWS = {"causal": Mask("varlen"), "window": Mask("varlen", left=5), "spans": Mask("interval", over_rows=True)}

# --- where the keys are ---


@dataclass
class Stored:
    """The arguments of a path, and what they stand for.

    Attributes:
        path: the path that reads the storage.
        tensors: the queries, and what holds keys and values.
        more: what the path takes besides.
        queries: as numbers, `[t, h, d]`.
        keys: of each sequence, `[s, hk, d]`, or one for each of the two softmaxes.
        values: of each sequence, `[s, hk, dv]`.
    """

    path: str
    tensors: tuple
    more: dict
    queries: torch.Tensor
    keys: list
    values: list


def draw(*shape, dtype):
    return (torch.randn(*shape) * torch.linspace(0.5, 2.0, shape[-1])).to(dtype)


def gathered(pool):
    return [torch.stack([pool[TABLES[i][j // P], j % P] for j in range(s)]) for i, s in enumerate(SEQ_LENS)]


def in_rows(rows):
    return list(rows.split(SEQ_LENS))


def by_row(x):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def lay_out(storage, dtype):
    """Fill a storage with what is drawn for it."""
    torch.manual_seed(0)
    query = draw(sum(QUERY_LENS) + PADDING, H, RANK + ROPE if "latents" in storage else D, dtype=dtype)
    if storage == "rows":
        key, value = (draw(sum(SEQ_LENS), HK, size, dtype=dtype) for size in (D, D + 4))
        return Stored("varlen", (query, key, value), {}, query, in_rows(key), in_rows(value))
    if storage == "pages":
        key, value = (draw(NUM_BLOCKS, P, HK, size, dtype=dtype) for size in (D, D + 4))
        return Stored("chunked_prefill", (query, key, value), {}, query, gathered(key), gathered(value))
    if storage == "fp8":
        scales = Fp8Scales(torch.linspace(0.2, 0.5, HK), 0.25)
        key, value = (draw(NUM_BLOCKS, P, HK, D, dtype=torch.float32).mul(4).to(scales.format) for _ in range(2))
        numbers = key.double() * scales.key[:, None].double(), value.double() * scales.value
        return Stored("quantized", (query, key, value), dict(scales=scales), query, *map(gathered, numbers))
    if storage == "int8":
        key, value = (torch.randint(-127, 128, (NUM_BLOCKS, P, HK, D)).to(torch.int8) for _ in range(2))
        scales = Int8Scales(torch.rand(NUM_BLOCKS, P, HK) / 64 + 0.01, torch.rand(HK, D) / 64 + 0.01)
        numbers = key.double() * scales.key[..., None], value.double() * scales.value
        return Stored(
            "quantized", (query, key, value), dict(scales=scales), by_row(query.double()), *map(gathered, numbers)
        )
    if storage in ("int4", "nvfp4"):
        garbage = torch.zeros(NUM_BLOCKS, P, 1, dtype=torch.bool)
        drawn = SimpleNamespace(**dict.fromkeys(("key_cache", "value_cache"), torch.ones(NUM_BLOCKS, P, HK, D)))
        pools, scales, numbers = in_four_bits(drawn, garbage, storage)
        return Stored("quantized", (query, *pools), dict(scales=scales), query, *map(gathered, numbers))
    if "latents" in storage:
        cache, scale = draw(NUM_BLOCKS, P, RANK + ROPE, dtype=torch.float32), 1.0
        cache = cache.to(dtype)
        if storage == "fp8 latents":
            cache, scale = cache.to(torch.float8_e4m3fn), 0.5
        rows = gathered(cache.double()[:, :, None] * scale)
        more = dict(latent_rank=RANK, cache_scale=scale)
        return Stored("mla", (query, cache), more, query, rows, [row[..., :RANK] for row in rows])
    over_rows = storage == "rows of pairs"
    cache = draw(2, 2, *((sum(SEQ_LENS),) if over_rows else (NUM_BLOCKS, P)), HK // 2, D, dtype=dtype)
    more = dict(lambda_full=torch.tensor(0.4), lambda_init=0.3, norm_weight=torch.rand(2 * D) + 0.5)
    numbers = cache.double()
    if storage == "fp8 pairs":
        scales = Fp8Scales(torch.linspace(0.2, 0.5, HK), 0.25)  # in the order of interleaved pairs
        cache, more["scales"] = cache.to(scales.format), scales
        of_keys = torch.stack([scales.key[half::2] for half in (0, 1)]).view(2, 1, 1, HK // 2, 1)
        numbers = torch.stack([cache.double()[:, 0] * of_keys, cache.double()[:, 1] * scales.value], dim=1)
    read = in_rows if over_rows else gathered
    keys = [read(numbers[half, 0]) for half in (0, 1)]
    values = [torch.cat(halves, dim=-1) for halves in zip(read(numbers[0, 1]), read(numbers[1, 1]), strict=True)]
    return Stored("differential", (query, cache), more, query, keys, values)


OVER_ROWS = ["rows", "rows of pairs"]
OVER_PAGES = ["pages", "fp8", "int8", "int4", "nvfp4", "latents", "fp8 latents", "pairs", "fp8 pairs"]
ALL = [
    *((storage, name, mask) for storage in OVER_ROWS for name, mask in ROWS.items()),
    *((storage, name, mask) for storage in OVER_PAGES for name, mask in MASKS.items()),
]
OPTIONS = {
    "plain": {},
    "all": dict(softcap=4.0, alibi_slopes=torch.linspace(0.05, 0.4, H), sinks=torch.linspace(-1.0, 1.0, H)),
}
in_each_combination = pytest.mark.parametrize(
    ("storage", "mask"), [pytest.param(s, m, id=f"{s}-{name}") for s, name, m in ALL]
)
with_each = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


# --- the formula ---


def softmax(queries, keys, values, mask, options, heads):
    """Attend sequence by sequence in float64; `heads` are those that the queries are of."""
    group, row, outs, lses = queries.shape[1] // keys[0].shape[1], 0, [], []
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        query = queries[row : row + QUERY_LENS[i]].double()
        row += QUERY_LENS[i]
        key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
        visible, distance = mask.seen(i)
        scores = torch.einsum("thd,shd->hts", query, key) * SCALE
        if "softcap" in options:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
            scores = scores - options["alibi_slopes"][heads].double()[:, None, None] * distance.abs()
        weights = scores.masked_fill(~visible, -math.inf).exp()
        total = weights.sum(-1)
        if "sinks" in options:
            total = total + options["sinks"][heads].double().exp()[:, None]
        outs.append(torch.einsum("hts,shd->thd", weights / total[..., None], value))
        lses.append(total.log().T)
    return torch.cat(outs), torch.cat(lses)


def by_hand(stored, mask, options):
    """Return the answer over what is stored, in float64, without padding."""
    if stored.path != "differential":
        return softmax(stored.queries, stored.keys, stored.values, mask, options, slice(None))
    halves = [
        softmax(stored.queries[:, half::2], stored.keys[half], stored.values, mask, options, slice(half, None, 2))
        for half in (0, 1)
    ]
    more = stored.more
    difference = halves[0][0] - more["lambda_full"].double() * halves[1][0]
    normed = difference * torch.rsqrt(difference.square().mean(-1, keepdim=True) + 1e-5) * more["norm_weight"]
    out = ((1 - more["lambda_init"]) * normed).unflatten(-1, (2, D)).flatten(1, 2)
    return out, torch.stack([lse for _, lse in halves], dim=-1).flatten(1)


def call(package, storage, mask, options, dtype, device):
    """Attend by a twin; what it returns without its padding, which holds nothing."""
    stored = lay_out(storage, dtype)
    there = dict(device=device)
    tensors = [x.to(**there) for x in stored.tensors]
    more = {name: moved(x, device) for name, x in stored.more.items()}
    given = {name: x.to(**there) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    name = mask.path if storage == "pages" else stored.path
    path = importlib.import_module(f"{package}.{name}")
    plan = mask.plan(package, device)
    answer = path.attention(*tensors, plan, AttentionOptions(softmax_scale=SCALE, **given), **more, return_lse=True)
    out, lse = (x.cpu() for x in answer)
    assert not out[-PADDING:].any() and (lse[-PADDING:] == -math.inf).all()
    return stored, out[:-PADDING].double(), lse[:-PADDING].double()


def moved(x, device):
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, Scales):
        return type(x)(**{name: moved(value, device) for name, value in vars(x).items()})
    return x


@in_each_combination
@with_each
def test_the_reference_is_the_formula(storage, mask, options, device):
    stored, out, lse = call("refattn", storage, mask, options, torch.float64, device)
    expected, expected_lse = by_hand(stored, mask, options)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-7)  # scales are float32
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("kernel", "options", "storage", "mask"),
    [
        pytest.param(kernel, OPTIONS[options], storage, mask, id=f"{kernel}-{options}-{storage}-{name}")
        for kernel, options, (storage, name, mask) in every_pair_on_cpu(PRESENT, OPTIONS, ALL)
    ],
)
def test_each_kernel_answers_or_says_why_not(kernel, storage, mask, options, device):
    """Cascades whose levels it does not take in one call are attended to level by level, and merge."""
    dtype = kernel.dtypes[0]
    loose = 1e-4 if dtype == torch.float32 else 2e-2

    def hold():
        stored, out, lse = call("fastattn", storage, mask, options, dtype, device)
        expected, expected_lse = by_hand(stored, mask, options)
        torch.testing.assert_close(out, expected, rtol=loose, atol=loose)
        torch.testing.assert_close(lse, expected_lse, rtol=loose, atol=loose)

    with kernel.forced():
        kernel.check(hold)


def test_what_no_storage_is_read_under_is_refused(device):
    """Rows under a plan over pages, and pages under one over rows."""
    over_rows, over_pages = ROWS["causal"].plan("refattn", device), MASKS["causal"].plan("refattn", device)
    for package in ("refattn", "fastattn"):
        for storage, plan, reason in (
            ("rows", over_pages, "plan: expected one over rows"),
            ("pages", over_rows, "plan: expected one over pages"),
            ("latents", over_rows, "plan: expected one over pages"),
            ("fp8 pairs", over_rows, "cache: expected"),
        ):
            stored = lay_out(storage, torch.float32)
            more = {name: moved(x, device) for name, x in stored.more.items()}
            path = importlib.import_module(f"{package}.{stored.path}")
            with pytest.raises(ValueError, match=reason):
                path.attention(
                    *(x.to(device) for x in stored.tensors), plan, AttentionOptions(softmax_scale=SCALE), **more
                )


def test_every_storage_meets_every_plan():
    """In this file, but for selected and compressed keys, and ranks, which read no others' plans."""
    plans = {mask.path for mask in [*MASKS.values(), *ROWS.values()]}
    assert plans == {*FILES} - {"differential", "mla", "quantized", "sparse", "compressed", "context_parallel"}
    read = {lay_out(storage, torch.float32).path for storage in OVER_PAGES}
    assert read - {"chunked_prefill"} == {"differential", "mla", "quantized"}
