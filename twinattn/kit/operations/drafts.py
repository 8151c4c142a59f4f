"""Operations on drafted tokens: `accept`, `accept_sampled`, and `compact`, which moves accepted ones together."""

import math
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from refattn.trees import Accepted, Trees
from twinattn.kit.example import Arguments
from twinattn.kit.operations.inputs import BATCH, Drawn, padding_of, unused
from twinattn.kit.operations.moves import MOVED, layers, pools
from twinattn.kit.operations.operation import Answers, Case, Inputs, Mistake, Operation, Special
from twinattn.kit.operations.tiles import BLOCKS, Dimension, of_size

NODES = ((4, 6), (1,), (3, 1, 9), (12, 5), (33,))
EMPTY = Special("empty", "There may be no sequence, and a sequence without a tree.", dict(nodes=((), (0,), (3, 0, 2))))
LARGE = Special(
    "large trees", "A tree may have more nodes than a word has bits.", dict(nodes=((140, 3),), tokens=(1,)), once=True
)
OUTPUTS = ("nodes", "lens", "next_tokens")
CLOSE, FEW_DECISIONS = 1e-3, 2000  # smallest margin of a decision; with more decisions a smaller one is allowed
PAST_TILES = dict(
    nodes=Dimension(lambda n: dict(nodes=(n, 3)), 257),
    sequences=Dimension(lambda n: dict(nodes=tuple(1 + i % 3 for i in range(n))), 2049),
    padding=of_size("padding"),
    more=of_size("more", 513),
)


def draw_trees(case: Case, drawn: Drawn, shape: str) -> tuple[Arguments, dict[str, Tensor]]:
    """Draw a tree per sequence: a "chain", a random "tree", or a "star" of siblings; unused entries are random."""
    b, w = len(case["nodes"]), max(case["nodes"], default=0) + case["more"]
    parents = drawn.whole(-9, 50, b, w, dtype=torch.int32)
    for row, nodes in zip(parents, case["nodes"], strict=True):
        for node in range(nodes):
            low = max(0, node - 3) if shape == "tree" else node - 1
            row[node] = 0 if shape == "star" else int(drawn.whole(low, max(1, node), 1))
            if node == 0:
                row[node] = -1
    a = drawn.lengths(tuple((nodes, nodes + 4) for nodes in case["nodes"]))
    past = torch.arange(w) >= torch.tensor(case["nodes"], dtype=torch.int64).reshape(-1, 1)
    return a | dict(parents=parents, tree_lens=torch.tensor(case["nodes"], dtype=torch.int32)), dict(parents=past)


def trees_of(a: Arguments) -> Trees:
    """Return the trees of a call."""
    return Trees(a["parents"], a["tree_lens"])


DERIVED = {**BATCH, "trees": trees_of}


def accepted_of(paths: list[list[int]], following: list[int], width: int) -> Answers:
    """Return the accepted nodes, padded with -1, their number, and the next token of each sequence."""
    rows = [[*path, *[-1] * (width - len(path))] for path in paths]
    return dict(
        nodes=torch.tensor(rows, dtype=torch.int32).reshape(len(paths), width),
        lens=torch.tensor([len(path) for path in paths], dtype=torch.int32),
        next_tokens=torch.tensor(following, dtype=torch.int64),
    )


# --- accept ---


