"""Every family of transformers with the twin's attention, against eager: what is right, what is refused and why.

    make families                      all of them, some minutes
    make families ARGS="llama t5"      some

A family is a tiny model with random weights. It is right if its logits are those of eager without padding, with padding
on the left and on the right, its greedy tokens too if it generates, and the twin computed them. It fails if an answer
is wrong, or if an error does not say what is refused. Not a part of `make test`, which checks some twenty families more
closely.
"""

import logging
import signal
import sys
import warnings
from collections import Counter

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

import fastattn.dense
from fastattn.integrations import transformers as integration
from tests.helpers.padded import OWN_ATTENTION, PADDINGS, TOKENS, padded
from tests.helpers.tiny_models import CHANGES, make_family

KINDS = {
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
}
SECONDS = 60  # for a family
TOLERANCE = 5e-5  # of the standard deviation of the logits
MEANINGS = {
    "right": "as eager",
    "not called": "as eager, and no layer calls the interface",
    "refused": "by an error that names what is not computed",
    "not built": "no tiny model of it here: eager does not run with these sizes",
    "UNCLEAR": "an error that does not say what is refused",
    "WRONG": "other numbers or tokens than eager",
}


class TooLongError(Exception):
    """A family that takes too long."""


def answers(kind, model, tokens):
    """Compute logits under each padding, and some tokens where the family generates."""
    logits, words = [], None
    more = dict(decoder_input_ids=tokens[:, :5]) if kind == "seq2seq" else {}
    for padding in PADDINGS:
        mask = padded(padding)
        out = model(tokens, attention_mask=mask, **more).logits
        logits.append(out.flatten(0, -2) if more else out[mask.bool()])
    if kind != "masked":
        greedy = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        words = model.generate(tokens, attention_mask=padded("left"), **greedy)
    return torch.cat(logits), words


def outcome(kind, family):
    """Return what came of a family, and details."""
    auto, _ = KINDS[kind]
    try:
        changes = CHANGES.get(family) or OWN_ATTENTION.get(family, {})
        model = make_family(family, auto=auto, **changes)
        if model.num_parameters() > 5e7:
            return "not built", "too large by default"
        expected, words = answers(kind, model, TOKENS)
    except Exception as error:  # noqa: BLE001  of transformers, before the twin is asked
        return "not built", first_line(error)
    counted, attention = [], fastattn.dense.attention

    def counting(*args, **options):
        counted.append(1)
        return attention(*args, **options)

    fastattn.dense.attention = counting
    try:
        auto.from_config(model.config, attn_implementation="fastattn")  # what a user writes, and what may be refused
        model.set_attn_implementation("fastattn")
        logits, twin_words = answers(kind, model, TOKENS)
    except NotImplementedError as error:
        return "refused", first_line(error)
    except TooLongError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a model raises
        return "UNCLEAR", f"{type(error).__name__}: {first_line(error)}"
    finally:
        fastattn.dense.attention = attention
    error, most = float((logits - expected).abs().max()), TOLERANCE * float(expected.std())
    if not error <= most or not (words is None or torch.equal(words, twin_words)):
        return "WRONG", f"logits differ by {error:.1e}, where {most:.1e} would be rounding"
    return ("right" if counted else "not called"), f"{len(counted)} calls"


def first_line(error):
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def too_long(*args):
    raise TooLongError


@torch.no_grad()
def main(chosen):
    """Print a line per family, and the counts."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    integration.register()
    signal.signal(signal.SIGALRM, too_long)
    console, counts = Console(soft_wrap=True, highlight=False), Counter()
    for kind, (_, mapping) in KINDS.items():
        for family in sorted(set(mapping) & set(chosen or mapping)):
            signal.alarm(SECONDS)
            try:
                result, says = outcome(kind, family)
            except TooLongError:
                result, says = "not built", f"takes more than {SECONDS} s"
            finally:
                signal.alarm(0)
            counts[kind, result] += 1
            console.print(f"{kind:8} {family:28} {result:11} {says}", markup=False)
    for result, meaning in MEANINGS.items():
        each = ", ".join(f"{counts[kind, result]} {kind}" for kind in KINDS if counts[kind, result])
        console.print(f"{result:11} {meaning}: {each or 'none'}", markup=False)
    return 1 if any(counts[kind, result] for kind in KINDS for result in ("WRONG", "UNCLEAR")) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
