"""The checks of properties: each calls a kernel, and compares some of its outputs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from twinattn.kit import packed
from twinattn.kit.example import PATHS, Answers, Arguments, Example, poison
from twinattn.kit.hold import LOUD, ask, hold, named_tensors
from twinattn.kit.kernel import Kernel
from twinattn.kit.memory import laid_out
from twinattn.kit.property import (
    LOUDLY,
    READ_OUT,
    Broken,
    CrashedError,
    NotClaimedError,
    RefusedError,
    outputs_alone,
)
from twinattn.kit.readout import one_hot_values
from twinattn.kit.reference import expected
from twinattn.kit.tolerance import assert_close

LSE_OF_ZEROS = 2e-4  # the error of a log-sum-exp where all products are 0, in any type: ATen's is 5e-5
MOST_COMPARED = 500  # sequences of a batch; in a larger one only the masks, or some sequences, are compared
MOST_ROWS = 4096  # query rows of a batch; in a larger one only the masks are compared
FEW_DECODES = 100  # the same for a batch with options
EVERY, LAST = 7, 24  # the decodes compared in a larger batch: every seventh, and the last ones
FLOAT32_EPS = torch.finfo(torch.float32).eps
FAR_BOUND = 4096  # keys: a server may pass the longest sequence of its model as the upper bound
LOW = 60.0  # added to keys and subtracted from queries: all scores are then far below -10,000


@outputs_alone
def alone(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the selection of each query alone, with the queries in reverse order, and in a second call."""
    arguments = example.tensors(dtype, device)
    scores = arguments["scores"]
    whole = ask(kernel, example, arguments)["out"]
    flipped = ask(kernel, example, arguments | dict(scores=scores.flip(0)))["out"].flip(0)
    again = ask(kernel, example, arguments)["out"]
    for row in range(len(scores)):
        one = ask(kernel, example, arguments | dict(scores=scores[row : row + 1]))["out"][0]
        for name, other in (("alone", one), ("in another order", flipped[row]), ("when asked again", again[row])):
            if sorted(other.tolist()) != sorted(whole[row].tolist()):
                raise Broken(f"row {row}: other keys are selected {name}")


