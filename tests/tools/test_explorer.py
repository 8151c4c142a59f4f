"""The explorer computes what refattn computes: its logic runs in V8, for hundreds of random settings."""

import importlib
import json
import random
import re
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from einops import rearrange
from py_mini_racer import MiniRacer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import refattn
from refattn import cascade, chunked_prefill, kv_cache, local, masks, metadata, sliding_window, speculative
from refattn.attention import attend
from refattn.batch import Batch
from refattn.plan import Plan
from twinattn.bench.work import workload
from twinattn.course.drawing import examples
from twinattn.engine.kv_cache_dtype import FOUR_BITS
from twinattn.engine.storages import FourBitStorage
from twinattn.engine.twin import Twin

ROOT = Path(__file__).parent.parent.parent
LOGIC = (ROOT / "docs/explorer/logic.js").read_text()
MASKS = ("causal", "window", "chunk", "tree", "full")
SETTINGS_PER_MASK = 80
ITEM_SIZES = {"float32": 4, "bfloat16": 2, "fp8": 1}  # bytes of an element


class Engine:
    """V8 with the explorer's logic in it, and a call that takes and returns what JSON can hold, and infinities."""

    def __init__(self, racer: MiniRacer) -> None:
        self.racer = racer
        racer.eval(LOGIC)

    def __call__(self, function: str, *arguments: Any) -> Any:
        return self.evaluate(f"explorer.{function}(...given)", *arguments)

    def evaluate(self, expression: str, *given: Any) -> Any:
        """Evaluate an expression in which `given` are the arguments."""
        text = self.racer.eval(
            f"JSON.stringify(((given) => {expression})({json.dumps(given)}), "
            "(_, x) => (x === -Infinity ? '-Infinity' : x))"
        )
        return json.loads(text.replace('"-Infinity"', "-Infinity"))


@pytest.fixture(scope="module")
def explorer():
    with MiniRacer() as racer:  # unclosed, it would wait for its engine for ever
        yield Engine(racer)


def draw(mask: str, seed: int) -> dict[str, Any]:
    """Draw settings as a reader might make them, and stranger ones: no queries, no keys, more queries than keys."""
    rng = random.Random(f"{mask} {seed}")
    lens = []
    for _ in range(rng.randint(1, 6)):
        queries, context = rng.choice([0, 1, 1, 2, 5, 9]), rng.choice([0, 0, 3, 8, 17, 30])
        lens.append([queries, max(0, queries + context - rng.choice([0, 0, 0, 2]))])
    block = rng.choice([1, 2, 3, 4, 4, 8, 16])
    request = rng.randrange(len(lens))
    kv = rng.choice([1, 2, 8])
    return {
        "lens": lens,
        "mask": mask,
        "window": rng.choice([1, 2, 3, 7, 40]),
        "chunk": block * rng.choice([1, 2, 5]),
        "tree": [rng.randint(-1, i - 1) for i in range(rng.randint(0, 7))],
        "block": block,
        "shared": rng.choice([0, 0, 4, 9, 16, 29]),
        "splits": rng.choice([1, 1, 2, 3, 7]),
        "heads": kv * rng.choice([1, 4, 7]),
        "kv": kv,
        "size": rng.choice([64, 128]),
        "dtype": rng.choice([*ITEM_SIZES, *FOUR_BITS]),
        "query": [request, rng.randrange(max(1, lens[request][0]))],
        "step": 0,
        "machine": rng.randrange(3),
    }


class Drawn(NamedTuple):
    """Settings, what the explorer makes of them, and the batch that they are."""

    settings: dict[str, Any]
    shown: dict[str, Any]
    batch: Batch


@pytest.fixture(scope="module", params=MASKS)
def drawn(explorer, request) -> list[Drawn]:
    return settings_of(explorer, request.param)


def settings_of(explorer: Engine, mask: str) -> list[Drawn]:
    found = []
    for seed in range(SETTINGS_PER_MASK):
        settings = draw(mask, seed)
        shown = explorer("everything", settings)
        assert shown["settings"] == settings, "legal settings are taken as they are"
        queries, keys = zip(*settings["lens"], strict=True)
        found.append(Drawn(settings, shown, metadata.make_batch(queries, keys, shown["tables"])))
    return found


