"""Mistakes to plant into `backward_by_hand.py`: what the kit should call each, the property that finds it, lines."""

from pathlib import Path

from tests.helpers.planted import replace_lines

SOURCE = Path(__file__).with_name("backward_by_hand.py").read_text()


def plant(old, new, name="varlen"):
    """Return the kernel by hand with some of its lines replaced."""
    names = {"__name__": "planted"}
    exec(compile(replace_lines(SOURCE, old, new, "backward_by_hand.py"), "planted", "exec"), names)
    return names[name]


SEE = "see = sees(i, j, n, s, causal, left, right)"
DELTA = "delta = (go * o).sum(-1)"
DLSE = "delta = delta - grad_lse.float().T"
DS = "ds = p * (dp - delta[:, i, None])"
DQ, DK, DV = "dq[:, i] += scale * (ds @ kj)", "dk[:, j] += scale * (ds.mT @ qi)", "dv[:, j] += p.mT @ go[:, i]"
GROUP = "dk, dv = (x.unflatten(0, (hk, g)).sum(1) for x in (dk, dv))"
READ = "q, go, o = (x.float().transpose(0, 1) for x in (query, grad_out, out))"
CONTIGUOUS = "grad_out = grad_out.as_strided(grad_out.shape, torch.empty(grad_out.shape).stride()); "
EMPTY = "base = base.masked_fill(empty, 0.0)"
OWN, LESS = "q.shape[-1] ** -0.5", "torch.log1p(-(sinks[:, None] - lse).exp())"
ITSELF = "(torch.tensor(i)[:, None] + s - n == torch.tensor(j))"
PADDING = "query.new_zeros(padding, query.shape[1], value.shape[2])"
P = "p = (scores - base[:, i, None]).exp().masked_fill(~see, 0.0)"
SINKS = "dsinks = -(p_sink * delta).sum(-1).to(sinks.dtype)"
SCORES = "scores, slope = compute_scores(qi, kj, slopes, scale, cap, i, j, n, s)"

PLANTED = [
    # what each score changes by
    ("delta-left-out", "gradients", DELTA, "delta = 0 * (go * o).sum(-1)"),
    ("delta-of-gradient", "gradients", DELTA, "delta = go.sum(-1)"),
    ("delta-added", "gradients", DS, "ds = p * (dp + delta[:, i, None])"),
    ("delta-of-first-tile", "gradients", DELTA, "delta = (go * o)[..., :32].sum(-1)"),
    ("weights-not-differentiated", "gradients", DS, "ds = see * (dp - delta[:, i, None])"),
    ("lse-gradient-ignored", "lse gradient", DLSE, ""),
    ("lse-gradient-with-wrong-sign", "lse gradient", DLSE, "delta = delta + grad_lse.float().T"),
    ("lse-gradient-lost-under-a-window", "together", DLSE, DLSE.replace("grad_lse", "(left < 0) * grad_lse")),
    ("lse-gradient-of-base-two", "lse gradient", DLSE, "delta = delta - grad_lse.float().T / 0.6931471805599453"),
    # scales, caps, biases
    ("scale-missing-in-dq", "gradients", DQ, "dq[:, i] += ds @ kj"),
    ("scale-missing-in-dk", "gradients", DK, "dk[:, j] += ds.mT @ qi"),
    ("scale-twice", "gradients", DK, "dk[:, j] += scale**2 * (ds.mT @ qi)"),
    ("scale-of-head-size", "scale", (DQ, DK), (DQ.replace("scale", OWN), DK.replace("scale", OWN))),
    ("cap-not-differentiated", "softcap", "ds = ds * slope", ""),
    ("cap-derived-of-capped", "softcap", "slope = 1 - (scores / cap) ** 2", "slope = 1 - scores**2"),
    ("cap-derived-twice", "softcap", "ds = ds * slope", "ds = ds * slope * slope"),
    ("cap-forgotten", "softcap", SCORES, f"{SCORES}; scores = compute_scores(qi, kj, slopes, scale, 0, i, j, n, s)[0]"),
    ("bias-forgotten", "alibi", SCORES, SCORES.replace("slopes", "None")),
    ("base-mixed-up", "gradients", "base = lse\n", "base = lse * 1.4426950408889634\n"),
    # groups
    ("one-head-of-group", "gradients", GROUP, "dk, dv = (x.unflatten(0, (hk, g))[:, -1] for x in (dk, dv))"),
    ("mean-of-group", "gradients", GROUP, "dk, dv = (x.unflatten(0, (hk, g)).mean(1) for x in (dk, dv))"),
    ("group-in-turns", "gradients", GROUP, "dk, dv = (x.unflatten(0, (g, hk)).sum(0) for x in (dk, dv))"),
    # who sees whom
    ("backward-top-left", "mask", SEE, "see = sees(i, j, n, n, causal, left, right)"),
    ("backward-sees-next", "mask", SEE, "see = sees(i, j, n, s + 1, causal, left, right)"),
    ("backward-not-causal", "mask", SEE, "see = sees(i, j, n, s, False, left, right)"),
    ("backward-hides-itself", "mask", SEE, f"{SEE}; see = see & ~({ITSELF} & causal)"),
    ("backward-without-window", "window", SEE, "see = sees(i, j, n, s, causal, -1, -1)"),
    ("backward-window-off", "window", SEE, "see = sees(i, j, n, s, causal, left + (left >= 0), right)"),
    ("backward-window-one-sided", "window", SEE, "see = sees(i, j, n, s, causal, left, -1)"),
    # tiles
    ("last-tile-alone", "many keys", DQ, "dq[:, i] = scale * (ds @ kj)"),
    ("last-tile-alone", "gradients", (DK, DV), ("dk[:, j] = scale * (ds.mT @ qi)", "dv[:, j] = p.mT @ go[:, i]")),
    ("last-tile-lost", "many keys", "range(0, s, TILE)", "range(0, s // TILE * TILE, TILE)"),
    # sinks
    ("sink-without-gradient", "sinks", SINKS, ""),
    ("sink-gradient-with-wrong-sign", "sinks", SINKS, SINKS.replace("-(", "(")),
    ("sink-gradient-not-weighted", "sinks", SINKS, SINKS.replace("p_sink * ", "")),
    ("sink-gradient-of-last-row", "sinks", SINKS, SINKS.replace(").sum(-1)", ")[:, -1:].sum(-1)")),
    ("backward-without-sink", "sinks", "base = lse\n", f"base = lse if sinks is None else lse + {LESS}\n"),
    # memory, and rows that see no key
    ("gradient-taken-for-contiguous", "strides of the gradient", READ, CONTIGUOUS + READ),
    ("empty-gradient-is-nan", "empty rows", (EMPTY, P), ("", P.replace(".masked_fill(~see, 0.0)", " * see"))),
    ("padding-gradient-unwritten", "padding", PADDING, "float('nan') * query[starts[-1] :]"),
    ("keys-and-values-swapped", "gradients", "for x in (dq, dk, dv))", "for x in (dq, dv, dk))"),
    ("no-gradient", "gradients", "if return_lse else torch.cat(outs)", "if return_lse else torch.cat(outs).detach()"),
    # in the forward, and its gradients with it
    ("window-one-too-many", "window", "see = see & (j >= pos - left)", "see = see & (j >= pos - left - 1)"),
    ("causal-top-left", "mask", "dtype=torch.int64)[:, None] + s - n,", "dtype=torch.int64)[:, None],"),
]  # fmt: skip