@outputs_alone
def call(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Call the kernel: `ask` checks the type and shape of its output."""
    ask(kernel, example, example.tensors(dtype, device))


@outputs_alone
def answer(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the output, or the written pools or states, with the reference."""
    arguments = example.tensors(dtype, device)
    answers = ask(kernel, example, arguments)
    hold(example, arguments, answers, only=() if example.path in ("kv_cache", "recurrent") else ("out",))


def lse(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the log-sum-exp alone."""
    arguments = example.tensors(dtype, device)
    answers = ask(kernel, example, arguments)
    if "lse" not in answers and kernel.takes("return_lse"):
        raise Broken("there is no lse, though the kernel takes return_lse=True")
    if "lse" not in answers:
        raise NotClaimedError("returns no log-sum-exp")
    hold(example, arguments, answers, only=("lse",))
    if "query" in arguments:
        counted(kernel, example, arguments)


def counted(kernel: Kernel, example: Example, arguments: Arguments) -> None:
    """Compare the log-sum-exp of zero queries in float32 precision, whatever their type: all products are exactly 0.

    Without options it is the logarithm of the number of visible keys.
    """
    arguments = arguments | dict(query=torch.zeros_like(arguments["query"]))
    came = ask(kernel, example, arguments)["lse"].detach().cpu().double()
    want = expected(example, arguments)[0]["lse"].double()
    off = (came - want).abs().masked_fill(came == want, 0.0)  # no difference where both are infinite, or the same
    if not (off <= LSE_OF_ZEROS).all():
        row, head = (~(off <= LSE_OF_ZEROS)).nonzero()[0].tolist()
        raise Broken(
            f"lse: {came[row, head]:.5f} in row {row}, head {head}, expected {want[row, head]:.5f}: "
            "queries are 0, so it is exact in float32, whatever their type"
        )


def everything(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the output and the log-sum-exp with the reference."""
    arguments = example.tensors(dtype, device)
    hold(example, arguments, ask(kernel, example, arguments))


def loud(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare where scores are in the hundreds, and in float32 where all of them are far below -10,000."""
    arguments = example.tensors(dtype, device)
    if example.path == "merge":
        arguments["lses"] = [x * 60 for x in arguments["lses"]]
    else:
        arguments["query"] = arguments["query"] * LOUD
    hold(example, arguments, ask(kernel, example, arguments), is_loud=True)
    keys = [word for word in ("key", "key_cache") if word in arguments]
    if dtype == torch.float32 and keys and example.path in READ_OUT:
        low = example.tensors(dtype, device)
        low["query"], low[keys[0]] = low["query"] - LOW, low[keys[0]] + LOW
        hold(example, low, ask(kernel, example, low), is_loud=True)


def scaled(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare everything, where scores are in the hundreds, too: the largest product is not the largest score."""
    everything(kernel, example, dtype, device)
    if example.path in LOUDLY:
        loud(kernel, example, dtype, device)


@outputs_alone
def mask(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Read the mask out: with zero queries and one-hot values the output is the mask, divided by its row count."""
    seen = seen_masks(kernel, example, dtype, device)
    row = 0
    for i, (want, share, weights) in enumerate(zip(example.masks(), example.shares(), seen, strict=True)):
        got = weights != 0  # true for NaN
        for head in range(weights.shape[1]):
            wrong = (got[:, head, : want.shape[1]] != want).nonzero()
            if len(wrong):
                t, s = wrong[0].tolist()
                should = "" if want[t, s] else "not "
                raise Broken(f"sequence {i}, head {head}: query row {t} should {should}see key {s}")
            if got[:, head, want.shape[1] :].any():
                raise Broken(f"sequence {i}, head {head}: weight on a key that does not exist")
        off = (weights[..., : want.shape[1]] - share[:, None]).abs().max() if weights.numel() else torch.tensor(0.0)
        if not off <= 4 * torch.finfo(dtype).eps:
            raise Broken(f"sequence {i}: the visible keys do not weigh alike, though all their scores are 0")
        row += len(want)


def without_queries(arguments: Arguments) -> Arguments:
    """Return the arguments with zero queries, so that all scores are 0."""
    return arguments | dict(query=torch.zeros_like(arguments["query"]))


def glance(
    kernel: Kernel,
    example: Example,
    dtype: torch.dtype,
    device: str,
    alike: Callable[[Arguments], Arguments] = without_queries,
    off: float = 16 * FLOAT32_EPS,
) -> None:
    """Check the masks in one call: with equal scores, a query returns the mean of the values that it sees.

    Values are 1 and -1, so that one key more or less among n changes every element by about 1/n. `alike` makes the
    scores equal, and `off` is the rounding error of the mean that this allows. The parts of a cascade may be rounded to
    the type of the output before they are merged.
    """
    generator = torch.Generator().manual_seed(example.seed)
    values = [
        torch.randint(0, 2, (s, example.heads[1], example.value_size), generator=generator).float() * 2 - 1
        for _, s in example.lens
    ]
    for first, last, end in example.shared_prefixes() if example.path == "cascade" else ():
        for value in values[first + 1 : last]:
            value[:end] = values[first][:end]
    arguments = example.tensors(dtype, device, values=values)
    out = ask(kernel, example, alike(arguments))["out"].detach().cpu()
    row, group = 0, example.heads[0] // example.heads[1]
    for i, (shares, value) in enumerate(zip(example.shares(), values, strict=True)):
        value = value[:, :1] if "latent_rank" in arguments else value  # where all heads share one latent
        want = torch.einsum("ts,shd->thd", shares, value.double()).repeat_interleave(group, dim=1)
        error = (out[row : row + len(shares)].double() - want).abs().amax(-1)
        rounded = want.abs()
        if example.path == "cascade":
            rounded = rounded + _parts(example, i, shares, value.double()).repeat_interleave(group, dim=1) / 2
        wrong = (~(error <= torch.finfo(dtype).eps * rounded.amax(-1) + off)).nonzero()
        if len(wrong):
            t, head = wrong[0].tolist()
            raise Broken(
                f"sequence {i}, head {head}: query row {t} does not return the mean of the keys that it may see"
            )
        row += len(shares)


def _parts(example: Example, i: int, shares: Tensor, value: Tensor) -> Tensor:
    """Return the sum of the sizes of the parts that a cascade merges for a sequence, `[t, hk, dv]`."""
    ends = sorted({end for first, last, end in example.shared_prefixes() if first <= i < last})
    levels = zip([0, *ends], [*ends, shares.shape[1]], strict=True)
    sums = [torch.einsum("ts,shd->thd", shares[:, low:high], value[low:high]).abs() for low, high in levels]
    return torch.stack(sums).sum(0)


def at_landmarks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Check the mask where the output shows it and no option changes the weights, and compare everything."""
    if example.path in READ_OUT and not {"alibi_slopes", "sinks"} & set(example.options):
        glance(kernel, example, dtype, device)
        if len(example.lens) > MOST_COMPARED or example.num_tokens > MOST_ROWS:
            return
    arguments = example.tensors(dtype, device)
    hold_some(example, arguments, ask(kernel, example, arguments), most=MOST_COMPARED)


def hold_some(
    example: Example, arguments: Arguments, answers: Answers, *, most: int, only: tuple[str, ...] = ()
) -> None:
    """Compare with the reference; of a batch with more decodes than `most`, compare every seventh and the last ones.

    Sequences are independent, and the reference computes them one at a time, so some of them can stand for all.
    """
    n = len(example.lens)
    of_each_row = {"positions", "first_visible", "last_visible", "prefixes", "trees"} & arguments.keys()
    is_of_decodes = all(q == 1 for q, _ in example.lens) and not of_each_row
    in_pages = "batch" in arguments and arguments["batch"].block_table is not None
    if n <= most or not is_of_decodes or not in_pages or example.options.get("scales_of") == "sequences":
        return hold(example, arguments, answers, only=only)
    chosen = torch.tensor(sorted({*range(0, n, EVERY), *range(n - LAST, n)}))
    batch = arguments["batch"]
    at = chosen.to(batch.seq_lens.device)
    tables: dict[str, Any] = dict(
        cu_seqlens_q=torch.arange(len(at) + 1, dtype=torch.int32, device=at.device), num_tokens=len(at)
    )
    tables["block_table"] = batch.block_table[at]
    part = replace(example, lens=tuple(example.lens[i] for i in chosen.tolist()), padding_rows=0)
    given = arguments | dict(query=arguments["query"][at], batch=replace(batch, seq_lens=batch.seq_lens[at], **tables))
    try:
        hold(part, given, {name: x[at.to(x.device)] for name, x in answers.items()}, only=only)
    except Broken as error:
        raise Broken(f"of sequences {chosen[:3].tolist()} ... {n - 1}: {error}") from None


@outputs_alone
def outputs_at_landmarks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Check the mask, and compare the outputs without the log-sum-exp."""
    glance(kernel, example, dtype, device)
    answer(kernel, example, dtype, device)


def seen_masks(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Read the attention weights of each sequence out of the output, `[t, h, columns]`."""
    width = example.value_size
    rows, pieces = example.num_tokens, []
    for first in range(0, max(1, max((s for _, s in example.lens), default=0)), width):
        out = ask(kernel, example, one_hot(example, dtype, device, first))["out"].detach().float().cpu()
        pieces.append(out[:rows])
    return list(torch.cat(pieces, dim=-1).split([q for q, _ in example.lens]))


def one_hot(example: Example, dtype: torch.dtype, device: str, first: int = 0) -> Arguments:
    """Return the arguments with zero queries and one-hot values, beginning with the key `first`."""
    arguments = example.tensors(dtype, device, values=one_hot_values(example, first))
    return arguments | dict(query=torch.zeros_like(arguments["query"]))


def every_part(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Check that each of many parts counts: with equal log-sum-exps and outputs of 1 and -1 the merge is the mean."""
    arguments, generator = example.tensors(dtype, device), torch.Generator().manual_seed(example.seed)
    shape = arguments["outs"][0].shape
    signs = [torch.randint(0, 2, shape, generator=generator) * 2 - 1 for _ in arguments["outs"]]
    outs, lses = [x.to(arguments["outs"][0]) for x in signs], [torch.zeros_like(x) for x in arguments["lses"]]
    came = ask(kernel, example, dict(outs=outs, lses=lses))["out"].detach().cpu().double()
    want = torch.stack(signs).double().mean(0)
    allowed = torch.finfo(dtype).eps * want.abs() + len(signs) * torch.finfo(torch.float32).eps
    if came.shape != want.shape or not ((came - want).abs() <= allowed).all():
        raise Broken(f"out: not the mean of {len(signs)} parts with the same log-sum-exp")


def combined(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare everything that is returned by a call with the options of the example."""
    said = example.options.get
    arguments = example.tensors(dtype, device)
    region = said("poison")
    given = poison(example, arguments, region) if region else arguments
    more: dict[str, Any] = {"return_lse": False} if said("return_lse") is False else {}
    if said("out"):
        h, dv = example.heads[0], example.output_size
        more["out"] = torch.full((len(arguments["query"]), h, dv), 7.0, dtype=dtype, device=device)
    answers = ask(kernel, example, laid_out(given, said("layout", 0)), **more)
    only = () if said("return_lse") is not False else ("out",)
    hold_some(example, arguments, answers, most=FEW_DECODES, only=only)
    if said("out"):
        hold(example, arguments, dict(out=more["out"]))


@outputs_alone
def without_lse(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the output of a call with return_lse=False with the reference."""
    arguments = example.tensors(dtype, device)
    hold(example, arguments, ask(kernel, example, arguments, return_lse=False), only=("out",))


def upper_bounds(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with `max_query_len` and `max_seq_len` above the longest of the batch, and a wrong `num_keys`."""
    arguments = example.tensors(dtype, device)
    batch = arguments["batch"]
    more = 0 if kernel.claims.max_query_len == 1 else 3
    columns = example.block_size if batch.block_table is None else batch.block_table.shape[1] * example.block_size
    most = max(batch.max_seq_len, min(columns, batch.max_seq_len + example.block_size))
    batch = replace(batch, max_query_len=batch.max_query_len + more, max_seq_len=most, num_keys=_wrong(example))
    hold(example, arguments, ask(kernel, example, arguments | dict(batch=batch)))


def far_bounds(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare with the upper bounds and the wide block table of a server that passes those of its model."""
    arguments = example.tensors(dtype, device)
    batch, most = arguments["batch"], FAR_BOUND
    if batch.block_table is not None:
        more = torch.full_like(batch.block_table[:, :1], -1).expand(-1, -(-most // example.block_size))
        batch = replace(batch, block_table=torch.cat([batch.block_table, more], dim=1))
    longest = 1 if kernel.claims.max_query_len == 1 else kernel.claims.max_query_len or most // 8
    longest, most = max(batch.max_query_len, longest), max(batch.max_seq_len, most)
    batch = replace(batch, max_query_len=longest, max_seq_len=most, num_keys=_wrong(example))
    hold(example, arguments, ask(kernel, example, arguments | dict(batch=batch)))


def _wrong(example: Example) -> int | None:
    """Return a number of keys that a batch may state: far too small, too small, far too large, or none."""
    keys = sum(s for _, s in example.lens)
    return (1, 100 * keys + 9, keys // 2, None)[example.seed]


def decode_is_prefill(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the last query of each sequence, alone, with the same query among the others."""
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    alone, of_last, last = last_queries(example, arguments, dtype, device)
    decoded = ask(kernel, alone, of_last)
    wide, low = expected(alone, of_last)
    for name in decoded:
        rows = whole[name].cpu()[last]
        error = (wide[name] - low[name]).abs().max()
        allowed = 4 * error + 64 * torch.finfo(dtype).eps * wide[name].abs().max()
        if not (rows - decoded[name].cpu()).abs().max() <= allowed:
            raise Broken(f"{name}: the last query of a sequence gets another answer alone than among the others")


def last_queries(
    example: Example, arguments: Arguments, dtype: torch.dtype, device: str
) -> tuple[Example, Arguments, Tensor]:
    """Return a batch of the last query of each sequence, over the same keys, and the rows of these queries."""
    last = torch.tensor([q for q, _ in example.lens]).cumsum(0) - 1
    alone = replace(example, lens=tuple((1, s) for _, s in example.lens))
    batch = alone.tensors(dtype, device)["batch"]
    if arguments["batch"].block_table is not None:
        batch = replace(batch, block_table=arguments["batch"].block_table)
    return alone, arguments | dict(query=arguments["query"][last.to(arguments["query"].device)], batch=batch), last


def invariance(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare each sequence alone with the same one among others, bit for bit."""
    example = replace(example, options={**example.options, "batch_invariant": True})
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    row = 0
    for i, (q, s) in enumerate(example.lens):
        alone = replace(example, lens=((q, s),))
        batch = alone.tensors(dtype, device)["batch"]
        mine = arguments | dict(query=arguments["query"][row : row + q])
        if arguments["batch"].block_table is not None:
            batch = replace(batch, block_table=arguments["batch"].block_table[i : i + 1])
        else:
            first = sum(s for _, s in example.lens[:i])
            mine |= {word: arguments[word][first : first + s] for word in ("key", "value")}
        answers = ask(kernel, alone, mine | dict(batch=batch))
        for name, came in answers.items():
            if not torch.equal(came, whole[name][row : row + q]):
                raise Broken(f"{name}: sequence {i} gets other bits alone than among the others")
        row += q


def token_invariance(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare the last query of each sequence, alone, with the same query among the others, bit for bit."""
    example = replace(example, options={**example.options, "batch_invariant": True})
    arguments = example.tensors(dtype, device)
    whole = ask(kernel, example, arguments)
    alone, of_last, last = last_queries(example, arguments, dtype, device)
    for name, came in ask(kernel, alone, of_last).items():
        if not torch.equal(came, whole[name][last.to(came.device)]):
            raise Broken(f"{name}: the last query of a sequence gets other bits alone than among those before it")


def again(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Compare a repeated call with the reference, after a call over other and more sequences.

    Later calls must not write into outputs that were returned before.
    """
    other = replace(example, lens=(*example.lens, *((q, s + 7) for q, s in example.lens)), seed=example.seed + 1)
    arguments = example.tensors(dtype, device)
    ask(kernel, example, arguments)
    ask(kernel, other, other.tensors(dtype, device))
    answers = ask(kernel, example, arguments)
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"in the second call, {error}") from None
    before = {name: x.clone() for name, x in answers.items()}
    ask(kernel, example, arguments | again_with(arguments))
    for name, x in before.items():
        if not torch.equal(x.nan_to_num(7.0), answers[name].nan_to_num(7.0)):
            raise Broken(f"{name}: a later call wrote into what an earlier one had returned")
    if PATHS[example.path].attends:
        in_the_same_memory(kernel, example, arguments)


def in_the_same_memory(kernel: Kernel, example: Example, arguments: Arguments) -> None:
    """Compare a call over new values in the same memory, as in a server's next step."""
    for word in ("query", "key", "value", *(pool for pool, _ in PATHS[example.path].pools)):
        if word in arguments and arguments[word].itemsize > 1:
            arguments[word].neg_().add_(0.25)
    batch = arguments["batch"]
    if batch.block_table is not None and example.path != "cascade":  # the sequences of a cascade share blocks
        pool, before = PATHS[example.path].pools[0]
        batch.block_table.neg_().add_(arguments[pool].shape[before] - 1)
    batch = arguments["batch"] = replace(batch, max_seq_len=batch.max_seq_len + 1)  # it holds for later steps, too
    answers = ask(kernel, example, arguments)
    del kernel.calls[:-1]  # their numbers have changed
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"with other numbers in the same memory, {error}") from None
    in_the_same_tables(kernel, example, arguments)


def in_the_same_tables(kernel: Kernel, example: Example, arguments: Arguments) -> None:
    """Compare calls after other lengths and blocks were written into the tensors of the batch, as in next steps.

    First the sequences are those of the batch in reverse order: the sums and maxima of their lengths, which a kernel
    may have kept, are the same. Then one that has room in its last block is a token longer, too; and one that has none
    is a token shorter.
    """
    p, lens = example.block_size, list(example.lens if "prefixes" in arguments else example.lens[::-1])
    if lens != [*example.lens]:
        _in_the_same_tables(kernel, example, arguments, lens)
    if arguments["batch"].block_table is not None and not {"positions", "first_visible", "prefixes"} & arguments.keys():
        least = kernel.claims.min_seq_len
        lens = [(q, s + 1 if s % p else s - 1 if p > 1 and s > max(q, least) else s) for q, s in lens]
    _in_the_same_tables(kernel, example, arguments, lens)


def _in_the_same_tables(kernel: Kernel, example: Example, arguments: Arguments, lens: list[tuple[int, int]]) -> None:
    """Compare a call after the tables of other lengths were written into the tensors of a batch."""
    other = replace(example, lens=tuple(lens))
    device = str(arguments["batch"].seq_lens.device)
    tables = dict(named_tensors(other.tensors(arguments["query"].dtype, device)))
    before = [(x, x.clone()) for _, x in named_tensors(arguments)]
    for name, x in named_tensors(arguments):
        if not x.is_floating_point() and name in tables and tables[name].shape == x.shape:
            x.copy_(tables[name])
    first = kernel.calls[:]
    answers = ask(kernel, other, arguments)
    kernel.calls.clear()  # known mistakes are tried on the lengths of the example
    try:
        hold(other, arguments, answers)
    except Broken as error:
        raise Broken(f"with other lengths and blocks in the same tensors, {error}") from None
    for x, numbers in before:
        x.copy_(numbers)
    kernel.calls[:] = first


def again_with(arguments: Arguments) -> Arguments:
    """Return other values for a call of the same sizes."""
    if "query" in arguments:
        return {"query": -arguments["query"]}
    if "scores" in arguments:
        return {"scores": arguments["scores"].flip(0)}
    words = [word for word in ("key", "value") if word in arguments]
    return {word: -arguments[word] for word in words} or {"outs": [-x for x in arguments["outs"]]}


@outputs_alone
def nan(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Put NaN into a key, a value or a query of the first sequence: it must reach all queries that see it.

    Queries of the same sequence that do not see it may return anything: it is in their tile.
    """
    arguments = example.tensors(dtype, device)
    i = next((i for i, (q, s) in enumerate(example.lens) if q and s), None)
    if i is None:
        return
    words = [word for word in ("value_cache", "key_cache", "value", "key", "cache") if word in arguments]
    word = "query" if example.seed == 3 else words[example.seed % min(2, len(words))]
    x = arguments[word] = arguments[word].clone()
    key = min(int(example.options.get("nan_at", 0.0) * example.lens[i][1]), example.lens[i][1] - 1)
    group = example.heads[0] // example.heads[1]
    one_head = example.seed == 2 and x.ndim > 2 and word != "query" and "latent_rank" not in arguments
    heads = slice(group * (example.heads[1] - 1), None) if one_head else slice(None)
    of_heads = slice(example.heads[1] - 1, None) if one_head else slice(None)
    owners = {i}
    if word == "query":
        x[sum(q for q, _ in example.lens[:i])] = torch.nan
    elif word in ("key", "value"):
        x[sum(s for _, s in example.lens[:i]) + key, of_heads] = torch.nan
    else:
        not_a_number = packed.NAN if x.dtype == torch.uint8 else torch.nan
        blocks = arguments["batch"].block_table[:, key // example.block_size].tolist()
        row = x[blocks[i], key % example.block_size]
        if x.dtype == torch.uint8 and example.seed % 2:
            row[0] = packed.NAN_CODE  # one NaN element under a finite scale
        else:
            row[of_heads] = torch.full_like(row[of_heads].float(), not_a_number).to(x.dtype)
        owners = {n for n, (_, s) in enumerate(example.lens) if blocks[n] == blocks[i] and key < s}
    out = ask(kernel, example, arguments)["out"].detach().cpu()
    wide, low = expected(example, arguments)
    row = 0
    for n, ((q, _), visible) in enumerate(zip(example.lens, example.masks(), strict=True)):
        rows = slice(row, row + q)
        row += q
        if n in owners:
            sees = visible[:1].any(1) if word == "query" else visible[:, key]
            hidden = (sees[:, None, None] & ~out[rows][: len(sees), heads].isnan()).nonzero()
            if len(hidden):
                t, head, _ = hidden[0].tolist()
                head += group * (example.heads[1] - 1) if one_head else 0
                where = "which is NaN itself" if word == "query" else f"which sees a NaN in {word}, in key {key}"
                raise Broken(f"out: a number in row {t} of sequence {n}, head {head}, {where}")
        else:
            try:
                assert_close(*(x[rows] for x in (out, wide["out"], low["out"])), name=f"out of sequence {n}")
            except AssertionError as error:
                raise Broken(f"with a NaN in sequence {i}, {error}") from None


def graph(kernel: Kernel, example: Example, dtype: torch.dtype, device: str) -> None:
    """Capture a CUDA graph over as many keys as queries, and replay it over all keys of the batch."""
    arguments = example.tensors(dtype, device)
    batch = arguments["batch"]
    long = batch.seq_lens.clone()
    arguments = arguments | dict(batch=replace(batch, seq_lens=batch.query_lens.contiguous()))
    ask(kernel, example, arguments)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            kernel.function(**kernel.asked(example, arguments))
        torch.cuda.current_stream().wait_stream(stream)
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording):
            answers = kernel.named(kernel.function(**kernel.asked(example, arguments)))
    except NotImplementedError as error:
        raise RefusedError(str(error)) from error
    except Exception as error:  # another author's kernel may raise anything
        raise CrashedError(f"cannot be captured: {(str(error).splitlines() or [''])[0]}") from error
    arguments["batch"].seq_lens.copy_(long)
    recording.replay()
    torch.cuda.synchronize()
    kernel.calls.append((arguments, answers))
    try:
        hold(example, arguments, answers)
    except Broken as error:
        raise Broken(f"captured short and replayed long, {error}") from None