def plan_of(settings: dict[str, Any], batch: Batch) -> tuple[ModuleType, Plan]:
    """Return the path that computes the settings, and its plan; of a tree, that of the batch without one."""
    block_size = settings["block"]
    if settings["mask"] == "window":
        window_size = (settings["window"] - 1, 0)
        return sliding_window, sliding_window.plan(batch, window_size=window_size, block_size=block_size)
    if settings["mask"] == "chunk":
        return local, local.plan(batch, chunk_size=settings["chunk"], block_size=block_size)
    causal = settings["mask"] != "full"
    return chunked_prefill, chunked_prefill.plan(batch, block_size=block_size, causal=causal)


def tree_mask(query_len: int, seq_len: int, parents: list[int]) -> torch.Tensor:
    """Draw a tree over the last tokens of a sequence: a node sees what is before the tree, its ancestors and itself."""
    nodes = len(parents)
    if seq_len < nodes:
        return masks.causal(query_len, seq_len)
    visible = masks.causal(max(query_len, nodes), seq_len)
    visible[len(visible) - nodes :, seq_len - nodes :] = masks.tree(parents)
    return visible[len(visible) - query_len :]


def mask_of(settings: dict[str, Any], query_len: int, seq_len: int) -> torch.Tensor:
    if settings["mask"] == "tree":
        return tree_mask(query_len, seq_len, settings["tree"])
    return {
        "causal": masks.causal(query_len, seq_len),
        "window": masks.visible_keys(query_len, seq_len, causal=True, window_size=(settings["window"] - 1, -1)),
        "chunk": masks.chunk(query_len, seq_len, settings["chunk"]),
        "full": masks.full(query_len, seq_len),
    }[settings["mask"]]


# --- where are the keys? ---


def test_the_three_requests_are_those_of_the_drawings(explorer):
    shown = explorer("everything", {})
    assert [tuple(pair) for pair in shown["settings"]["lens"]] == list(examples.LENS)
    assert [tuple(blocks) for blocks in shown["tables"]] == list(examples.TABLES)
    assert shown["pool"] == examples.NUM_BLOCKS
    prefixed = explorer("everything", {"lens": [[q, s + 8] for q, s in examples.LENS], "shared": 8})
    assert [tuple(blocks[:2]) for blocks in prefixed["tables"]] == [examples.SYSTEM_BLOCKS] * 3


