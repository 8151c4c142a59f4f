"""Compressed keys beside a window: the rows of the benchmark, and others around them."""

import importlib

import torch

from refattn.options import AttentionOptions
from twinattn.bench.entries import CompressedKeys

WORK = {
    "decode-1-ratio-128-all": CompressedKeys(1, 131072, ratio=128, topk=0),
    "decode-1-ratio-4-selected": CompressedKeys(1, 131072),
    "decode-8-ratio-128-all": CompressedKeys(8, 131072, ratio=128, topk=0),
    "decode-64-ratio-128-all": CompressedKeys(64, 131072, ratio=128, topk=0),
    "decode-64-ratio-4-selected": CompressedKeys(64, 131072),
    "decode-64-of-64-heads-selected": CompressedKeys(64, 131072, num_heads=64),
    "decode-200-ratio-4-selected": CompressedKeys(200, 16384),
    "decode-1-ratio-128-all-fp8": CompressedKeys(1, 131072, ratio=128, topk=0, fp8=True),
    "decode-64-ratio-128-all-fp8": CompressedKeys(64, 131072, ratio=128, topk=0, fp8=True),
    "decode-64-ratio-4-selected-fp8": CompressedKeys(64, 131072, fp8=True),
    "prefill-8192-ratio-128-all": CompressedKeys(1, 8192, ratio=128, topk=0, query_len=8192),
    "prefill-8192-ratio-4-selected": CompressedKeys(1, 8192, query_len=8192),
    "prefill-8192-ratio-4-selected-fp8": CompressedKeys(1, 8192, query_len=8192, fp8=True),
    "chunks-8x256-ratio-4-selected": CompressedKeys(8, 16384, query_len=256),
}


def case(work):
    """Return the function that makes a case."""

    def make():
        inputs = work.draw(torch.device("cuda"), torch.bfloat16, 0)
        path = importlib.import_module("fastattn.compressed")
        step, options = path.plan(inputs.batch, **inputs.arguments), AttentionOptions(sinks=inputs.sinks)
        cache, entry_cache, judge = inputs.cache, inputs.entry_cache, work.judge(inputs)

        def call():
            plan = step if inputs.positions is None else path.select_entries(step, inputs.positions)
            return path.attention(inputs.query, cache, entry_cache, plan, options)

        def check(result):
            try:
                judge(result)
            except AssertionError as error:
                return str(error) or "wrong"
            return None

        return call, check

    return make


CASES = {name: case(work) for name, work in WORK.items()}
