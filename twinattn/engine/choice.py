"""The next tokens of the requests of a step, from the logits of its rows: one of each, or several.

a request             one row      one token
with a draft          a row per    the tokens of the draft that the model chose, too, and one more
node
with other samples    one row      the first token of each sample: the prompt is computed once, and drawn from n times
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from twinattn.engine.layer_pools import LayerPools
from twinattn.engine.request import Draft, Request
from twinattn.engine.sampling import choose
from twinattn.engine.speculation import verify
from twinattn.engine.twin import Twin

Chosen = dict[Request, list[int | None]]  # None for a token whose logits are not finite


def choose_tokens(
    logits: Float[Tensor, "rows v"], due: Sequence[Request], twin: Twin, pools: LayerPools, device: torch.device
) -> Chosen:
    """Choose the next tokens of requests, and move the keys of accepted drafts to where the next step expects them.

    Args:
        logits: a row for each request; of one with a draft a row for each of its nodes.
        due: the requests.
        twin: the package that computes.
        pools: of the model's layers.
        device: the model's.

    Returns:
        The tokens of each request, and of the samples that begin with it.
    """
    drafts = [request.draft or Draft((), (-1,)) for request in due]
    others = _choose_for_others(logits, due, drafts, twin)
    if not any(request.draft for request in due):
        chosen = choose(logits, due, sample=twin.sample)
        return {request: [token] for request, token in zip(due, chosen, strict=True)} | others
    rows = [request for request, draft in zip(due, drafts, strict=True) for _ in draft.parents]
    depths = [depth for draft in drafts for depth in draft.depths]
    verified = verify(due, drafts, choose(logits, rows, depths, sample=twin.sample), twin, device)
    pools.compact(verified.batch, verified.trees, verified.accepted)
    return verified.tokens | others


def _choose_for_others(
    logits: Float[Tensor, "rows v"], due: Sequence[Request], drafts: Sequence[Draft], twin: Twin
) -> Chosen:
    """Choose the first tokens of the other samples of requests, each with its own random number from the same row."""
    rows, others, row = [], list[Request](), 0
    for request, draft in zip(due, drafts, strict=True):
        rows += [row] * len(request.unforked)
        others += request.unforked
        row += len(draft.parents)
    if not others:
        return {}
    chosen = choose(logits[rows], others, sample=twin.sample)
    return {other: [token] for other, token in zip(others, chosen, strict=True)}