def test_tables_and_slots(drawn):
    """A block belongs to one request, but for those that are shared; slots are those of refattn."""
    for settings, shown, batch in drawn:
        block, queries = settings["block"], batch.query_lens.tolist()
        owners: dict[int, set[int]] = {}
        for request, (blocks, (query_len, seq_len)) in enumerate(zip(shown["tables"], settings["lens"], strict=True)):
            assert len(blocks) == len(set(blocks)) == -(-seq_len // block)
            assert all(0 <= each < shown["pool"] for each in blocks)
            for place, each in enumerate(blocks):
                owners.setdefault(each, set()).add(request)
                is_shared = (place + 1) * block <= min(settings["shared"], seq_len - query_len)
                assert is_shared or owners[each] == {request}
        slots = metadata.slot_mapping(batch, sum(queries), block_size=block)
        assert [slot for each in shown["slots"] for slot in each] == slots.tolist()


def test_sequences_are_those_of_the_plan(drawn):
    """Trimmed tables are those of `sliding_window.plan`, virtual batches those of `local.plan`."""
    for settings, shown, batch in drawn:
        block = settings["block"]
        _, plan = plan_of(settings, batch)
        first_keys = [0] * plan.batch.num_seqs if plan.first_keys is None else plan.first_keys.tolist()
        sequences = list(range(batch.num_seqs)) if plan.sequences is None else plan.sequences.tolist()
        its_tables = [] if plan.batch.block_table is None else plan.batch.block_table.tolist()
        expected = [
            dict(request=request, queries=queries, keys=keys, first=first, blocks=blocks[: -(-keys // block)])
            for request, queries, keys, first, blocks in zip(
                sequences,
                plan.batch.query_lens.tolist(),
                plan.batch.seq_lens.tolist(),
                first_keys,
                its_tables,
                strict=True,
            )
        ]
        assert shown["sequences"] == expected


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_levels_are_those_of_the_cascade(explorer, mask):
    num_shared = 0
    for settings, shown, batch in settings_of(explorer, mask):
        queries, keys = zip(*settings["lens"], strict=True)
        window = (settings["window"] - 1, 0) if mask == "window" else (-1, -1)
        prefixes = cascade.find_prefixes(queries, keys, shown["tables"], block_size=settings["block"])
        plan = cascade.plan(batch, prefixes=prefixes, block_size=settings["block"], window_size=window)
        num_shared += len(plan.levels) > 1
        assert len(shown["levels"]) == len(plan.levels)
        for groups, level in zip(shown["levels"], plan.levels, strict=True):
            rows = [*accumulate(queries, initial=0)]
            drawn = [
                (rows[group["last"]] - rows[group["first"]], group["begin"], group["end"])
                for group in groups
                if group["end"] > group["begin"]
            ]
            lengths = level.batch.query_lens, level.first_keys, level.batch.seq_lens
            planned = zip(*(each.tolist() for each in lengths), strict=True)
            assert drawn == [(count, first, first + length) for count, first, length in planned if length]
    assert num_shared > 10


# --- who may see whom? ---


def test_masks(explorer, drawn):
    of_all = "given[0].lens.map((lens) => Array.from({ length: lens[0] }, (_, i) => explorer.runs(given[0], lens, i)))"
    for settings, shown, _ in drawn:
        runs = explorer.evaluate(of_all, settings)
        for request, (query_len, seq_len) in enumerate(settings["lens"]):
            visible = torch.zeros(query_len, seq_len, dtype=torch.bool)
            for row, its_runs in enumerate(runs[request]):
                for begin, end in its_runs:
                    assert begin < end
                    visible[row, begin:end] = True
            assert torch.equal(visible, mask_of(settings, query_len, seq_len))
            if settings["mask"] != "tree":
                assert shown["positions"][request] == masks.query_positions(query_len, seq_len).tolist()


def test_a_tree_is_that_of_speculative(explorer):
    """Masks, positions and answers are those of `speculative`, where all query rows are nodes."""
    num_trees = 0
    for settings, shown, _ in settings_of(explorer, "tree"):
        request, row = settings["query"]
        query_len, seq_len = settings["lens"][request]
        if not 0 < query_len <= len(settings["tree"]) <= seq_len:
            continue
        num_trees += 1
        alone = metadata.make_batch([query_len], [seq_len], [shown["tables"][request]])
        trees = speculative.make_trees([settings["tree"]])
        assert shown["positions"][request] == speculative.positions(alone, trees, query_len).tolist()
        query = torch.zeros(query_len, 1, 4, dtype=torch.float64)
        query[row, 0] = torch.tensor(shown["answer"]["query"], dtype=torch.float64)
        plan = speculative.plan(alone, block_size=settings["block"], trees=trees)
        out = speculative.attention(query, *pool_of(explorer, settings, shown), plan)
        assert shown["answer"]["out"] == pytest.approx(out[row, 0].tolist(), abs=1e-12)
    assert num_trees > 10


# --- how do partial answers combine? ---


def test_answers_merge(explorer, drawn):
    """The answer of a query, merged from levels and splits, is that of refattn over the same pool."""
    num_parts = set()
    for settings, shown, batch in drawn:
        request, row = settings["query"]
        query_len, seq_len = settings["lens"][request]
        if not query_len:
            continue
        answer = shown["answer"]
        num_parts.add(len(answer["parts"]))
        key_cache, value_cache = pool_of(explorer, settings, shown)
        total = sum(batch.query_lens.tolist())
        query = torch.zeros(total, 1, 4, dtype=torch.float64)
        at = int(batch.cu_seqlens_q[request]) + row
        query[at, 0] = torch.tensor(answer["query"], dtype=torch.float64)
        if settings["mask"] == "tree":
            keys, values = (
                kv_cache.gather(cache, batch.block_table[request], seq_len) for cache in (key_cache, value_cache)
            )
            visible = mask_of(settings, query_len, seq_len)[row : row + 1]
            out, lse = (x[0] for x in attend(query[at : at + 1], keys, values, visible))
        else:
            path, plan = plan_of(settings, batch)
            out, lse = (x[at] for x in path.attention(query, key_cache, value_cache, plan, return_lse=True))
        torch.testing.assert_close(torch.tensor(answer["out"], dtype=torch.float64), out[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.tensor(answer["lse"], dtype=torch.float64), lse[0], rtol=0, atol=1e-12)
        check_parts(settings, answer)
    assert num_parts >= {1, 2, 3}


def pool_of(explorer: Engine, settings: dict[str, Any], shown: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool as the explorer fills it: a slot holds a key and a value; NaN where nothing is."""
    count, block = shown["pool"], settings["block"]
    written = torch.zeros(count * block, dtype=torch.bool)
    for blocks, (_, seq_len) in zip(shown["tables"], settings["lens"], strict=True):
        for position in range(seq_len):
            written[blocks[position // block] * block + position % block] = True
    caches = []
    for function in ("keyAt", "valueAt"):
        rows = explorer.evaluate(
            f"Array.from({{ length: given[0] }}, (_, slot) => explorer.{function}(slot))", len(written)
        )
        cache = torch.tensor(rows, dtype=torch.float64)
        cache[~written] = torch.nan
        caches.append(rearrange(cache, "(n p) d -> n p 1 d", n=count))
    return caches[0], caches[1]


def check_parts(settings: dict[str, Any], answer: dict[str, Any]) -> None:
    """Check each part of an answer, and its online softmax after each tile, against the formula over its keys."""
    seen = []
    for part in answer["parts"]:
        keys: list[dict[str, Any]] = []
        for tile in part["tiles"]:
            keys += tile["keys"]
            scores = torch.tensor([key["score"] for key in keys if key["visible"]], dtype=torch.float64)
            values = torch.tensor([key["value"] for key in keys if key["visible"]], dtype=torch.float64)
            if len(scores):
                weights = (scores - scores.max()).exp()
                assert tile["max"] == scores.max()
                assert tile["sum"] == pytest.approx(float(weights.sum()), abs=1e-12)
                assert tile["acc"] == pytest.approx((weights @ values).tolist(), abs=1e-12)
                assert len(tile["keys"]) <= settings["block"]
            else:
                assert (tile["max"], tile["sum"]) == (-torch.inf, 0)
        seen += [key["key"] for key in keys]
        scores = torch.tensor([key["score"] for key in keys if key["visible"]], dtype=torch.float64)
        assert part["lse"] == pytest.approx(float(scores.logsumexp(0)), abs=1e-12)
    assert seen == list(range(settings["lens"][settings["query"][0]][1])), "every key is in one part"
    assert sum(answer["shares"]) == pytest.approx(1.0 if answer["lse"] > -torch.inf else 0.0)


# --- what it costs ---


def test_costs_are_those_of_the_benchmark(drawn):
    """Operations, bytes read and bytes written are counted as `twinattn bench` counts them for its floors."""
    for settings, shown, _ in drawn:
        mask = settings["mask"]
        lens = tuple((queries, keys) for queries, keys in settings["lens"] if queries and keys >= queries)
        if len(lens) < len(settings["lens"]) or settings["dtype"] not in ("float32", "bfloat16") or mask == "tree":
            continue  # the benchmark has no such work
        queries, keys = zip(*settings["lens"], strict=True)
        prefixes = cascade.find_prefixes(queries, keys, shown["tables"], block_size=settings["block"])
        if mask == "window" and prefixes:
            continue  # nor a cascade that windows cut into
        same = len(prefixes) == 1 and prefixes[0].last - prefixes[0].first == len(lens) and mask == "causal"
        work = workload(
            lens,
            block_size=settings["block"],
            heads=(settings["heads"], settings["kv"]),
            head_size=settings["size"],
            causal=mask != "full",
            window=settings["window"] if mask == "window" else 0,
            chunk=settings["chunk"] if mask == "chunk" else 0,
            shared=prefixes[0].end if same else 0,
        )
        itemsize = ITEM_SIZES[settings["dtype"]]
        cost = shown["cost"]
        assert cost["flops"] == work.flops()
        if same or not prefixes or mask != "causal":
            assert cost["bytes"]["queries"] + cost["bytes"]["keys"] == work.reads(itemsize)
        assert cost["bytes"]["outputs"] == work.writes(itemsize)


def bytes_per_key(settings):
    """Return the bytes of a key and its value: in 4 bits those of a pool that the engine allocates, scales included."""
    kv, size, dtype = (settings[name] for name in ("kv", "size", "dtype"))
    if dtype not in FOUR_BITS:
        return 2 * kv * size * ITEM_SIZES[dtype]
    pool = FourBitStorage(kv, size, dtype).allocate(
        Twin(refattn), 1, 1, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    return sum(x.nbytes for x in pool)


def test_pairs_and_keys_are_those_of_the_mask(drawn):
    for settings, shown, _ in drawn:
        visible = [mask_of(settings, *lens) for lens in settings["lens"]]
        assert shown["cost"]["pairs"] == sum(int(each.sum()) for each in visible)
        per_key = bytes_per_key(settings)
        seen = [torch.nonzero(each.any(0)).flatten() for each in visible]
        apart = sum(int(each[-1] - each[0]) + 1 for each in seen if len(each))
        assert shown["cost"]["apart"] == apart * per_key
        read = 0  # keys of each group of each level that one of its members sees
        for group in (group for groups in shown["levels"] for group in groups):
            keys = [key for each in seen[group["first"] : group["last"]] for key in each.tolist()]
            of_group = {key for key in keys if group["begin"] <= key < group["end"]}
            read += max(of_group) - min(of_group) + 1 if of_group else 0
        assert shown["cost"]["bytes"]["keys"] == read * per_key


def test_the_matrices_around_it_are_those_of_llama_3(explorer):
    """Weights of one layer of Llama-3-8B, less its two norms; every row of the step shares one read of them."""
    linear = explorer("everything", {"lens": [[1, 9]] * 5, "heads": 32, "kv": 8, "size": 128})["cost"]["linear"]
    with torch.device("meta"):
        sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
        layer = LlamaDecoderLayer(LlamaConfig(**sizes), 0)
    parameters = sum(x.numel() for x in layer.parameters() if x.ndim == 2)
    assert linear == {"moved": 2 * parameters, "flops": 5 * 2 * parameters, "intensity": 5}


# --- settings ---


def test_an_address_holds_the_settings(explorer, drawn):
    for settings, shown, _ in drawn:
        hash = explorer("toHash", shown["settings"])
        assert re.fullmatch(r"[\w=&,;-]*", hash), "readable, and whole when it is pasted"
        assert explorer("fromHash", f"#{hash}") == settings
    assert explorer("toHash", explorer("legal", {})) == ""


def test_presets_and_links_are_addresses(explorer):
    """What the page offers, and what pages and notebooks link to, is a state as the explorer writes it."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "README.md"]
    links = [link for page in pages for link in re.findall(r"explorer/index\.md#([^)\s]+)\)", page.read_text())]
    presets = explorer.evaluate("Object.values(explorer.PRESETS)")
    assert len(presets) > 5
    for hash in [*links, *presets]:
        assert explorer("toHash", explorer("fromHash", hash)) == hash


def test_the_machines_are_those_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    machines = importlib.import_module("readme").machines()
    assert (ROOT / "docs/explorer/machines.js").read_text() == machines, "`make readme` writes it"


@pytest.mark.parametrize(
    "hash",
    [
        "",
        "#",
        "lens=",
        "lens=1,2;x",
        "lens=99999,1",
        "block=3&mask=chunk&chunk=5",
        "block=0&chunk=0",
        "mask=none&dtype=int3",
        "dtype=int4&size=63",
        "dtype=nvfp4&size=575",
        "tree=5,5&query=9,9",
        "heads=7&kv=8",
        "splits=1e9",
        "block",
        "unknown=3&window=-1",
        "query=1",
        "%6Cens=2,5",
    ],
)
def test_nonsense_in_an_address_becomes_legal_settings(explorer, hash):
    shown = explorer("everything", explorer("fromHash", hash))
    settings = shown["settings"]
    assert explorer("legal", settings) == settings
    assert settings["mask"] != "chunk" or settings["chunk"] % settings["block"] == 0
    assert settings["heads"] % settings["kv"] == 0
    assert settings["size"] % FOUR_BITS.get(settings["dtype"], 1) == 0
    assert all(-1 <= parent < node for node, parent in enumerate(settings["tree"]))
    request, row = settings["query"]
    assert row <= max(0, settings["lens"][request][0] - 1)
