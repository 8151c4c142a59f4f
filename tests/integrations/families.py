"""Every family of transformers with the twin's attention, against eager: what is right, what is refused and why.

    make families                      all of them, some minutes
    make families ARGS="llama t5"      some
    make families ARGS="masked"        all of a kind: causal, masked, seq2seq, speech

A family is a tiny model with random weights. It is right if its logits are those of eager without padding, with padding
on the left and on the right, its greedy tokens too if it generates, and the twin computed them. (A model of experts may
choose others at the slightest rounding: where eager and sdpa differ in tokens, logits alone count.) It fails if an
answer is wrong, or if an error does not say what is refused. Not a part of `make test`, which checks some twenty
families more closely.
"""

import logging
import signal
import sys
import warnings
from collections import Counter

import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto import modeling_auto

import fastattn.varlen
from tests.helpers.padded import OWN_ATTENTION, PADDINGS, REBUILT, TOKENS, padded
from tests.helpers.tiny_models import CHANGES, make_family
from twinattn.integrations import transformers as integration

KINDS = {
    "causal": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "seq2seq": (AutoModelForSeq2SeqLM, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    "speech": (AutoModelForSpeechSeq2Seq, modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
}
DECODES = dict(decoder_start_token_id=0, forced_bos_token_id=None, forced_eos_token_id=None)
OF_T5 = dict(d_kv=8, d_ff=64, num_layers=2)  # its scores have no scale: with its own head size rounding decides
ENCODERS = {  # what models with an encoder need besides the sizes
    **dict.fromkeys(("longt5", "mt5", "pop2piano", "switch_transformers", "t5", "udop", "umt5"), OF_T5),
    "whisper": dict(num_mel_bins=8, max_source_positions=20, begin_suppress_tokens=None, suppress_tokens=None),
    "moonshine": dict(encoder_num_attention_heads=6, decoder_num_attention_heads=6),
    "speech_to_text": dict(input_feat_per_channel=8, max_source_positions=128),
}
SECONDS = 60  # for a family
TOLERANCE = 5e-5  # relative to the standard deviation of the logits
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
    more = dict(decoder_input_ids=tokens[:, :5]) if kind in ("seq2seq", "speech") else {}
    for padding in PADDINGS if kind != "speech" else ["none"]:
        given = dict(input_ids=tokens, attention_mask=padded(padding)) if kind != "speech" else sound(model)
        out = model(**given, **more).logits
        logits.append(out.flatten(0, -2) if more else out[given["attention_mask"].bool()])
    if kind != "masked":
        greedy = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        given = dict(input_ids=tokens, attention_mask=padded("left")) if kind != "speech" else sound(model)
        words = model.generate(**given, **greedy)
    return torch.cat(logits), words


def sound(model):
    """Draw what a model of speech hears: bands of a spectrum, or a wave."""
    draws, config = torch.Generator().manual_seed(0), model.config
    if model.main_input_name == "input_values":
        return dict(input_values=torch.randn(3, 4000, generator=draws))
    if hasattr(config, "num_mel_bins"):
        return dict(
            input_features=torch.randn(3, config.num_mel_bins, 2 * config.max_source_positions, generator=draws)
        )
    return dict(input_features=torch.randn(3, 40, config.input_feat_per_channel, generator=draws))


def outcome(kind, family):
    """Return what came of a family, and details."""
    auto, _ = KINDS[kind]
    try:
        changes = CHANGES.get(family) or (OWN_ATTENTION | REBUILT).get(family, {})
        if kind in ("seq2seq", "speech"):
            changes = DECODES | ENCODERS.get(family, {}) | changes
        if count_parameters(family, auto, changes) > 5e7:
            return "not built", "too large by default"
        model = make_family(family, auto=auto, **changes)
        expected, words = answers(kind, model, TOKENS)
    except TooLongError:
        raise
    except Exception as error:  # noqa: BLE001  of transformers, before the twin is asked
        return "not built", first_line(error)
    counted, attention, biased = [], fastattn.varlen.attention, integration._attend_biased

    def counting(function):
        def count(*args, **options):
            counted.append(1)
            return function(*args, **options)

        return count

    fastattn.varlen.attention, integration._attend_biased = counting(attention), counting(biased)
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
        fastattn.varlen.attention, integration._attend_biased = attention, biased
    error, most = float((logits - expected).abs().max()), TOLERANCE * float(expected.std())
    if not error <= most:
        return "WRONG", f"logits differ by {error:.1e}, where {most:.1e} would be rounding"
    says = f"{len(counted)} calls"
    if words is not None and not torch.equal(words, twin_words):
        model.set_attn_implementation("sdpa")
        if torch.equal(answers(kind, model, TOKENS)[1], words):
            return "WRONG", "other tokens than eager and sdpa"
        says += "; its tokens are no measure: those of eager and of sdpa differ, too"
    return ("right" if counted else "not called"), says


def count_parameters(family, auto, changes):
    """Count the parameters of a model before its memory is taken; 0 of one that cannot be made without memory."""
    try:
        with torch.device("meta"):
            return make_family(family, "meta", auto, **changes).num_parameters()
    except TooLongError:
        raise
    except Exception:  # noqa: BLE001  of transformers; it comes again where the model is made
        return 0


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
        for family in sorted(mapping if kind in chosen else set(mapping) & set(chosen or mapping)):
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