def draw_accept(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw few different tokens, so that many drafts are accepted; some tokens have the same last bits."""
    drawn = Drawn(case, dtype)
    a, past = draw_trees(case, drawn, case["shape"])
    t = int(a["cu_seqlens_q"][-1]) + case["padding"]
    for name in ("drafts", "chosen"):
        a[name] = case["first_token"] + case["apart"] * drawn.whole(0, case["tokens"], t)
    return Inputs(a, past | {name: padding_of(a, a[name]) for name in ("drafts", "chosen")})


def accept(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the longest branch in which the model chose every token after its parent."""
    paths: list[list[int]] = []
    following: list[int] = []
    for i, count in enumerate(a["tree_lens"].tolist()):
        first = int(a["cu_seqlens_q"][i])
        parents = a["parents"][i, :count].tolist()
        drafts, chosen = (a[name][first : first + count].tolist() for name in ("drafts", "chosen"))
        best: list[int] = []
        for node in range(count):
            branch = [node]
            while parents[branch[0]] >= 0:
                branch.insert(0, parents[branch[0]])
            pairs = zip(branch[:-1], branch[1:], strict=True)
            if all(drafts[y] == chosen[y if form == "own" else x] for x, y in pairs):
                longer = len(branch) >= len(best) if form == "last" else len(branch) > len(best)
                best = branch if longer else best
        paths.append(best)
        at = best[-2 if form == "early" and len(best) > 1 else -1] if best else None
        following.append(-1 if at is None else chosen[at])
    return accepted_of(paths, following, a["parents"].shape[1])


ACCEPT = Operation(
    name="accept",
    function="accept",
    signature="`cu_seqlens_q`, `seq_lens`, `parents` `[b, w]`, `tree_lens` `[b]`, or `batch` and `trees`; "
    "`drafts`, `chosen` `[t]`; it "
    "returns `nodes` `[b, w]` (-1 past the last), `lens` and `next_tokens` `[b]`",
    draw=draw_accept,
    oracle=accept,
    sizes=dict(
        nodes=NODES,
        shape=("tree", "chain", "star"),
        tokens=(2, 1, 3),
        first_token=(0, 2**17, 7, 2**31 - 2**18),
        apart=(1, 2**16, 2**8),
        more=(0, 2),
        padding=(0, 3),
    ),
    dimensions={name: x for name, x in PAST_TILES.items() if name != "nodes"}
    | dict(nodes=Dimension(lambda n: dict(nodes=(n, 3), tokens=1), 257)),
    specials=(
        EMPTY,
        LARGE,
        Special(
            "ties",
            "Of two branches of the same length the first is accepted.",
            dict(tokens=(1, 2), shape=("tree", "star")),
        ),
    ),
    derived=DERIVED,
    outputs=OUTPUTS,
    exact=frozenset(OUTPUTS),
    strided=("drafts", "chosen", "parents"),
    flips=("drafts", "chosen"),
    dtypes=(torch.float32,),
    mistakes=(
        Mistake(
            "compares-own-choice",
            "Compares a draft with the model's choice after it, not with the choice after its parent.",
            lambda a, c: accept(a, c, "own"),
        ),
        Mistake(
            "last-of-equal-branches",
            "Of branches of the same length the last is accepted.",
            lambda a, c: accept(a, c, "last"),
        ),
        Mistake(
            "token-after-the-parent",
            "The next token is the choice after the parent of the last accepted node.",
            lambda a, c: accept(a, c, "early"),
        ),
    ),
)


# --- accept_sampled ---


def draw_sampled(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw distributions and random numbers with no close decisions, except where both sides are exact."""
    for again in range(200):
        drawn = Drawn(Case(case.path, case.sizes, case.seed + 1000 * again), dtype)
        a, past = draw_trees(case, drawn, case["shape"])
        t, v = int(a["cu_seqlens_q"][-1]) + case["padding"], case["tokens"]
        a |= dict(drafts=drawn.whole(0, v, t), uniforms=drawn.uniform(t, high=0.999, dtype=torch.float32))
        for name in ("target_probs", "draft_probs"):
            a[name] = drawn.normal(t, v, dtype=torch.float32).mul(1.5).softmax(-1)
        put_at_an_edge(a, case["numbers"], drawn)
        a |= {name: a[name].to(dtype) for name in ("target_probs", "draft_probs")}
        if not case["draft_probs"]:
            a["draft_probs"] = None
        if sampled(a, torch.float64)["margin"] > (CLOSE if t * v <= FEW_DECISIONS else CLOSE / 100):
            break
    unread = {
        name: padding_of(a, a[name]) for name in ("target_probs", "draft_probs", "uniforms") if a[name] is not None
    }
    return Inputs(a, past | unread)


def put_at_an_edge(a: Arguments, numbers: str, drawn: Drawn) -> None:
    """Change distributions and random numbers to extreme ones: zeros, ones, one-hot, or invalid distributions."""
    probs, (t, v) = a["target_probs"], a["target_probs"].shape
    roots, few = a["cu_seqlens_q"][:-1][a["tree_lens"] > 0].long(), max(1, v // 4)
    if numbers == "zeros":  # all drafts have the probability 0, and so have the first tokens
        probs[:, :few] = 0
        a["drafts"], a["uniforms"] = drawn.whole(0, few, t), torch.zeros(t)
    if numbers in ("below 1", "ones"):
        probs[:, v - few :] = 0
        a["uniforms"][roots] = 1.0 if numbers == "ones" else 1.0 - 2.0**-24
    if numbers == "greedy":
        probs.zero_()[torch.arange(t), drawn.whole(0, v, t)] = 1.0
    if numbers == "last":
        probs.zero_()[:, -1] = 1.0
    if numbers == "few":  # and all other tokens of a large vocabulary have none
        probs *= torch.zeros(v).index_fill(0, torch.arange(1, 8) * (v // 8), 1.0)
    if numbers == "nothing":
        probs[::2], probs[1::2] = 0.0, torch.nan
    elif t:
        probs /= probs.sum(-1, keepdim=True)


def sampled(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Accept by rejection sampling in plain Python; `margin` is the distance of the closest decision."""
    paths: list[list[int]] = []
    following: list[int] = []
    margin = 1.0
    target = a["target_probs"].double().tolist()
    draft = None if a["draft_probs"] is None else a["draft_probs"].double().tolist()
    for i, count in enumerate(a["tree_lens"].tolist()):
        first, path = int(a["cu_seqlens_q"][i]), [0]
        if not count:
            paths.append([])
            following.append(-1)
            continue
        p = target[first]
        for node in range(1, count):
            if a["parents"][i, node] != path[-1]:
                continue
            x, u = int(a["drafts"][first + node]), float(a["uniforms"][first + node])
            q = [float(token == x) for token in range(len(p))] if draft is None else draft[first + node]
            if u * q[x] or p[x]:  # otherwise both are exactly 0
                margin = min(margin, abs(u * q[x] - p[x]))
            if u * q[x] < p[x]:
                path.append(node)
                p = target[first + node]
                continue
            left = [0.0 if one <= other else one - other for one, other in zip(p, q, strict=True)]  # NaN stays
            total = sum(left)
            p = p if form == "not rescaled" or total == 0 else [one / total for one in left]
        paths.append(path)
        ends = list(accumulate(p))
        if not 0.0 < ends[-1] < math.inf:
            following.append(-1)
            continue
        place = float(a["uniforms"][first]) * ends[-1]
        margin = min([margin, *(abs(place - end) for end in ends if end not in (0.0, ends[-1]))])
        following.append(next((token for token, end in enumerate(ends) if end > place), ends.index(ends[-1])))
    return accepted_of(paths, following, a["parents"].shape[1]) | (dict(margin=margin) if form == "right" else {})


def without_margin(a: Arguments, compute: torch.dtype) -> Answers:
    """Return the outputs of `sampled`, without the margin."""
    return {name: x for name, x in sampled(a, compute).items() if name != "margin"}


ACCEPT_SAMPLED = Operation(
    name="accept_sampled",
    function="accept_sampled",
    signature="as `accept`, with `target_probs` `[t, v]`, `uniforms` `[t]` and `draft_probs` `[t, v]` in the "
    "place of `chosen`",
    draw=draw_sampled,
    oracle=without_margin,
    sizes=dict(
        nodes=NODES[:4],
        shape=("tree", "chain", "star"),
        tokens=(5, 2, 30),
        more=(0, 2),
        padding=(0, 3),
        draft_probs=(False, True),
        numbers=("drawn",),
    ),
    dimensions={name: x for name, x in PAST_TILES.items() if name != "padding"}
    | dict(tokens=of_size("tokens", nodes=(3, 1)), padding=of_size("padding", 1025)),
    options=dict(draft_probs=False),
    specials=(
        EMPTY,
        Special("zeros", "A random number of 0 accepts and draws no token of probability 0.", dict(numbers=("zeros",))),
        Special(
            "ones",
            "A random number just below 1, or 1, draws the last token that has a probability.",
            dict(numbers=("below 1", "ones")),
        ),
        Special(
            "large vocabulary",
            "There may be more tokens than 16 bits count.",
            dict(tokens=(151_936,), nodes=((3, 1),), numbers=("few",)),
            once=True,
        ),
        Special(
            "last token",
            "The only token with a probability may be the last of a large vocabulary.",
            dict(tokens=(262_145,), nodes=((2, 1),), numbers=("last",)),
            once=True,
        ),
        Special("greedy", "A distribution may be all on one token.", dict(numbers=("greedy",))),
        Special(
            "nothing", "Where probabilities are all 0, or NaN, there is no next token: -1.", dict(numbers=("nothing",))
        ),
    ),
    derived=DERIVED,
    outputs=OUTPUTS,
    exact=frozenset(OUTPUTS),
    strided=("drafts", "target_probs", "draft_probs", "uniforms", "parents"),
    flips=("uniforms", "target_probs", "draft_probs"),
    dtypes=(torch.float32, torch.bfloat16),
    mistakes=(
        Mistake(
            "rest-not-taken",
            "After a rejection the next token is drawn from the model's whole distribution.",
            lambda a, c: sampled(a, c, "not rescaled"),
        ),
        Mistake(
            "draft-distribution-ignored",
            "A draft is accepted with the probability of the target alone, whatever the draft distribution was.",
            lambda a, c: without_margin({**a, "draft_probs": None}, c),
        ),
    ),
)


# --- compact ---


def draw_compact(case: Case, dtype: torch.dtype) -> Inputs:
    """Draw pools of several layers, trees, and accepted nodes in ascending order."""
    drawn, p = Drawn(case, dtype), case["block_size"]
    a, past = draw_trees(case, drawn, "tree")
    lens: list[int] = a["seq_lens"].tolist()
    table, past_blocks, n = drawn.table(lens, p)
    w = a["parents"].shape[1]
    nodes, counts = torch.full((len(lens), w), -1, dtype=torch.int32), []
    for row, count in zip(nodes, case["nodes"], strict=True):
        some = sorted(drawn.order(count)[: int(drawn.whole(0, count + 1, 1))])
        row[: len(some)] = torch.tensor(some, dtype=torch.int32)
        counts.append(len(some))
    caches = pools(case, drawn, *((n, p, *shape) for shape in layers(case, case["row"])))
    a |= table | dict(caches=caches, nodes=nodes, lens=torch.tensor(counts, dtype=torch.int32), block_size=p)
    past_nodes = torch.arange(w) >= torch.tensor(counts, dtype=torch.int64).reshape(-1, 1)
    free = unused(table["block_table"], lens, n, p)
    of_caches = {f"caches[{i}]": free.reshape(n, p, *[1] * (x.ndim - 2)).expand(x.shape) for i, x in enumerate(caches)}
    return Inputs(a, past | past_blocks | dict(nodes=past_nodes) | of_caches)


def compacted(a: Arguments, compute: torch.dtype, form: str = "right") -> Answers:
    """Return the pools with the accepted nodes of each sequence moved to the front of its tree."""
    sources: list[int] = []
    destinations: list[int] = []
    for i, (s, nodes, count) in enumerate(
        zip(a["seq_lens"].tolist(), a["tree_lens"].tolist(), a["lens"].tolist(), strict=True)
    ):
        for rank, node in enumerate(a["nodes"][i, :count].tolist()):
            for places, k in ((sources, node), (destinations, rank)):
                j = s - nodes + k
                block = i if form == "no table" else int(a["block_table"][i, j // a["block_size"]])
                places.append(block * a["block_size"] + j % a["block_size"])
    after = {}
    for number, cache in enumerate(a["caches"]):
        flat = cache.flatten(0, 1).clone()
        if form == "backwards":
            for source, destination in reversed(list(zip(sources, destinations, strict=True))):
                flat[destination] = flat[source].clone()
        elif form != "first" or number == 0:
            flat[destinations] = cache.flatten(0, 1)[sources]
        after[f"caches[{number}]"] = flat.unflatten(0, cache.shape[:2])
    return after


COMPACT = Operation(
    name="compact",
    function="compact",
    signature="`caches`: a list of pools `[n, p, ...]`, changed in place; `seq_lens`, `block_table`, "
    "`tree_lens` and the like, or `batch` "
    "and `trees`; `nodes` `[b, w]` and `lens` `[b]`, or `accepted`; `block_size`",
    draw=draw_compact,
    oracle=compacted,
    sizes=dict(
        nodes=NODES,
        more=(0, 2),
        block_size=(4, 1, 16, 3),
        caches=(2, 1, 3),
        row=((2, 8), (3, 5), (1, 1)),
        types=(1, 2),
    ),
    dimensions={name: x for name, x in PAST_TILES.items() if name != "padding"}
    | dict(block_size=of_size("block_size", BLOCKS), caches=of_size("caches", 129))
    | dict(elements=Dimension(lambda n: dict(row=(3, n), nodes=(4, 6)))),
    specials=(EMPTY, replace(LARGE, sizes=dict(nodes=((140, 3),)))),
    derived={
        **DERIVED,
        "accepted": lambda a: Accepted(a["nodes"], a["lens"], torch.zeros_like(a["lens"], dtype=torch.int64)),
    },
    outputs=(),
    changes=("caches",),
    exact=frozenset({"caches"}),
    moves=True,
    strided=("caches", "parents", "nodes", "lens"),
    pools=("caches",),
    dtypes=MOVED,
    mistakes=(
        Mistake(
            "compacted-backwards",
            "The last node is moved first, over nodes that are still to be moved.",
            lambda a, c: compacted(a, c, "backwards"),
        ),
        Mistake("first-cache-only", "Compacts the first pool alone.", lambda a, c: compacted(a, c, "first")),
    ),
)

OPERATIONS = (ACCEPT, ACCEPT_SAMPLED, COMPACT)
