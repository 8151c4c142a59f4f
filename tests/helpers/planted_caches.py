"""Mistakes of servers with what a request goes on from, planted into the engine by the text of its functions.

Each is what public reports describe, in the words of this engine. Most give wrong bits without an error.
"""

import ast
from importlib import import_module
from typing import NamedTuple

from tests.helpers.going_on import after_a_prefix, after_whole_blocks, as_samples, with_drafts
from tests.tools.places import file_of, replaced


class Edit(NamedTuple):
    """Text of a function or method, `module:Class.method`, and what stands there instead."""

    place: str
    old: str
    new: str


class Mistake(NamedTuple):
    """A mistake, and where it shows.

    Attributes:
        name: what goes wrong.
        reports: where it was reported.
        family: layers that it breaks.
        way: the way on which it shows.
        edits: the mistake.
    """

    name: str
    reports: str
    family: str
    way: object
    edits: tuple


STATES, SCHEDULER = "twinattn.engine.state_pool:StatePool", "twinattn.engine.scheduler:Scheduler"
MISTAKES = [
    Mistake(
        "index keys are left behind where keys are copied",
        "sglang 38031, 39156, 39830; mesh-llm 1901",
        "selected keys",
        as_samples,
        (
            Edit(
                "twinattn.engine.layer_pools:LayerPools._pools_of",
                "cache.kind.unit == BLOCK and",
                'cache.kind.unit == BLOCK and cache.kind.name != "index keys" and',
            ),
        ),
    ),
    Mistake(
        "rows of the open entry are left behind",
        "ATOM 1769; sglang 34562",
        "compressed keys",
        as_samples,
        (
            Edit(
                "twinattn.engine.layer_pools:LayerPools._pools_of",
                "cache.kind.unit == BLOCK and",
                'cache.kind.unit == BLOCK and cache.kind.name != "compressor rows" and',
            ),
        ),
    ),
    Mistake(
        "a prefix is used where the window before its end is gone",
        "ATOM 1417; vllm 56709",
        "windows",
        after_a_prefix,
        (
            Edit("twinattn.engine.window_pool:WindowPool.usable", "result = count", "pass"),
            Edit("twinattn.engine.window_pool:WindowPool.usable", "return result", "return len(blocks)"),
            Edit(
                "twinattn.engine.window_pool:WindowPool.share",
                "self.window_block[block] = self._kept.pop(block) del self._free[self.window_block[block]]",
                "self._take(block)",
            ),
        ),
    ),
    Mistake(
        "the state at the end of a block has the tokens after it, too",
        "vllm 34587, 47194; TensorRT-LLM 15653",
        "states",
        after_a_prefix,
        (Edit(f"{STATES}.settle", "self._keep(request, block, slot)", "self._keep(request, block, slots.start)"),),
    ),
    Mistake(
        "all but one token of a prompt is found, and the state has that one already",
        "vllm 51094; LMCache 5249",
        "states",
        after_whole_blocks,
        (
            Edit(f"{SCHEDULER}._find", "request.tokens[:-1]", "request.tokens"),
            Edit(
                f"{SCHEDULER}._start",
                "len(cached) * self.block_size\n",
                "min(len(cached) * self.block_size, len(request.tokens) - 1)\n",
            ),
            Edit(f"{STATES}._hold_checkpoint", "(seq_len - (seq_len == request.prompt_len))", "seq_len"),
        ),
    ),
    Mistake(
        "a request goes on in the slot of the state that was kept",
        "tpu-inference 3422; vllm 56196",
        "states",
        after_a_prefix,
        (
            Edit(
                f"{STATES}.hold",
                "slots.targets.append(self._take())",
                "slots.targets.append(self._take() if slots.start is None else self._use(slots.start) or slots.start)",
            ),
        ),
    ),
    Mistake(
        "a hit begins with whatever is in a new slot",
        "tpu-inference 3412",
        "states",
        after_a_prefix,
        (
            Edit(
                f"{STATES}.share",
                "slots.start = self.kept[contents[-1]]\n            self._use(slots.start)",
                "slots.start = self._take()",
            ),
        ),
    ),
    Mistake(
        "convolution rows are left behind where a state is copied",
        "vllm 56196",
        "states",
        as_samples,
        (
            Edit(
                "twinattn.engine.state_layers:copy_states",
                "((layer.inputs,) if layer.ring else (layer.states, layer.inputs))",
                "(layer.states,)",
            ),
        ),
    ),
    Mistake(
        "no state is kept for others, so no prefix is ever found",
        "vllm 51250",
        "states",
        after_a_prefix,
        (Edit(f"{STATES}.usable", "return max(kept, default=0)", "return 0"),),
    ),
    Mistake(
        "a prefix counts in the longest blocks of all caches",
        "vllm-ascend 16270",
        "compressed keys",
        after_a_prefix,
        (Edit(f"{SCHEDULER}._find", "return found", "return found[: len(found) // 4 * 4]"),),
    ),
    Mistake(
        "rejected drafts stay in the state",
        "vllm 53912, 43559",
        "states",
        with_drafts,
        (Edit(f"{STATES}.settle", "slots.targets.pop(min(count, len(slots.targets)) - 1)", "slots.targets.pop()"),),
    ),
    Mistake(
        "the count of accepted drafts is that of another request",
        "vllm 53505, 53919; 1Cat-vLLM 249",
        "rings",
        with_drafts,
        (
            Edit(
                "twinattn.engine.ring_pool:RingPool.settle",
                "slots.after(count)",
                'slots.after(vars(self).setdefault("stale", count) if slots.planned and slots.planned[2] else count)',
            ),
        ),
    ),
    Mistake(
        "another sample begins with the checkpoint, and without the inputs since",
        "a neighbour of sglang 28511",
        "rings",
        as_samples,
        (Edit("twinattn.engine.ring_pool:RingPool.fork", "slots.slot, slots.cursor)", "slots.slot, 0)"),),
    ),
    Mistake(
        "a block is copied after the step that writes to the copy",
        "a neighbour of vllm 45704",
        "windows",
        as_samples,
        (
            Edit(
                f"{SCHEDULER}.take_copies",
                "copies, self.copies = self.copies, {}",
                'copies, self.__dict__["late"], self.copies = vars(self).get("late", {}), self.copies, {}',
            ),
        ),
    ),
    Mistake(
        "a state is used for a longer prefix than it is the state of",
        "modular 6681; vllm 53142, 54076",
        "states",
        after_whole_blocks,
        (
            Edit(f"{STATES}.usable", "return max(kept, default=0)", "return len(contents) if any(kept) else 0"),
            Edit(
                f"{STATES}.share",
                "self.kept[contents[-1]]",
                "self.kept[next(content for content in reversed(contents) if content in self.kept)]",
            ),
        ),
    ),
]


def plant(mistake, monkeypatch):
    """Replace the functions of a mistake by ones that have it."""
    by_place = {}
    for place, old, new in mistake.edits:
        source = by_place.get(place) or file_of(place).read_text()
        by_place[place] = replaced(source, place, old, new)
    for place, source in by_place.items():
        name, _, path = place.partition(":")
        module, (*owners, function) = import_module(name), path.split(".")
        owner = module
        for each in owners:
            owner = getattr(owner, each)
        body = ast.parse(source).body
        for each in owners:
            (body,) = (node.body for node in body if getattr(node, "name", "") == each)
        (node,) = (node for node in body if getattr(node, "name", "") == function)
        scope = {}
        exec(compile(ast.Module([node], []), str(file_of(place)), "exec"), vars(module), scope)
        monkeypatch.setattr(owner, function, scope[function])
