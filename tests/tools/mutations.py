"""Mutations: small edits of the source, each of which breaks a feature of docs/proof/coverage.toml.

`make mutants` plants them one by one, and sees that the tests marked as the proof of a row fail. A feature that both
packages compute has one in each; what they share (`refattn.plan`, `twinattn.engine`), one for both. Text that is
not there exactly once is an error, and test_coverage.py looks whether all of it is: who changes an expression changes
its mutation, too.

To read one: the name, the rows, the place (tests/tools/places.py), what stands there, and what is planted.
"""

from typing import NamedTuple

Text = str | tuple[str, ...]


class Mutation(NamedTuple):
    """An edit that breaks the feature of some rows, or what some files of tests hold."""

    name: str
    rows: tuple[str, ...]
    place: str
    old: Text
    new: Text
    tests: tuple[str, ...] = ()


def breaks(rows: str, name: str, *edits: tuple[str, Text, Text]) -> list[Mutation]:
    """Return the mutations of some rows, one for each place: the feature broken in each package by itself."""
    return [Mutation(name, tuple(rows.split()), place, old, new) for place, old, new in edits]


def in_both(rows: str, name: str, place: str, old: Text, new: Text) -> list[Mutation]:
    """Return the mutations of some rows where both packages have the same text."""
    return breaks(rows, name, (f"refattn.{place}", old, new), (f"fastattn.{place}", old, new))


CPU = "fastattn/kernels/cpu/"

MUTATIONS: list[Mutation] = [
    # --- the cache ---
    *breaks(
        "A1",
        "of two pools in one tensor, only the first is copied",
        (
            "refattn.kv_cache:_copy",
            "for source, destination in zip(sources, destinations, strict=True):",
            "for source, destination in zip(sources[:1], destinations[:1], strict=True):",
        ),
        (
            "fastattn.kv_cache:copy_blocks",
            '"copy_blocks", caches, pairs',
            '"copy_blocks", caches[:1], pairs',
        ),
    ),
    *breaks(
        "A2",
        "nothing is swapped",
        ("refattn.kv_cache:swap_blocks", "    _copy(sources, destinations, pairs)", "    return"),
        (
            "fastattn.kv_cache:swap_blocks",
            "in zip(sources, destinations, strict=True):",
            "in zip(sources[:0], destinations[:0], strict=True):",
        ),
    ),
    *breaks(
        "A3 B49",
        "nothing is copied",
        ("refattn.kv_cache:copy_blocks", "    _copy(caches, caches, pairs)", "    return"),
        ("fastattn.kv_cache:copy_blocks", "    dispatch.run_in_each(", "    return\n    dispatch.run_in_each("),
    ),
    *breaks(
        "A3",
        "a block is copied onto itself",
        (
            "fastattn.kernels.triton.cache:_copy_kernel",
            "tl.store(cache + destination[:, None] * block_stride",
            "tl.store(cache + source[:, None] * block_stride",
        ),
    ),
    *breaks(
        "A4 A6 B53 D123",
        "nothing is written",
        (
            "refattn.kv_cache:write",
            ("        key_cache[block, row] = key[token]", "        value_cache[block, row] = value[token]"),
            ("        pass", "        pass"),
        ),
        (
            "fastattn.kv_cache:write",
            'dispatch.run("write", **tensors, slot_mapping=slot_mapping)',
            "None",
        ),
    ),
    *breaks(
        "A4",
        "a slot of -1 is the last one",
        ("refattn.kv_cache:write", "if slot == -1:", "if slot < -1:"),
        (
            "fastattn.kernels.torch_ops.cache:_write_rows",
            "        key, value, slot_mapping = key[real], value[real], slot_mapping[real]",
            "        slot_mapping = slot_mapping % key_cache.shape[:2].numel()",
        ),
    ),
    *breaks(
        "A5 C112",
        "attention over the cache of another layer writes into it",
        (
            "refattn.differential:attention",
            "    keys, answers, lses = Pairs(cache, scales), [], []",
            "    keys, answers, lses = Pairs(cache, scales), [], []\n    cache[1] = cache[0]",
        ),
        (
            "fastattn.differential:attention",
            "    return dispatch.attend(",
            "    cache[1] = cache[0]\n    return dispatch.attend(",
        ),
    ),
    *breaks(
        "B55 C115",
        "a layer that shares a cache writes into it",
        ("twinattn.engine.layer_pools:LayerPools.attend", "if self.owners[index] != index:", "if False:"),
    ),
    *breaks(
        "B55 C114 C115",
        "a layer that shares a cache gets one of its own",
        ("twinattn.engine.layer_pools:LayerPools.__init__", "own = owner == len(self.caches)", "own = True"),
    ),
    *breaks(
        "C113 C115",
        "a layer without keys of its own reads an empty pool",
        (
            "twinattn.engine.layers:Layer.attend",
            "            self.storage.write(twin, key, value, cache, slot_mapping)\n",
            "            self.storage.write(twin, key, value, cache, slot_mapping)\n"
            "        elif isinstance(cache, Tensor):\n            cache = torch.zeros_like(cache)\n",
        ),
    ),
    *breaks(
        "B48",
        "heads lie inside of tokens in either layout",
        ("refattn.allocation", '"HND": "(n hk p d) -> n p hk d"', '"HND": "(n p hk d) -> n p hk d"'),
    ),
    *breaks(
        "B48 B94",
        "int8 values lie in a buffer of their own",
        (
            "refattn.allocation:allocate_int8",
            "rearrange(buffer[key_bytes:].view(value_dtype)",
            "rearrange(buffer[key_bytes:].clone().view(value_dtype)",
        ),
    ),
    *breaks(
        "B54",
        "rows without a slot are not left out",
        (
            "refattn.checks:rows_with_slots",
            "        return key[: len(slot_mapping)], value[: len(slot_mapping)]",
            "        return key, value",
        ),
    ),
    # --- who may see whom ---
    *breaks(
        "A7 A25 A31 B61",
        "every sequence reads the first rows of keys",
        (
            "refattn.keys:read",
            "yield keys.key[first:last], keys.value[first:last]",
            "yield keys.key[: last - first], keys.value[: last - first]",
        ),
        (
            "fastattn.kernels.cpu.attention:varlen",
            "keys = slice(first_row + view.first_key, first_row + view.end_key)",
            "keys = slice(view.first_key, view.end_key)",
        ),
    ),
    *breaks(
        "A25 A29 A32 B50",
        "every mask is causal",
        ("refattn.plan:Plan.window", "return left, 0 if self.causal else right", "return left, 0"),
    ),
    *breaks(
        "A25 A28 A27 D121 D136 C111",
        "no query sees its own key",
        ("refattn.masks:window", "visible = visible & (j <= i + right)", "visible = visible & (j < i + right)"),
    ),
    *breaks(
        "A28 D121",
        "a decode does not see the newest key",
        (
            "fastattn.kernels.cpu.blocks:side_by_side",
            "hidden = (positions >= seq_lens) |",
            "hidden = (positions >= seq_lens - 1) |",
        ),
    ),
    *breaks(
        "C111",
        "a query sees the key after its own",
        (
            "fastattn.kernels.cpu.differential:_hide",
            "hidden = hidden | (distance < -right)",
            "hidden = hidden | (distance < -right - 1)",
        ),
    ),
    *breaks(
        "A26 A27 D122 D188",
        "queries are the first tokens of their sequence",
        (
            "refattn.masks:query_positions",
            "return torch.arange(seq_len - query_len, seq_len, device=device)",
            "return torch.arange(query_len, device=device)",
        ),
        (
            "fastattn.kernels.cpu.schedule:_view",
            "torch.arange(seq_len - (rows.stop - rows.start), seq_len",
            "torch.arange(0, rows.stop - rows.start",
        ),
    ),
    *breaks(
        "A26 A28 A32 D121 D122",
        "blocks are read in another order",
        (
            "refattn.kv_cache:gather",
            "cache[blocks[j // block_size].long(), j % block_size]",
            "cache[blocks[(seq_len - 1) // block_size - j // block_size].long(), j % block_size]",
        ),
        (
            "fastattn.kernels.cpu.blocks:read_blocks",
            "        return pool.index_select(0, blocks) if out is None else",
            "        blocks = blocks.flip(0)\n        return pool.index_select(0, blocks) if out is None else",
        ),
    ),
    *breaks(
        "A9 D124 C117",
        "a window shows one key less",
        ("refattn.masks:window", "visible = visible & (j >= i - left)", "visible = visible & (j > i - left)"),
    ),
    *breaks(
        "A9 D124",
        "a window shows one key less",
        ("fastattn.kernels.cpu.attention:_bias", "hidden |= distance > left", "hidden |= distance >= left"),
    ),
    *breaks(
        "C117",
        "a window shows one key less",
        (
            "fastattn.kernels.cpu.differential:_hide",
            "hidden = hidden | (distance > left)",
            "hidden = hidden | (distance >= left)",
        ),
    ),
    *breaks(
        "A30 B56",
        "a window has no right side",
        ("refattn.masks:window", "visible = visible & (j <= i + right)", "visible = visible & (j <= i)"),
        ("fastattn.kernels.cpu.attention:_bias", "hidden |= distance < -right", "hidden |= distance < 0"),
    ),
    *breaks(
        "A39",
        "no block is cut off",
        ("refattn.sliding_window:plan", "cut = first_visible // block_size", "cut = 0 * block_size"),
        (
            "fastattn.sliding_window:plan",
            "    # The keys that the queries of a sequence can see,",
            "    return Plan(batch, block_size, causal, window_size)\n"
            "    # The keys that the queries of a sequence can see,",
        ),
    ),
    *breaks(
        "B68 D139",
        "the window of a plan is forgotten",
        (
            "refattn.sliding_window:plan",
            "Plan(trimmed, block_size, causal, window_size, first_keys=starts)",
            "Plan(trimmed, block_size, causal, first_keys=starts)",
        ),
        (
            "fastattn.sliding_window:plan",
            "Plan(trimmed, block_size, causal, window_size, first_keys=first_keys)",
            "Plan(trimmed, block_size, causal, first_keys=first_keys)",
        ),
    ),
    # --- options ---
    *breaks(
        "A8",
        "distant keys gain by ALiBi",
        ("refattn.masks:alibi", "return -rearrange(slopes.to(dtype)", "return rearrange(slopes.to(dtype)"),
        (
            "fastattn.kernels.cpu.attention:_bias",
            "bias = -rearrange(options.alibi_slopes.to(bias.dtype)",
            "bias = rearrange(options.alibi_slopes.to(bias.dtype)",
        ),
    ),
    *breaks(
        "A10",
        "the cap comes after the mask",
        (
            "refattn.attention:attend",
            "scores = scores.masked_fill(~visible, -torch.inf)",
            "scores = scores.masked_fill(~visible, -softcap if softcap else -torch.inf)",
        ),
        (
            "fastattn.kernels.cpu.rectangles:_capped",
            "g=group) + bias\n",
            "g=group) + bias.clamp(min=-options.softcap)\n",
        ),
    ),
    *breaks(
        "A10 B224 D222",
        "there is no cap",
        ("refattn.attention:attend", "    if softcap:", "    if False:"),
        (
            "fastattn.kernels.cpu.rectangles:_capped",
            "(q @ k).tanh_().mul_(options.softcap)",
            "(q @ k).mul_(options.softcap)",
        ),
    ),
    *breaks(
        "A11",
        "the scale is the default one",
        (
            "refattn.attention:attend",
            "scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale",
            "scale = query.shape[2] ** -0.5",
        ),
        (
            "fastattn.kernels.cpu.rectangles:call_aten",
            "scale = d**-0.5 if softmax_scale is None else softmax_scale",
            "scale = d**-0.5",
        ),
    ),
    *breaks(
        "A12",
        "the heads of a group are not neighbours",
        (
            "refattn.attention:attend",
            "    group = query.shape[1] // key.shape[1]",
            "    key, value = (x.repeat(1, query.shape[1] // key.shape[1], 1) for x in (key, value))\n    group = 1",
        ),
        (
            "fastattn.kernels.cpu.rectangles:flash",
            ('"t (hk g) d -> 1 hk (g t) d"', '"1 hk (g t) dv -> t (hk g) dv"'),
            ('"t (g hk) d -> 1 hk (g t) d"', '"1 hk (g t) dv -> t (g hk) dv"'),
        ),
    ),
    *breaks(
        "A16 B60",
        "the caller's memory is left as it is",
        (
            "refattn.attention:finish",
            "out = result.to(dtype) if out is None else out.copy_(result)",
            "out = result.to(dtype)",
        ),
        ("fastattn.dispatch:_into", "return out.copy_(answer), lse", "return answer, lse"),
    ),
    *breaks(
        "A16",
        "an output is written over what is still to be read",
        (
            "fastattn.dispatch:_memory",
            "out.is_contiguous() and not _overlaps(out, read) else None",
            "out.is_contiguous() else None",
        ),
    ),
    *breaks(
        "B57 D127",
        "there are no sinks",
        ("refattn.attention:attend", "    if sinks is not None:", "    if False:"),
        ("fastattn.kernels.cpu.attention:_with_sinks", "    if sinks is not None:", "    if False:"),
    ),
    *breaks(
        "B57",
        "sinks added after a merge are lost",
        (
            "refattn.merge:add_sinks",
            "return merge([out, torch.zeros_like(out)], [lse, lse_of_sinks])",
            "return merge([out], [lse])",
        ),
        (
            "fastattn.kernels.torch_ops.merge:add_sinks",
            "return out, log_add_exp(lse, sinks.expand_as(lse))",
            "return out, lse",
        ),
    ),
    *breaks(
        "B57 D127",
        "the sinks of a model do not reach a layer",
        (
            "twinattn.engine.layer_pools:LayerPools.attend",
            "options = AttentionOptions(scale, softcap or 0.0, alibi_slopes, s_aux,",
            "options = AttentionOptions(scale, softcap or 0.0, alibi_slopes, None,",
        ),
    ),
    *breaks(
        "B58",
        "flash-attn is given the root of the distance",
        (
            "fastattn.kernels.flash.fa2:unsupported_reason",
            "    if problem.alibi_sqrt:",
            "    if problem.alibi_sqrt and not problem.alibi:",
        ),
    ),
    *breaks(
        "B58",
        "ALiBi grows with the distance itself",
        ("refattn.masks:alibi", "(distance.to(dtype).sqrt() if sqrt else distance)", "distance"),
        (
            "fastattn.kernels.cpu.attention:_bias",
            "distance = distance.abs().to(bias.dtype).sqrt() if options.alibi_sqrt else distance.abs()",
            "distance = distance.abs()",
        ),
    ),
    *breaks(
        "B58",
        "in C ALiBi grows with the distance itself",
        ("fastattn/kernels/native/attention.c", "(call->sqrt_distance ? sqrtf(far) : far)", "far"),
    ),
    *breaks(
        "B183",
        "blocks are of a multiple of 16 tokens",
        (
            "refattn.batch:check_block_table",
            "    check_sizes(block_size=block_size)\n    block_table = _table_of(batch)",
            "    check_sizes(block_size=block_size // 16)\n    block_table = _table_of(batch)",
        ),
    ),
    *in_both(
        "B220",
        "the context of a rank has no window",
        "context_parallel:plan",
        "window_size=(0 if left >= 0 else -1, -1), positions=where)",
        "window_size=(-1, -1))",
    ),
    *in_both(
        "D189",
        "latents in fp8 stand for twice as much",
        "mla:attention",
        "latents_of(cache, latent_rank, cache_scale,",
        "latents_of(cache, latent_rank, 2 * cache_scale,",
    ),
    *breaks(
        "D191",
        "parents of padding nodes are read",
        (
            "fastattn.kernels.torch_ops.metadata:draw_trees",
            "above = torch.minimum(trees.parents.long(), node - 1).where(is_node, -1)",
            "above = torch.minimum(trees.parents.long(), node - 1)",
        ),
    ),
    *breaks(
        "D192",
        "a merge breaks the graph",
        (
            "twinattn.integrations.ops:merge",
            "    answer: tuple[Tensor, Tensor] = torch.ops.fastattn.merge(outs, lses)",
            "    torch._dynamo.graph_break()\n    answer: tuple[Tensor, Tensor] = torch.ops.fastattn.merge(outs, lses)",
        ),
    ),
    *breaks(
        "A34 B60 D187",
        "padding rows are left unwritten",
        (
            "refattn.attention:attend_sequences",
            "lse = query.new_full(query.shape[:2], -torch.inf, dtype=torch.promote_types(compute, torch.float32))",
            "lse = query.new_full(query.shape[:2], 0.0, dtype=torch.promote_types(compute, torch.float32))\n"
            "    out.fill_(torch.nan)",
        ),
        (
            "fastattn.kernels.cpu.attention:_empty_output",
            "out = query.new_zeros(*query.shape[:2], value_size)",
            "out = query.new_full((*query.shape[:2], value_size), torch.nan)",
        ),
    ),
    *breaks(
        "B73 D128",
        "tiles follow the batch",
        (
            "fastattn.kernels.cpu.attention:_sequence",
            "    if options.batch_invariant:\n        return _aligned_tiles",
            "    if False:\n        return _aligned_tiles",
        ),
    ),
    *breaks(
        "D128",
        "batch invariance does not reach the layers",
        (
            "twinattn.engine.layer_pools:LayerPools.attend",
            "alibi_slopes, s_aux, self._batch_invariant)",
            "alibi_slopes, s_aux, False)",
        ),
    ),
    *breaks(
        "D128",
        "batch invariance does not reach layers without slopes and sinks",
        (
            "twinattn.engine.layer_pools:LayerPools.attend",
            "_plain_options(scale, softcap or 0.0, self._batch_invariant)",
            "_plain_options(scale, softcap or 0.0, False)",
        ),
    ),
    *breaks(
        "E177 B184",
        "there is no log-sum-exp",
        (
            "refattn.attention:finish",
            "return (out, lse) if return_lse else out",
            "return (out, torch.zeros_like(lse)) if return_lse else out",
        ),
        (
            "fastattn.chunked_prefill:attention",
            "    return dispatch.attend(query, Pages(key_cache, value_cache), plan, options, out, return_lse, Plan)",
            "    answer = dispatch.attend(query, Pages(key_cache, value_cache), plan, options, out, return_lse, Plan)\n"
            "    return (answer[0], answer[1] * 0) if return_lse else answer",
        ),
    ),
    # --- metadata ---
    *breaks(
        "A35",
        "a batch has other numbers of tokens and of keys",
        (
            "refattn.steps:make_batch",
            "        num_keys=sum(seq_lens),\n        num_tokens=sum(query_lens),",
            "        num_keys=sum(query_lens),\n        num_tokens=sum(seq_lens),",
        ),
    ),
    *breaks(
        "A36 B66",
        "parts have the maxima of the whole",
        (
            "refattn.steps:_part",
            "max_seq_len=batch.max_seq_len if seq_lens is None else max(seq_lens[first:last], default=0)",
            "max_seq_len=batch.max_seq_len",
        ),
    ),
    *breaks(
        "B185",
        "drafts do not count as tokens of a decode",
        (
            "refattn.steps:order_decodes_first",
            '    check_int("decode_len", decode_len)\n',
            '    check_int("decode_len", decode_len)\n    decode_len = 1\n',
        ),
    ),
    *breaks(
        "A179",
        "the scales of a step are not worked out",
        (
            "twinattn.engine.layer_pools:LayerPools.attend",
            "if self.calculates_scales and self.owners[index] == index:",
            "if self.calculates_scales and self.owners[index] == index + 1:",
        ),
    ),
    *breaks(
        "B185",
        "an engine takes requests with drafts for prefills",
        (
            "twinattn.engine.planner:StepPlanner.in_order",
            "order_decodes_first(counts, decode_len=self.decode_len)",
            "order_decodes_first(counts)",
        ),
    ),
    *breaks(
        "B66",
        "every part has the first rows of the table",
        ("refattn.steps:_part", "else batch.block_table[first:last]", "else batch.block_table[: last - first]"),
    ),
    *breaks(
        "A37",
        "cross attention has the lengths of the decoder",
        ("refattn.steps:make_cross_batch", "        seq_lens=keys.seq_lens,", "        seq_lens=batch.seq_lens,"),
    ),
    *breaks(
        "A37",
        "cross attention has the table of the decoder",
        (
            "refattn.steps:make_cross_batch",
            "        block_table=keys.block_table,",
            "        block_table=batch.block_table,",
        ),
    ),
    *breaks(
        "A38 A35 A6 D123 A37",
        "a slot is a block and a row",
        (
            "refattn.metadata:slot_mapping",
            "result[row] = block * block_size + place[row] % block_size",
            "result[row] = block + place[row] % block_size",
        ),
        (
            "fastattn.kernels.torch_ops.metadata:slot_mapping",
            "return (block * block_size + place % block_size).masked_fill(nowhere, -1)",
            "return (block + place % block_size).masked_fill(nowhere, -1)",
        ),
    ),
    *breaks(
        "A34",
        "padding rows go to slots",
        (
            "refattn.metadata:slot_mapping",
            "result = torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)",
            "result = torch.arange(num_tokens, dtype=torch.int64, device=batch.device)",
        ),
        (
            "fastattn.kernels.torch_ops.metadata:slot_mapping",
            "    nowhere = padding | (place < 0)",
            "    nowhere = place < 0",
        ),
    ),
    *breaks(
        "A42",
        "tokens without a block go to the first slot",
        (
            "refattn.metadata:slot_mapping",
            "result = torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)",
            "result = torch.full((num_tokens,), 0, dtype=torch.int64, device=batch.device)",
        ),
        (
            "fastattn.metadata:slot_mapping",
            "return torch.full((num_tokens,), -1, dtype=torch.int64, device=batch.device)",
            "return torch.full((num_tokens,), 0, dtype=torch.int64, device=batch.device)",
        ),
    ),
    *breaks(
        "A40",
        "one token more is written than a window sees",
        (
            "refattn.metadata:slot_mapping",
            "place[row] >= place[q1 - 1] + 1 - window",
            "place[row] >= place[q1 - 1] - window",
        ),
        (
            "fastattn.metadata:slot_mapping",
            "place < (batch.seq_lens - window)[sequence]",
            "place < (batch.seq_lens - window - 1)[sequence]",
        ),
    ),
    *breaks(
        "A24",
        "prefills that come first lose one",
        (
            "refattn.steps:split_decodes_and_prefills",
            "return (head, tail) if decodes_first else (tail, head)",
            "return head, tail",
        ),
    ),
    *breaks(
        "B63",
        "decodes that come first lose one",
        (
            "refattn.steps:split_decodes_and_prefills",
            "cut = sum(kinds) if decodes_first else changes[0]",
            "cut = max(0, sum(kinds) - 1) if decodes_first else changes[0]",
        ),
    ),
    *breaks(
        "B65",
        "a decode has one token at most",
        (
            "refattn.steps:split_decodes_and_prefills",
            "[length <= decode_len for length in query_lens]",
            "[length <= 1 for length in query_lens]",
        ),
    ),
    *in_both(
        "A46",
        "padding sequences grow, too",
        "metadata:advance",
        "batch.seq_lens.add_(batch.query_lens)",
        "batch.seq_lens.add_(1)",
    ),
    *in_both(
        "A46",
        "the slots stay those of the step before",
        "metadata:advance",
        "    slots.copy_(slot_mapping(longer, slots.shape[0], block_size=block_size))\n",
        "",
    ),
    *breaks(
        "A47",
        "a prefill stays one",
        ("refattn.metadata:turn_prefills_into_decodes", "[min(query_len, 1) for query_len", "[query_len for query_len"),
        (
            "fastattn.metadata:turn_prefills_into_decodes",
            "has_query = batch.query_lens.clamp(max=1)",
            "has_query = batch.query_lens",
        ),
    ),
    *breaks(
        "B67",
        "the table of the first group stays",
        (
            "refattn.steps:update_block_table",
            "    return dataclasses.replace(batch, block_table=block_table)",
            "    return batch",
        ),
    ),
    *breaks(
        "D119 D120",
        "the slots are those of the first requests",
        (
            "refattn.metadata:block_table_from_slots",
            "token_slots[request, column * block_size]",
            "token_slots[i, column * block_size]",
        ),
        (
            "fastattn.metadata:block_table_from_slots",
            "token_slots[requests[:, None], first]",
            "token_slots[: len(requests), first]",
        ),
    ),
    *breaks(
        "D120",
        "a slot is taken for a block",
        (
            "refattn.metadata:block_table_from_slots",
            "token_slots[request, column * block_size] // block_size",
            "token_slots[request, column * block_size]",
        ),
        ("fastattn.metadata:block_table_from_slots", "first] // block_size).int()", "first]).int()"),
    ),
    *breaks(
        "D125",
        "self-attention begins with the encoder's blocks",
        (
            "refattn.metadata:split_encoder",
            "= blocks[cut[i] :]",
            "= blocks[: len(blocks) - cut[i]]",
        ),
        (
            "fastattn.metadata:split_encoder",
            "device=batch.device) + lens[:, None] // block_size",
            "device=batch.device) + 0 * lens[:, None]",
        ),
    ),
    *breaks(
        "D170",
        "sequences of the step before stay in the buffers",
        ("refattn.steps:refill", "    buffers.seq_lens[b:].zero_()", "    pass"),
    ),
    *breaks(
        "B64 D162 D163 D166 D168 B69",
        "the buffers keep the lengths of the first step",
        (
            "refattn.steps:refill",
            "    buffers.seq_lens[:b].copy_(batch.seq_lens)",
            "    if not buffers.seq_lens.any():\n        buffers.seq_lens[:b].copy_(batch.seq_lens)",
        ),
    ),
    *breaks(
        "D168 D161 D164 D165",
        "the buffers keep the table of the first step",
        (
            "refattn.steps:refill",
            "        buffers.block_table[:b, :columns].copy_(batch.block_table[:, :columns])",
            "        if not buffers.block_table.any():\n"
            "            buffers.block_table[:b, :columns].copy_(batch.block_table[:, :columns])",
        ),
    ),
    # --- merge and cascade ---
    *breaks(
        "B78",
        "parts are weighed to the base of two",
        ("refattn.merge:merge", "torch.exp(part_lse - ", "torch.exp2(part_lse - "),
        (
            "fastattn.kernels.torch_ops.merge:merge",
            "part = part_out * torch.exp(part_lse - lse)[..., None]",
            "part = part_out * torch.exp2(part_lse - lse)[..., None]",
        ),
    ),
    *breaks(
        "D159",
        "the log-sum-exp of a merge is one of [h, t]",
        (
            "refattn.merge:merge",
            "return out.to(outs[0].dtype), lse.to(lses[0].dtype)",
            "return out.to(outs[0].dtype), lse.T.reshape(lse.shape).to(lses[0].dtype)",
        ),
        (
            "fastattn.merge:merge",
            "    return out, lse.to(lses[0].dtype)",
            "    return out, lse.T.reshape(lse.shape).to(lses[0].dtype)",
        ),
    ),
    *breaks(
        "D159",
        "parts are merged by log-sum-exps of [h, t]",
        (
            "refattn.merge:merge",
            "torch.stack([lse.to(compute) for lse in lses])",
            "torch.stack([lse.T.reshape(lse.shape).to(compute) for lse in lses])",
        ),
        (
            "fastattn.merge:merge",
            "[part.to(wider) for part in lses]",
            "[part.T.reshape(part.shape).to(wider) for part in lses]",
        ),
    ),
    *breaks(
        "B75",
        "levels begin at the first key",
        (
            "refattn.cascade:plan.add_level",
            "[tables[first][begins[first] // block_size : ceil(end / block_size)]",
            "[tables[first][: ceil(end / block_size)]",
        ),
        (
            "fastattn.cascade:plan",
            "block_table=_cut(block_table, begins, None, block_size)",
            "block_table=_cut(block_table, [0] * batch.num_seqs, None, block_size)",
        ),
    ),
    *breaks(
        "B76",
        "a shared prefix has a causal mask",
        (
            "refattn.cascade:plan.add_level",
            "Plan(keys, block_size, False, (window_size[0], -1), first_keys=starts, positions=places)",
            "Plan(keys, block_size, True, (window_size[0], -1), first_keys=starts)",
        ),
        (
            "fastattn.cascade:plan",
            "levels.append(Plan(keys, block_size, False, (left, -1), first_keys=first_keys, positions=where))",
            "levels.append(Plan(keys, block_size, True, (left, -1), first_keys=first_keys))",
        ),
    ),
    *breaks(
        "B77",
        "what follows the prefix has no causal mask",
        (
            "refattn.cascade:plan.add_level",
            "levels.append(Plan(keys, block_size, True, window_size,",
            "levels.append(Plan(keys, block_size, False, window_size,",
        ),
        (
            "fastattn.cascade:plan",
            "levels.append(Plan(own_keys, block_size, True,",
            "levels.append(Plan(own_keys, block_size, False,",
        ),
    ),
    *breaks(
        "B78 B76",
        "only the last level counts",
        (
            "refattn.attention:attend_plan",
            "return parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))",
            "return parts[-1]",
        ),
        (
            "fastattn.dispatch:_by_a_kernel.one_by_one",
            "merge(*zip(*parts, strict=True))",
            "parts[-1]",
        ),
    ),
    *breaks(
        "B79",
        "shared levels have no window",
        ("refattn.cascade:plan.add_level", "False, (window_size[0], -1)", "False, (-1, -1)"),
        ("fastattn.cascade:plan", "block_size, False, (left, -1)", "block_size, False, (-1, -1)"),
    ),
    *breaks(
        "B79",
        "prefixes of other blocks pass",
        (
            "refattn.checks_of_steps:check_prefixes",
            "if tables[member][: end // block_size] != tables[first][: end // block_size]:",
            "if False:",
        ),
    ),
    *breaks(
        "B79",
        "prefixes of parts of a block pass",
        ("refattn.checks_of_steps:check_prefixes", "if end < 1 or end % block_size:", "if end < 1:"),
    ),
    *breaks(
        "B80",
        "every level counts the sinks",
        (
            "refattn.attention:attend_plan",
            "its_options = options if level is plan.levels[-1] else options.without_sinks()",
            "its_options = options",
        ),
        (
            "fastattn.dispatch:_levels_of",
            "((level, options.without_sinks()) for level in shared)",
            "((level, options) for level in shared)",
        ),
    ),
    *breaks(
        "B81",
        "the slowest choice is taken",
        (
            "twinattn.engine.cost_model:worthwhile_prefixes",
            "return min(choices, key=lambda chosen:",
            "return max(choices, key=lambda chosen:",
        ),
    ),
    *breaks(
        "B82",
        "levels share the memory of their splits",
        (
            "fastattn.kernels.triton.attention:attend_levels",
            "        first += tuning.most_splits",
            "        first += tuning.splits",
        ),
    ),
    *breaks(
        "B83",
        "only the last quantized level counts",
        (
            "refattn.attention:attend_plan",
            "return parts[0] if len(parts) == 1 else merge(*zip(*parts, strict=True))",
            "return parts[-1]",
        ),
        (
            "fastattn.kernels.cpu.quantized:attend_to_pools",
            "merge(*zip(*parts, strict=True)) if shared else parts[0]",
            "parts[-1]",
        ),
    ),
    # --- context parallelism ---
    *breaks(
        "B84",
        "tokens are dealt out one by one",
        (
            "refattn.context_parallel:own_positions",
            "place[place // shard.interleave % shard.num_ranks == shard.rank]",
            "place[place % shard.num_ranks == shard.rank]",
        ),
        (
            "fastattn.context_parallel:local_lens",
            "clamp(0, shard.interleave)",
            "clamp(0, 1)",
        ),
    ),
    *in_both(
        "B85",
        "the share of a rank is as long as the longest sequence",
        "context_parallel:plan",
        "longest = -(-batch.max_seq_len // (shard.num_ranks * shard.interleave)) * shard.interleave",
        "longest = batch.max_seq_len",
    ),
    *breaks(
        "B85",
        "the longest share of a rank is read from the device",
        (
            "fastattn.context_parallel:plan",
            "longest = -(-batch.max_seq_len // (shard.num_ranks * shard.interleave)) * shard.interleave",
            "longest = int(local_lens(batch.seq_lens, shard).max())",
        ),
    ),
    *in_both(
        "B86",
        "a rank asks with its own heads only",
        "context_parallel:attention",
        "all_heads = group.all_gather(query, dim=1)",
        "all_heads = torch.cat([query] * group.size, dim=1)",
    ),
    *breaks(
        "B86",
        "ranks are gathered in another order",
        (
            "refattn.ranks:_SimulatedGroup.all_gather",
            "return torch.cat(self._exchange(part), dim)",
            "return torch.cat(self._exchange(part)[::-1], dim)",
        ),
    ),
    *breaks(
        "B87",
        "the newest key of the context is hidden",
        ("refattn.context_parallel:_attend_to_own_context", "else j < i,", "else j < i - 1,"),
        (
            "fastattn.context_parallel:plan",
            "context = Plan(keys, block_size, causal=False,",
            "context = Plan(keys, block_size, causal=True,",
        ),
    ),
    *breaks(
        "B225",
        "an encoder's step can be captured, too",
        (
            "twinattn.integrations.vllm:FastAttentionMetadataBuilder.get_cudagraph_support",
            "AttentionCGSupport.NEVER if is_encoder else cls._cudagraph_support",
            "cls._cudagraph_support",
        ),
    ),
    *breaks(
        "B221",
        "ALiBi over ranks counts the keys of a rank",
        (
            "refattn.context_parallel:_attend_to_own_context",
            "bias=None if slopes is None else -rearrange",
            "bias=None if slopes is None else rearrange",
        ),
        ("fastattn.context_parallel:_attend_by_distance", "alibi_slopes=slopes * period)", "alibi_slopes=slopes)"),
    ),
    *breaks(
        "B88",
        "ranks are summed without weights",
        ("refattn.context_parallel:attention", "weight = torch.exp(lse - total)", "weight = torch.ones_like(total)"),
        (
            "fastattn.context_parallel:attention",
            "weight = (lse - total).exp_()[..., None]",
            "weight = torch.ones_like(total)[..., None]",
        ),
    ),
    *breaks(
        "B88",
        "a rank gets the heads of another",
        (
            "refattn.ranks:DistributedGroup.reduce_scatter",
            "shares = torch.stack(part.chunk(self.size, dim))",
            "shares = torch.stack(part.chunk(self.size, dim)).flip(0)",
        ),
    ),
    *in_both(
        "B89",
        "new tokens see one another in both directions",
        "context_parallel:plan",
        "Plan(new, causal=",
        "Plan(new, causal=False and ",
    ),
    *in_both(
        "B181",
        "new tokens always have a causal mask",
        "context_parallel:plan",
        "Plan(new, causal=",
        "Plan(new, causal=True or ",
    ),
    *breaks(
        "B182",
        "the quantized values of a rank count twice as much",
        (
            "refattn.context_parallel:_attend_to_own_context",
            "read_query(query, stored, plan.context), read(query, stored, plan.context)",
            "read_query(query, stored, plan.context), read(query, stored, plan.context)\n"
            "    sequences = ((key if scales is None else 2 * key, value) for key, value in sequences)",
        ),
        (
            "fastattn.context_parallel:attention",
            "dispatch.compute(all_heads, keys,",
            "dispatch.compute(all_heads if scales is None else 2 * all_heads, keys,",
        ),
    ),
    *breaks(
        "B90",
        "only the new tokens count",
        (
            "refattn.context_parallel:attention",
            "result, lse = merge([context, new], [context_lse, new_lse])",
            "result, lse = new, new_lse",
        ),
        (
            "fastattn.context_parallel:attention",
            'dispatch.run("merge", outs=[context, new.to(context.dtype)], lses=[context_lse, new_lse])',
            "(new.to(context.dtype), new_lse)",
        ),
    ),
    *breaks(
        "B91",
        "a rank writes into the slot after its own",
        (
            "refattn.context_parallel:slot_mapping",
            " * block_size + i % block_size",
            " * block_size + (i + 1) % block_size",
        ),
        (
            "fastattn.context_parallel:slot_mapping",
            "(block * block_size + local % block_size).masked_fill(elsewhere, -1)",
            "(block * block_size + (local + 1) % block_size).masked_fill(elsewhere, -1)",
        ),
    ),
    # --- quantized caches ---
    *breaks(
        "A18",
        "keys are read under the scale of values",
        (
            "refattn.keys:_read_fp8",
            "for x in (scales.key, scales.value))",
            "for x in (scales.value, scales.key))",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:fold_scales",
            "for scale in (scales.key, scales.value))",
            "for scale in (scales.value, scales.key))",
        ),
    ),
    *breaks(
        "A19",
        "a write multiplies by the scale",
        ("refattn.rounding:to_fp8", "(x.float() / scale).clamp(", "(x.float() * scale).clamp("),
        ("fastattn.kernels.torch_ops.quantized:to_fp8", "x.float().div(scale).clamp_(", "x.float().mul(scale).clamp_("),
    ),
    *breaks(
        "A19",
        "a write rounds towards zero",
        (
            "refattn.rounding:to_fp8",
            ".clamp(-largest, largest).to(kind)",
            ".clamp(-largest, largest).mul(1 - 2**-5).to(kind)",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:to_fp8",
            ".clamp_(-largest, largest).to(kind)",
            ".clamp_(-largest, largest).mul(1 - 2**-5).to(kind)",
        ),
    ),
    *breaks(
        "A19 B101",
        "infinity stays infinite",
        ("refattn.rounding:to_fp8", ".clamp(-largest, largest).to(kind)", ".to(kind)"),
        ("fastattn.kernels.torch_ops.quantized:to_fp8", ".clamp_(-largest, largest).to(kind)", ".to(kind)"),
    ),
    *breaks(
        "A20 A17",
        "bytes are read as whole numbers",
        (
            "refattn.keys:_read_fp8",
            "quantized.view(scales.format).to(compute)",
            "quantized.view(torch.uint8).to(compute)",
        ),
        (
            "fastattn.kernels.cpu.quantized:attention",
            "keys = QuantizedPool(key_cache.view(scales.format), compute)",
            "keys = QuantizedPool(key_cache.view(torch.uint8), compute)",
        ),
    ),
    *breaks(
        "A21",
        "queries stay as they are",
        (
            "refattn.keys:read_query",
            "if isinstance(scales, Fp8Scales) and scales.query is None:",
            "if isinstance(scales, Fp8Scales):",
        ),
        ("fastattn.kernels.torch_ops.quantized:fold_scales", "if scales.query is not None:", "if False:"),
    ),
    *breaks(
        "B180",
        "queries in fp8 are rounded once more",
        (
            "refattn.keys:read_query",
            "quantized = x if query.dtype == scales.format else to_fp8(x, of_heads, scales.format)",
            "quantized = to_fp8(x, of_heads, scales.format)",
        ),
    ),
    *breaks(
        "B180",
        "the scale of queries in fp8 is forgotten",
        (
            "fastattn.quantized:_as_numbers",
            "Fp8Scales(scales.key * scales.query, scales.value,",
            "Fp8Scales(scales.key, scales.value,",
        ),
    ),
    *breaks(
        "A22 B93 B98 B100",
        "keys are read without their scales",
        ("refattn.keys:_read_int8", "key.to(compute) * of_key.to(compute)", "key.to(compute)"),
        (
            "fastattn.kernels.cpu.dequantize:QuantizedPool.read",
            "return out if self.scale is None else out.mul_",
            "return out if True else out.mul_",
        ),
    ),
    *breaks(
        "A17 B186",
        "a type that is not there passes",
        ("twinattn.engine.kv_cache_dtype:check_name", "    if kv_cache_dtype not in NAMES:", "    if False:"),
    ),
    *breaks(
        "B101",
        "fp8_e5m2 is no name",
        ("twinattn.integrations.vllm", ', "fp8_e5m2": torch.float8_e5m2}', "}"),
    ),
    *breaks(
        "A23",
        "every sequence has the scales of the first",
        ("refattn.rounding:per_head", "numbers = numbers[sequence] if", "numbers = numbers[0] if"),
        ("fastattn.kernels.torch_ops.quantized:_per_row", "scale.index_select(0, sequences)", "scale[:1]"),
    ),
    *breaks(
        "D126",
        "virtual sequences have the scales of the first",
        (
            "refattn.keys:_member",
            "return i if plan.sequences is None else int(plan.sequences[i])",
            "return i if plan.sequences is None else 0",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:_sequences",
            "if plan.sequences is None else plan.sequences.long()",
            "if plan.sequences is None else plan.sequences.long() * 0",
        ),
    ),
    *breaks(
        "B51",
        "every head has the scale of the first",
        (
            "refattn.rounding:per_head",
            "numbers.expand(num_kv_heads)",
            "numbers.flatten()[:1].expand(num_kv_heads)",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:_per_row",
            "scale = scale.repeat_interleave(group, -1)",
            "scale = scale[..., :1].repeat_interleave(group * scale.shape[-1], -1)",
        ),
    ),
    *breaks(
        "B92",
        "int8 values are read without their scales",
        (
            "refattn.keys:_read_int8",
            "value.to(compute) * (1.0 if of_value is None else of_value.to(compute))",
            "value.to(compute)",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:fold_scales",
            "    if scales.value is None:\n",
            "    if True:\n",
        ),
    ),
    *breaks(
        "B95",
        "all heads of a token share a scale",
        (
            "refattn.rounding:row_scale",
            "return scale_of(x.float().abs().amax(-1, keepdim=True))",
            "return scale_of(x.float().abs().amax((-2, -1), keepdim=True).expand(*x.shape[:-1], 1).clone())",
        ),
        (
            "fastattn.kernels.torch_ops.quantized:row_scale",
            "scale = x.float().abs().amax(-1, keepdim=True).div_(127)",
            "scale = x.float().abs().amax((-2, -1), keepdim=True).expand(*x.shape[:-1], 1).div(127)",
        ),
    ),
    *breaks(
        "B95",
        "whole numbers are rounded down",
        ("refattn.rounding:to_int8", ".round().clamp(-127, 127)", ".floor().clamp(-127, 127)"),
        ("fastattn.kernels.torch_ops.quantized:to_int8", ".round_().clamp_(-127, 127)", ".floor_().clamp_(-127, 127)"),
    ),
    *breaks(
        "B96",
        "the scale is that of the last values",
        (
            "refattn.quantized:value_scales",
            "torch.stack([_largest(value) for value in values]).amax(0)",
            "torch.stack([_largest(value) for value in values])[-1]",
        ),
        (
            "fastattn.quantized:value_scales",
            "largest = torch.maximum(largest, value.float().abs().amax(0))",
            "largest = value.float().abs().amax(0)",
        ),
        (
            "twinattn.engine.calibration:_watched",
            "torch.maximum(before[0], here[0]), torch.maximum(before[1], here[1])",
            "here",
        ),
    ),
    *breaks(
        "B97",
        "the quantized keys are not written",
        ("refattn.quantized:write", "key_cache[block, row] = to_int8(key[token], scale)", "pass"),
        ("fastattn.kernels.cpu.quantized:write", "key_cache[blocks, rows] = to_int8(key, scale)", "pass"),
    ),
    *breaks(
        "B97",
        "the scales of keys are not written",
        ("refattn.quantized:write", 'scales.key[block, row] = rearrange(scale, "hk 1 -> hk")', "pass"),
        ("fastattn.kernels.cpu.quantized:write", "scales.key[blocks, rows] = scale[..., 0]", "pass"),
    ),
    *breaks(
        "B101",
        "fp8 is a name for e5m2",
        ("twinattn.integrations.vllm", '"fp8": torch.float8_e4m3fn', '"fp8": torch.float8_e5m2'),
    ),
    # --- differential attention ---
    *breaks(
        "C102",
        "a cache has room for all heads in each half",
        (
            "refattn.allocation:allocate_pairs",
            "num_kv_heads // 2, head_size, dtype=dtype",
            "num_kv_heads, head_size, dtype=dtype",
        ),
    ),
    *breaks(
        "C103",
        "only keys are moved",
        (
            "refattn.allocation:pools_of_pairs",
            "[cache[half, kind] for half in (0, 1) for kind in (0, 1)]",
            "[cache[half, 0] for half in (0, 1)]",
        ),
    ),
    *breaks(
        "C104",
        "pairs are made of the first and the second half of the heads",
        (
            "refattn.differential:attention",
            "    keys, answers, lses = Pairs(cache, scales), [], []",
            "    keys, answers, lses = Pairs(cache, scales), [], []\n"
            "    query = query.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)",
        ),
        (
            "fastattn.kernels.cpu.differential:_tile",
            '"b t (pairs g two) d -> two b pairs (g t) d"',
            '"b t (two pairs g) d -> two b pairs (g t) d"',
        ),
    ),
    *in_both(
        "C105 C102",
        "a write splits the heads in the middle",
        "differential:write",
        "key[:, half::2], value[:, half::2],",
        "key.chunk(2, 1)[half], value.chunk(2, 1)[half],",
    ),
    *breaks(
        "C106",
        "the second exponential is added",
        (
            "refattn.differential:compute_lambda",
            "return torch.exp(first) - torch.exp(second) + lambda_init",
            "return torch.exp(first) + torch.exp(second) + lambda_init",
        ),
        (
            "fastattn.differential:compute_lambda",
            "return first - second + lambda_init",
            "return first + second + lambda_init",
        ),
    ),
    *breaks(
        "C107",
        "lambda begins at 0",
        (
            "refattn.differential:compute_lambda",
            "return torch.exp(first) - torch.exp(second) + lambda_init",
            "return torch.exp(first) - torch.exp(second)",
        ),
        ("fastattn.differential:compute_lambda", "return first - second + lambda_init", "return first - second"),
    ),
    *breaks(
        "C108",
        "both softmaxes weigh the first half of the values",
        (
            "refattn.differential:attention",
            "keys.of_halves(half, other), plan, its_options) for",
            "keys.of_halves(half, 0), plan, its_options) for",
        ),
        (
            "fastattn.kernels.cpu.differential:_tile",
            "_kv_chunks(pools[half, 1], blocks",
            "_kv_chunks(pools[0, 1], blocks",
        ),
    ),
    *breaks(
        "C108",
        "halves of keys and values are swapped in four calls",
        ("fastattn.dispatch:_with_subtraction", "keys.of_halves(half, other)", "keys.of_halves(other, half)"),
    ),
    *breaks(
        "C109",
        "the norm is over all pairs",
        (
            "refattn.differential:attention",
            "difference.square().mean(-1, keepdim=True)",
            "difference.square().mean((-2, -1), keepdim=True)",
        ),
        (
            "fastattn.kernels.problem:Subtraction.finish",
            "return rms_norm(difference, difference.shape[-1:], weight, self.norm_eps).mul(self.factor)",
            "norm = rms_norm(difference, difference.shape[-2:], None, self.norm_eps).mul(self.factor)\n"
            "        return norm if weight is None else norm * weight",
        ),
    ),
    *breaks(
        "C109",
        "there is no factor",
        ("refattn.differential:attention", "rearrange((1 - lambda_init) * normed,", "rearrange(normed,"),
        ("fastattn.kernels.problem:Subtraction.finish", "self.norm_eps).mul(self.factor)", "self.norm_eps)"),
    ),
    *breaks(
        "C110",
        "the heads of a pair are not neighbours in the output",
        (
            "refattn.differential:attention",
            '"t pairs (two d) -> t (pairs two) d"',
            '"t pairs (two d) -> t (two pairs) d"',
        ),
        (
            "fastattn.dispatch:_with_subtraction.of_kernel",
            "else answer.view(query.shape), lse",
            "else answer.unflatten(2, (2, -1)).transpose(1, 2).reshape(query.shape), lse",
        ),
    ),
    *breaks(
        "C117",
        "distant keys gain by ALiBi",
        ("fastattn.kernels.cpu.differential:_hide", "scores -= slopes *", "scores += slopes *"),
    ),
    *breaks(
        "C117",
        "there is no cap",
        ("fastattn.kernels.cpu.differential:_tile", "    if options.softcap:", "    if False:"),
    ),
    *breaks(
        "C118",
        "the twin subtracts over the values of the other half",
        (
            "fastattn.dispatch:_with_subtraction.by_four_calls",
            "values = keys.of_halves(half, other)",
            "values = keys.of_halves(half, 1 - other)",
        ),
    ),
    *breaks(
        "C118",
        "the halves have the scales of each other",
        (
            "refattn.keys:Pairs.of_halves",
            "self.scales.of_halves(half, other))",
            "self.scales.of_halves(1 - half, 1 - other))",
        ),
    ),
    *in_both(
        "C118",
        "the halves are written under the scales of each other",
        "differential:write",
        "scales=scales.of_halves(half, half))",
        "scales=scales.of_halves(1 - half, 1 - half))",
    ),
    # --- local attention ---
    *breaks(
        "D130 D136 D134 D190",
        "a chunk begins at the first key",
        ("refattn.local:plan", "keys = range(max(begin, 0), max(end, 0))", "keys = range(0, max(end, 0))"),
    ),
    *breaks(
        "D130 D136 D190",
        "a chunk reads the blocks of the first",
        (
            "fastattn.kernels.torch_ops.metadata:cut_chunks",
            'used = rearrange(first_key // block_size, "b chunks -> b chunks 1")',
            'used = rearrange(0 * first_key // block_size, "b chunks -> b chunks 1")',
        ),
    ),
    *breaks(
        "D131",
        "a long chunk is not causal",
        (
            "fastattn.local:plan",
            "return Plan(batch, block_size, window_size=window_size)",
            "return Plan(batch, block_size, causal=False, window_size=window_size)",
        ),
        (
            "refattn.local:plan",
            "return Plan(chunks, block_size, causal=True,",
            "return Plan(chunks, block_size, causal=False,",
        ),
    ),
    *breaks(
        "D132",
        "the table is read from its beginning",
        (
            "refattn.local:plan",
            "tables.append(blocks[keys.start // block_size : -(-keys.stop // block_size)])",
            "tables.append(blocks[: -(-keys.stop // block_size)])",
        ),
    ),
    *breaks(
        "D132",
        "the table is read past its end",
        (
            "fastattn.kernels.torch_ops.metadata:cut_chunks",
            'used = rearrange(used.clamp(max=batch.block_table.shape[1] - 1), "b chunks columns',
            'used = rearrange(used, "b chunks columns',
        ),
    ),
    *breaks(
        "D134 D133",
        "layers with chunks attend to everything",
        (
            "twinattn.engine.layers:Chunk.plan",
            "twin.local.plan(batch, chunk_size=self.reach, block_size=block_size)",
            "twin.chunked_prefill.plan(batch, block_size=block_size)",
        ),
    ),
    *breaks(
        "D135",
        "a chunk has no window",
        (
            "refattn.local:plan",
            "causal=True, window_size=window_size, first_keys=starts",
            "causal=True, first_keys=starts",
        ),
        (
            "fastattn.local:plan",
            "Plan(chunks, block_size, window_size=window_size, first_keys",
            "Plan(chunks, block_size, first_keys",
        ),
    ),
    *breaks(
        "D137",
        "a query that begins inside a chunk has no virtual sequence for its end",
        (
            "fastattn.local:plan",
            "num_chunks = (max(longest_query, 1) + chunk_size - 2) // chunk_size + 1",
            "num_chunks = -(-max(longest_query, 1) // chunk_size)",
        ),
    ),
    *breaks(
        "D137 D138",
        "the size of a plan is read from the lengths",
        (
            "fastattn.local:plan",
            "columns = min(chunk_size // block_size, block_table.shape[1])",
            "columns = min(chunk_size // block_size, -(-int(batch.seq_lens.max()) // block_size))",
        ),
    ),
    *breaks(
        "D133 D140",
        "window layers read the blocks of the others",
        (
            "twinattn.engine.window_pool:WindowPool.translate_batch",
            "translated = self.refresh(batch.device)[block_table.masked_fill(outside, 0)]",
            "translated = block_table % self.num_blocks",
        ),
    ),
    *breaks(
        "D140",
        "all layers have pools of one size",
        (
            "twinattn.engine.layers:Layer.pool_blocks",
            "        if not self.mask.reach:\n            return num_blocks",
            "        if True:\n            return num_blocks",
        ),
    ),
    # --- speculation ---
    *breaks(
        "D142 D223",
        "a window counts nodes, not depths",
        (
            "refattn.masks:positions",
            " + plan.depths[i, :num_nodes]",
            " + torch.arange(num_nodes)",
        ),
        ("fastattn.kernels.cpu.schedule:branches_of", "depths[mine, None] - depths,", "node[mine, None] - node,"),
    ),
    *breaks(
        "D143",
        "no block is cut off",
        (
            "refattn.speculative:plan",
            "sliding_window.plan(all_nodes, window_size=(left, 0)",
            "sliding_window.plan(all_nodes, window_size=(-1, 0)",
        ),
        (
            "fastattn.speculative:plan",
            "keys, first_keys = trimmed.batch, trimmed.first_keys",
            "keys, first_keys = batch, torch.zeros_like(batch.seq_lens)",
        ),
    ),
    *in_both(
        "D144",
        "a block of drafts is causal",
        "speculative:plan",
        "return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)",
        "return chunked_prefill.plan(batch, block_size=block_size, causal=True, window_size=window_size)",
    ),
    *in_both(
        "D144",
        "a chain is not causal",
        "speculative:plan",
        "return chunked_prefill.plan(batch, block_size=block_size, causal=causal, window_size=window_size)",
        "return chunked_prefill.plan(batch, block_size=block_size, causal=False, window_size=window_size)",
    ),
    *breaks(
        "D145 D151",
        "the query rows are the oldest nodes",
        (
            "refattn.masks:visible_in_trees",
            "ancestors[len(ancestors) - (q1 - q0) :]",
            "ancestors[: q1 - q0]",
        ),
        (
            "fastattn.kernels.cpu.schedule:branches_of",
            "mine = slice(num_nodes - (q1 - q0), num_nodes)",
            "mine = slice(0, q1 - q0)",
        ),
    ),
    *breaks(
        "D146 D148 D156 D149",
        "a node sees its parent only",
        (
            "refattn.masks:tree",
            "            visible[node] = visible[parent]",
            "            visible[node, parent] = True",
        ),
        (
            "fastattn.kernels.torch_ops.metadata:draw_trees",
            "        ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))",
            "        if _ == 0:\n"
            "            ancestors = ancestors | ancestors.gather(1, above[..., None].expand_as(ancestors))",
        ),
    ),
    *breaks(
        "D148 D156",
        "siblings see each other",
        (
            "refattn.masks:visible_in_trees",
            "shown[:, seq_len - len(ancestors) :] &= ancestors[len(ancestors) - (q1 - q0) :]",
            "pass",
        ),
        (
            "fastattn.kernels.cpu.attention:tree",
            "bias = bias.masked_fill_(~branches.seen, -torch.inf)",
            "bias = bias.masked_fill_(branches.distance < 0, -torch.inf)",
        ),
    ),
    *breaks(
        "D147",
        "the newest key of the context is hidden",
        (
            "refattn.masks:visible_in_trees",
            "    shown[:, seq_len - len(ancestors) :] &= ",
            "    first_node = seq_len - len(ancestors)\n    shown[:, max(0, first_node - 1) : first_node] = False\n    shown[:, first_node:] &= ",
        ),
        (
            "fastattn.speculative:plan",
            "prefix = replace(keys, seq_lens=keys.seq_lens - trees.lens)",
            "prefix = replace(keys, seq_lens=(keys.seq_lens - trees.lens - 1).clamp(min=0))",
        ),
    ),
    *breaks(
        "D148",
        "the parent is the first node that is seen",
        (
            "refattn.speculative:parents_from_mask",
            "parents.append(max(seen, default=-1))",
            "parents.append(min(seen, default=-1))",
        ),
        (
            "fastattn.speculative:parents_from_mask",
            "parents = torch.where(above, node, -1).amax(-1) if w else node",
            "parents = torch.where(above, node, w).amin(-1) % w - (~above.any(-1)).int() if w else node",
        ),
    ),
    *breaks(
        "D149",
        "only the tree counts",
        (
            "refattn.masks:visible_in_trees",
            "    shown[:, seq_len - len(ancestors) :] &= ",
            "    shown[:, : seq_len - len(ancestors)] = False\n    shown[:, seq_len - len(ancestors) :] &= ",
        ),
        (
            "fastattn.kernels.cpu.attention:tree",
            "return _with_sinks(*_merge(before, (out, lse)), options.sinks, plan.whole)",
            "return _with_sinks(out, lse, options.sinks, plan.whole)",
        ),
    ),
    *breaks(
        "D150",
        "rejected drafts stay in the sequence",
        (
            "refattn.steps:accepted_batch",
            "        seq_lens=batch.seq_lens - trees.lens + lens,",
            "        seq_lens=batch.seq_lens,",
        ),
    ),
    *breaks(
        "D152",
        "every draft is accepted",
        (
            "refattn.speculative:accept",
            "agrees = branches[parent] and tokens[node] == wanted[parent]",
            "agrees = branches[parent]",
        ),
        (
            "fastattn.speculative:accept",
            "differs = (above >= 0) &",
            "differs = (above < -1) &",
        ),
    ),
    *breaks(
        "D152",
        "nothing is found by look-up",
        ("twinattn.engine.speculation:NGram.propose", "        return _merge(found, nodes)", "        return None"),
    ),
    *breaks(
        "D152",
        "a draft model drafts nothing",
        (
            "twinattn.engine.speculation:DraftModel.propose",
            "        return _merge([request.output_ids], nodes)",
            "        return None",
        ),
    ),
    *breaks(
        "G229",
        "a draft may be as long as it likes",
        ("twinattn.engine.speculation:check_draft", "if max(draft.depths) > depth:", "if False:"),
    ),
    *breaks(
        "G229",
        "a draft has tokens that the model does not know",
        ("twinattn.engine.speculation:check_draft", "if not 0 <= token < vocab_size]", "if not 0 <= token]"),
    ),
    *breaks(
        "G229",
        "a wrong draft ends the step",
        ("twinattn.engine.speculation:Drafting.add", "                wrong[request] = error", "                raise"),
    ),
    *breaks(
        "G229",
        "a drafter gets the engine's own list",
        ("twinattn.engine.speculation:Drafting._propose", "[*request.tokens]", "request.tokens"),
    ),
    *breaks(
        "G229",
        "a drafter may lack what it likes",
        ("twinattn.engine.arguments:check_drafter", "if isinstance(drafter, type) or missing:", "if False:"),
    ),
    # --- several samples ---
    *breaks(
        "G228",
        "all samples write into one block",
        (
            "twinattn.engine.scheduler:Scheduler._allocate_blocks",
            "is_shared = self._writes_to_shared(request)",
            "is_shared = False",
        ),
    ),
    *breaks(
        "G228",
        "a block of one's own is empty",
        (
            "twinattn.engine.layer_pools:LayerPools.copy_blocks",
            'self._twin.kv_cache.copy_blocks(self._pools_of(layer), to_device(pairs, self._where["device"]))',
            "pass",
        ),
    ),
    *breaks(
        "G228",
        "the pool does not count the samples",
        ("twinattn.engine.scheduler:Scheduler.fork", "self.pool.share(other.blocks)", "pass"),
    ),
    *breaks(
        "G228",
        "all samples have the random numbers of the first",
        ("twinattn.engine.sampling:SamplingParams.of_sample", "seed=self.seed + index", "seed=self.seed"),
    ),
    *breaks(
        "G228",
        "a stop text of one sample ends another's",
        (
            "twinattn.engine.engine_thread:Answer.cut",
            'self.held.pop(index, "") + text',
            '"".join(self.held.values()) + text',
        ),
    ),
    # --- latents ---
    *breaks(
        "D153",
        "rotary keys lie before latents",
        (
            "refattn.mla:write",
            "key_cache, value_cache = pages[..., :rank], pages[..., rank:width]",
            "key_cache, value_cache = pages[..., width - rank : width], pages[..., : width - rank]",
        ),
        (
            "fastattn.mla:write",
            "key_cache=pages[..., :rank], value_cache=pages[..., rank:width]",
            "key_cache=pages[..., width - rank : width], value_cache=pages[..., : width - rank]",
        ),
    ),
    *breaks(
        "D154",
        "values are the last elements of a row",
        (
            "refattn.keys:read",
            "yield key, key[..., : keys.latent_rank]",
            "yield key, key[..., -keys.latent_rank :]",
        ),
    ),
    *breaks(
        "D154 D155",
        "the rotary part of a query does not count",
        (
            "refattn.mla:attention",
            "    return attend_to(query, keys,",
            "    query = torch.cat([query[..., :latent_rank], 0 * query[..., latent_rank:]], dim=-1)\n"
            "    return attend_to(query, keys,",
        ),
        (
            "fastattn.mla:attention",
            "return dispatch.attend(",
            "query = torch.cat([query[..., :latent_rank], 0 * query[..., latent_rank:]], dim=-1)\n"
            "    return dispatch.attend(",
        ),
    ),
    *breaks(
        "D155",
        "absorbing loses the rotary part",
        ("refattn.mla:absorb", "query[..., nope:]], dim=-1)", "0 * query[..., nope:]], dim=-1)"),
        ("fastattn.mla:absorb", "absorbed[..., rank:] = query[..., nope:]", "absorbed[..., rank:] = 0.0"),
    ),
    *breaks(
        "D157",
        "the context is read from other slots",
        (
            "refattn.mla:plan_prefill",
            " * block_size + j % block_size",
            " * block_size",
        ),
        (
            "fastattn.mla:plan_prefill",
            "block_size=block_size).clamp(min=0)",
            "block_size=block_size).clamp(min=0) // block_size * block_size",
        ),
    ),
    *breaks(
        "D158 E171",
        "new tokens see one another in both directions",
        (
            "refattn.mla:plan_prefill",
            "own = rows(query_lens, batch.max_query_len, contexts, causal=True)",
            "own = rows(query_lens, batch.max_query_len, contexts, causal=False)",
        ),
        (
            "fastattn.mla:plan_prefill",
            "batch.max_query_len, contexts, causal=True)",
            "batch.max_query_len, contexts, causal=False)",
        ),
    ),
    *breaks(
        "D158 E171",
        "keys have no rotary part",
        (
            "refattn.mla:_keys_and_values",
            '"s rope -> s h rope", h=len(to_key))',
            '"s rope -> s h rope", h=len(to_key)) * 0',
        ),
        ("fastattn.mla:_keys_and_values", "key[..., nope:] = rope_key[:, None]", "key[..., nope:] = 0.0"),
    ),
    *breaks(
        "E172 D157",
        "a chunk of the context has a causal mask",
        (
            "refattn.mla:plan_prefill",
            "rows(counts, size, [start] * batch.num_seqs, causal=False)",
            "rows(counts, size, [start] * batch.num_seqs, causal=True)",
        ),
        (
            "fastattn.mla:plan_prefill",
            "rows(counts, ends, size, begins, causal=False)",
            "rows(counts, ends, size, begins, causal=True)",
        ),
    ),
    # --- the engine ---
    *breaks(
        "A41",
        "no prefix is found",
        (
            "twinattn.engine.block_pool:BlockPool.find",
            "            if block is None:\n                break",
            "            if True:\n                break",
        ),
    ),
    *breaks(
        "A44 D160",
        "the table of the first step stays in the buffer",
        (
            "twinattn.engine.cuda_graphs:_Step._fill",
            "self.block_table[:count, :columns] = to_device(torch.tensor(table",
            "self.block_table[:count, :columns] = self.block_table[:count, :columns] if self.replay else"
            " to_device(torch.tensor(table",
        ),
    ),
    *breaks(
        "A45 D169",
        "padding requests have a token in the last block",
        (
            "twinattn.engine.cuda_graphs:_Step",
            (
                "torch.full((rows, columns), -1,",
                "*(0, *ends, *[ends[-1]] * len(unused)),",
                "*(*tokens.seq_lens, *unused),",
            ),
            (
                "torch.full((rows, columns), len(server.pool.users) - 1,",
                "*(0, *ends, *range(ends[-1] + 1, ends[-1] + 1 + len(unused))),",
                "*(*tokens.seq_lens, *[1 for _ in unused]),",
            ),
        ),
    ),
    *breaks(
        "A45",
        "padding rows have slots",
        ("fastattn.kernels.torch_ops.metadata:slot_mapping", "nowhere = padding | (place < 0)", "nowhere = place < 0"),
    ),
    *breaks(
        "A44",
        "the next decode has its new block one token late",
        (
            "twinattn.engine.decode_rows:DecodeRows.next",
            "for row in (last % block_size == 0).nonzero()",
            "for row in (last % block_size == 1).nonzero()",
        ),
    ),
    *breaks(
        "A44",
        "tables of a captured step with prompts are as short as the shortest",
        (
            "twinattn.engine.cuda_graphs:_Step._fill",
            "columns = min(max(map(len, tokens.block_tables)), self.shape.columns)",
            "columns = min(min(map(len, tokens.block_tables)), self.shape.columns)",
        ),
    ),
    *breaks(
        "A45 D169",
        "padding rows of a decode ahead have a token",
        (
            "twinattn.engine.cuda_graphs:_Inputs",
            (
                "memory = torch.zeros(sum(sizes), dtype=torch.int32,",
                "out=self.cu_seqlens_q).clamp_(max=count)",
                "mine[:count], mine[count:] = given, 0",
            ),
            (
                "memory = torch.full((sum(sizes),), 25, dtype=torch.int32,",
                "out=self.cu_seqlens_q)",
                "mine[:count], mine[count:] = given, 1",
            ),
        ),
    ),
    *breaks(
        "B69",
        "steps are recorded on a CPU, too",
        (
            "twinattn.engine.cuda_graphs:CudaGraphs.can_record",
            'return engine.model.device.type == "cuda" and engine.twin.package is fastattn',
            "return engine.twin.package is fastattn",
        ),
    ),
    *breaks(
        "D167 D162 C114",
        "the lengths of the first step stay in the buffer",
        (
            "twinattn.engine.cuda_graphs",
            ("        self.numbers.copy_(to_device(torch.tensor(numbers", "(self.seq_lens, rows.seq_lens)"),
            (
                "        if self.replay is None:\n            self.numbers.copy_(to_device(torch.tensor(numbers",
                "(self.seq_lens, self.seq_lens[:count].clone() if self.seq_lens.any() else rows.seq_lens)",
            ),
        ),
    ),
    # --- which kernel ---
    *breaks(
        "A13",
        "heads of any size pass",
        (
            "fastattn.kernels.triton:unsupported_reason",
            "elif max(problem.head_size, problem.value_head_size) > LARGEST_HEAD:",
            "elif False:",
        ),
    ),
    *breaks(
        "B52",
        "nothing is said of a kernel that cannot",
        (
            "fastattn.doctor:_cell",
            'Text("–" if _has_none(reason) else f"no {_note(notes, reason)}", style="dim")',
            'Text("–", style="dim")',
        ),
    ),
    *breaks(
        "B52",
        "a kernel that runs in part passes for one that runs",
        ("fastattn.doctor:_state", "    if first is None:", "    if None in (first, *others):"),
    ),
    *breaks(
        "A14",
        "the last kernel that can is chosen",
        (
            "fastattn.kernels.order:_choose",
            "    for name in names:\n        reasons",
            "    for name in names[::-1]:\n        reasons",
        ),
    ),
    *breaks(
        "A14",
        "FlashAttention-4 goes first over pages of any size",
        ("fastattn.kernels.order", "and problem.block_size == FA3_PAGE,", "and problem.block_size == 0,"),
    ),
    *breaks(
        "D129",
        "FlashAttention-4 does not see the newest key",
        (
            "fastattn.kernels.flash.fa4:paged",
            "where = dict(seqused_k=side_by_side(batch.seq_lens), page_table",
            "where = dict(seqused_k=side_by_side(batch.seq_lens - 1), page_table",
        ),
    ),
    *breaks(
        "D129",
        "FlashAttention-3 does not see the newest key",
        (
            "fastattn.kernels.flash.fa3:paged",
            "    loads_tiles = key_cache.shape[1] >= SMALLEST_TILE",
            '    where["seqused_k"] = where["seqused_k"] - 1\n    loads_tiles = key_cache.shape[1] >= SMALLEST_TILE',
        ),
    ),
    *breaks(
        "B70",
        "each layer makes a schedule",
        (
            "fastattn.kernels.schedule:schedule_of",
            "    return known[1]",
            "    return schedules.pop((name, where))[1]",
        ),
    ),
    *breaks(
        "B70",
        "each layer works its launches out anew",
        (
            "fastattn.kernels.triton.attention:bind_attend",
            "    return answer, lse, launches.attend",
            "    return answer, lse, attend_to_keys",
        ),
    ),
    *breaks(
        "B71",
        "all captures share a schedule",
        ("fastattn.kernels.schedule:where_called", "    capture = _capture()", '    capture = ("capture", 0)'),
    ),
    *breaks(
        "B72",
        "the splits past the tuning's number are dropped",
        (
            "fastattn.kernels.triton.attention:attend_levels",
            "launch_reduction(parts, ",
            "launch_reduction(parts[: sum(tuning.splits for tuning in tunings)], ",
        ),
    ),
    *breaks(
        "D156",
        "the context before a tree does not count",
        (
            "fastattn.kernels.flash.recompute:attend_to_latent_tree",
            "before = attend(query, keys.cache, plan.prefix,",
            "before = attend(query, keys.cache, plan.whole,",
        ),
    ),
    *breaks(
        "E173",
        "values are padded before their first element",
        (
            "fastattn.kernels.flash:pad_values",
            "pad(value, (0, head_size - value.shape[-1]))",
            "pad(value, (head_size - value.shape[-1], 0))",
        ),
    ),
    *breaks(
        "E174",
        "FlashAttention-3 refuses values of another size",
        (
            "fastattn.kernels.flash.fa3",
            "UNEQUAL_HEADS = ((64, 128), (64, 256), (192, 128))",
            "UNEQUAL_HEADS = ((64, 128), (64, 256))",
        ),
    ),
    *breaks(
        "E175",
        "FlashAttention-2 is not asked for its log-sum-exp",
        (
            "fastattn.kernels.flash.fa2:varlen",
            "        return_attn_probs=True,  # this is how to get the LSE",
            "        return_attn_probs=False,",
        ),
    ),
    *breaks(
        "C227",
        "a norm of its own is left out",
        (
            "refattn.differential:attention",
            "check_normed(norm(difference), difference)",
            "check_normed(difference, difference)",
        ),
        (
            "fastattn.kernels.problem:Subtraction.finish",
            "check_normed(self.norm(difference), difference)",
            "check_normed(difference, difference)",
        ),
    ),
    *breaks(
        "E176",
        "a prompt over latents takes no notice of batch invariance",
        ("fastattn.mla:prefill", "    if options.batch_invariant and plan.own.batch.num_seqs:", "    if False:"),
    ),
    *breaks(
        "E176",
        "an engine computes keys and values under batch invariance",
        (
            "twinattn.engine.storages:LatentStorage.expands_prefills",
            "        return not self.batch_invariant\n",
            "        return True\n",
        ),
    ),
    *breaks(
        "E178",
        "what cannot be imported is there",
        (
            "fastattn.kernels.device:cannot_import",
            '        return f"the package {package} can\'t be imported: {error}"',
            "        return None if error else None",
        ),
    ),
    # --- intervals, and selected keys ---
    *breaks(
        "F218",
        "a window hides no key of a span",
        (
            "refattn.interval:image_spans",
            "last = end if whole_spans or right < 0 else min(end, position + right)",
            "last = end",
        ),
        (
            "fastattn.interval:image_spans",
            "reach = end if whole_spans or right < 0 else end.minimum(position[:, None] + right)",
            "reach = end",
        ),
    ),
    *breaks(
        "F218",
        "images are seen causally where the window is shorter than they are",
        (
            "refattn.interval:image_spans",
            "                    first = min(first, begin) if whole_spans else first",
            "                    first = min(first, begin)",
        ),
        ("fastattn.interval:image_spans", "        if whole_spans:", "        if True:"),
    ),
    *breaks(
        "F218",
        "a prefix ends one token late",
        ("refattn.interval:prefix_lm", "lasts[row] = prefix - 1 if 0 <=", "lasts[row] = prefix if 0 <="),
        (
            "fastattn.interval:prefix_lm",
            "position.maximum(prefix_lens[sequence] - 1)",
            "position.maximum(prefix_lens[sequence])",
        ),
    ),
    *breaks(
        "F219",
        "the last key of an interval is hidden",
        (
            "refattn.masks:interval",
            "    return (first <= keys) & (keys <= last)",
            "    return (first <= keys) & (keys < last)",
        ),
        (
            "fastattn.kernels.cpu.attention:_bias_in",
            "bias.masked_fill_((keys < first) | (keys > last), -torch.inf)",
            "bias.masked_fill_((keys < first) | (keys >= last), -torch.inf)",
        ),
        (
            "fastattn.kernels.triton.masks:step_in_intervals",
            "(j[None, :] <= sight.last_of_rows[:, None])",
            "(j[None, :] < sight.last_of_rows[:, None])",
        ),
    ),
    *breaks(
        "F219",
        "queries of one tile see what the first of them sees",
        (
            "fastattn.kernels.triton.masks:all_visible_in_intervals",
            "tl.minimum(run.end, tl.min(tl.where(tile.is_row, sight.last_of_rows, run.end), 0) + 1)",
            "run.end",
        ),
    ),
    *breaks(
        "F219",
        "a chunk of growing intervals begins a key late",
        (
            "fastattn.kernels.cpu.attention:_segments",
            "context = len(k) - (rows.stop - rows.start)  # keys",
            "context = len(k) - (rows.stop - rows.start) - 1  # keys",
        ),
    ),
    *breaks(
        "F193",
        "keys between the intervals of a tile are read",
        (
            "fastattn.kernels.triton.masks:step_in_intervals",
            "tl.max((seen & tile.is_row[:, None]).to(tl.int32), 0) > 0",
            "tl.max((seen & tile.is_row[:, None]).to(tl.int32), 0) >= 0",
        ),
        (
            "refattn.attention:attend",
            "    v = value.to(compute).masked_fill(is_unseen, 0.0)",
            "    v = value.to(compute)",
        ),
    ),
    *breaks(
        "F194",
        "a chunk may end inside a span",
        (
            "refattn.checks_of_steps:check_intervals",
            "    wrong = (first_visible[:used] <= last) & (last >= ends)",
            "    wrong = (first_visible[:used] <= last) & (last > ends + 9)",
        ),
    ),
    *breaks(
        "F195",
        "the scale of a token follows its own quantized values",
        (
            "refattn.sparse:write",
            "        at_scale = block_size * size + row * SCALE_BYTES",
            "        at_scale = (row + 1) * size + row * SCALE_BYTES",
        ),
        (
            "fastattn.kernels.torch_ops.sparse:_parts",
            "(block, SCALE_BYTES, 1), first + p * size)",
            "(block, SCALE_BYTES, 1), first + size)",
        ),
    ),
    *breaks(
        "F195",
        "a slot of -1 is written",
        ("refattn.sparse:write", "        if slot == -1:", "        if slot == -2:"),
        (
            "fastattn.kernels.torch_ops.sparse:write_index",
            "    written = slot_mapping >= 0",
            "    written = slot_mapping >= -1",
        ),
        (
            "fastattn.kernels.triton.index_keys:_write_index_kernel",
            "    is_written = slot >= 0",
            "    is_written = slot >= -1",
        ),
    ),
    *breaks(
        "F196",
        "the ReLU comes after the sum",
        (
            "refattn.sparse:scores",
            'einsum(weights[q0:q1].float(), products.relu(), "t h, t h s -> t s")',
            'einsum(weights[q0:q1].float(), products, "t h, t h s -> t s").relu()',
        ),
        (
            "fastattn.kernels.torch_ops.sparse:score_index",
            "weights[q0 + row] @ (queries[q0 + row] @ key).relu_()",
            "(weights[q0 + row] @ (queries[q0 + row] @ key)).relu_()",
        ),
        (
            "fastattn.kernels.triton.index_keys:_score",
            "positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)",
            "positive = products",
        ),
    ),
    *breaks(
        "F196",
        "the last head is left out of the sum",
        (
            "fastattn.kernels.triton.index_keys:_read_query",
            "    is_head = (heads < queries.HEADS) & is_row",
            "    is_head = (heads < queries.HEADS - 1) & is_row",
        ),
        (
            "refattn.sparse:scores",
            'products = einsum(query[q0:q1].float(), key.float(), "t h d, s d -> t h s")',
            'products = einsum(query[q0:q1].float(), key.float(), "t h d, s d -> t h s"); products[:, -1] = 0.0',
        ),
    ),
    *breaks(
        "F197",
        "ties go to the higher position",
        (
            "refattn.sparse:select",
            "-numbers[j], j))[:topk]",
            "-numbers[j], -j))[:topk]",
        ),
        (
            "fastattn.kernels.torch_ops.sparse:select",
            "at.cumsum(1) <= topk - above.sum(1, keepdim=True)",
            "at.flip(1).cumsum(1).flip(1) <= topk - above.sum(1, keepdim=True)",
        ),
        (
            "fastattn.kernels.triton.sparse:_write_positions",
            "(is_tie & (place <= wanted))",
            "(is_tie & (place > ties + (total >> 16) - wanted))",
        ),
    ),
    *breaks(
        "F197",
        "a sample that misleads decides what is selected",
        (
            "fastattn.kernels.triton.sparse:_select_kernel",
            "        are_all = (total >= topk) | (lowest",
            "        are_all = (total >= 0) | (lowest",
        ),
    ),
    *breaks(
        "F197",
        "-0 is less than 0",
        (
            "fastattn.kernels.torch_ops.sparse:_in_order",
            "bits = numbers.masked_fill(numbers == 0, 0.0).view(torch.int32)",
            "bits = numbers.contiguous().view(torch.int32)",
        ),
        (
            "fastattn.kernels.triton.sparse:_in_order",
            "tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)",
            "numbers.to(tl.int32, bitcast=True)",
        ),
    ),
    *breaks(
        "F197",
        "what is no key is selected where there are too few",
        ("refattn.sparse:select", "if score != -torch.inf]", "if score == score]"),
        ("fastattn.kernels.torch_ops.sparse:select", "is_key = numbers != -torch.inf", "is_key = numbers == numbers"),
        (
            "fastattn.kernels.triton.sparse:_write_positions",
            '        is_key = numbers != float("-inf")',
            "        is_key = j < row.width",
        ),
    ),
    *breaks(
        "F198",
        "-1 is the last slot of the pool, and is followed",
        ("refattn.sparse:slots", "                if j >= 0:", "                if j >= -1:"),
        (
            "fastattn.kernels.torch_ops.sparse:selected_slots",
            "    is_key = (positions >= 0) & (pos",
            "    is_key = (positions >= -1) & (pos",
        ),
    ),
    *breaks(
        "F198",
        "a position past the end is followed on a device",
        (
            "fastattn.kernels.torch_ops.sparse:selected_slots",
            "(positions < batch.seq_lens[sequence][:, None])",
            "(positions < 2**31)",
        ),
    ),
    *breaks(
        "F198",
        "a position past the end passes on a host",
        (
            "refattn.index_keys:check_selected",
            "    wrong = (positions[:used] < -1) | (positions[:used] >= ends)",
            "    wrong = positions[:used] < -1",
        ),
    ),
    *breaks(
        "F199",
        "slots are taken for blocks of more than one token",
        (
            "refattn.sparse:by_token",
            "    return pool.flatten(0, 1).unsqueeze(1)",
            "    return pool.transpose(0, 1).flatten(0, 1).unsqueeze(1)",
        ),
        (
            "fastattn.sparse:by_token",
            "    return pool.flatten(0, 1).unsqueeze(1)",
            "    return pool.transpose(0, 1).flatten(0, 1).unsqueeze(1)",
        ),
    ),
    *breaks(
        "F199",
        "a query sees what is left of another's list",
        (
            "fastattn.kernels.torch_ops.sparse:plan_selected",
            "    return rows, is_key.sum(1, dtype=torch.int32), table",
            "    return rows, (positions >= -1).sum(1, dtype=torch.int32), table",
        ),
        ("refattn.sparse:plan", "[len(lists[row]) for row, _ in rows]", "[min(len(lists[row]), 3) for row, _ in rows]"),
    ),
    *breaks(
        "F219",
        "without first keys the last ones are taken as they come",
        (
            "refattn.interval:_up_to",
            "lasts[row] = max(seq_len - q1 + row, int(last_visible[row]))",
            "lasts[row] = int(last_visible[row])",
        ),
        ("fastattn.interval:plan", "last_visible.maximum(position)", "last_visible"),
    ),
    *breaks(
        "F219",
        "the key of a query itself counts twice, up to it and after it",
        ("fastattn.interval:plan", "after = position.int() + 1", "after = position.int()"),
    ),
    *breaks(
        "F219",
        "what was attended to before is left out",
        (
            "fastattn.kernels.triton.merge:take_prefix",
            "    has_prefix = tile.is_row\n    if",
            "    has_prefix = tile.is_row & (tile.queries < 0)\n    if",
        ),
    ),
    *breaks(
        "F214",
        "a group has the scale of the one before it",
        ("refattn.mla:_write_packed", "= scale, rope_key[token]", "= scale.roll(1), rope_key[token]"),
        (
            "refattn.keys:read_packed",
            "groups * scales.to(wide)[..., None]",
            "groups * scales.to(wide).roll(1, -1)[..., None]",
        ),
        (
            "fastattn.kernels.torch_ops.cache:write_packed",
            "    scales[blocks, rows] = scale",
            "    scales[blocks, rows] = scale.roll(1, 1)",
        ),
        (
            "fastattn.kernels.cpu.dequantize:PackedRows.read",
            "mul_(scales.mul(256.0)",
            "mul_(scales.roll(1, -1).mul(256.0)",
        ),
        (
            "fastattn.kernels.triton.quantized:scale_groups",
            "scales + rows[:, None] + at[None, :] * stride,",
            "scales + rows[:, None] + (GROUPS - 1 - at)[None, :] * stride,",
        ),
        (
            "fastattn.kernels.triton.cache:_write_packed_kernel",
            "place * scales.strides[1] + group * scales.strides[2]",
            "place * scale_strides[1] + (GROUPS - 1 - group) * scale_strides[2]",
        ),
    ),
    *breaks(
        "F214",
        "zeros are divided by zero",
        ("refattn.rounding:group_scales", ".clamp(min=SMALLEST_SCALE)", ""),
        ("fastattn.kernels.torch_ops.cache:write_packed", ".clamp_(min=SMALLEST_SCALE)", ""),
        (
            "fastattn.kernels.triton.cache:_write_packed_kernel",
            "tl.full(largest.shape, 448.0, tl.float32)), SMALLEST)",
            "tl.full(largest.shape, 448.0, tl.float32)), 0.0)",
        ),
    ),
    *breaks(
        "F214",
        "what follows a list of slots is handed on",
        (
            "fastattn.kernels.flash.slots:_slots_kernel",
            "(at < tl.load(seq_lens + sequence)) & (at < table_columns)",
            "at < table_columns",
        ),
    ),
    *breaks(
        "F228",
        "rows of int4 are turned, but not to their length",
        ("refattn.rounding:hadamard", "* size**-0.5", "* x.shape[-1] ** -0.25"),
        ("fastattn.kernels.torch_ops.four_bits:_matrix", "* size**-0.5", "* size**-0.25"),
        ("fastattn.kernels.triton.turned_rows:turn", "BLOCK**-0.5", "BLOCK**-0.25"),
    ),
    *breaks(
        "F228",
        "queries are not turned",
        ("fastattn.kernels.cpu.four_bits:attention", "turn(query.to(compute)) if is_turned else", ""),
    ),
    *breaks(
        "F228",
        "outputs are not turned back",
        ("refattn.rounding:from_int4", "return hadamard(", "return ("),
        ("fastattn.kernels.cpu.four_bits:attention", "(turn(out) if is_turned else out)", "out"),
        ("fastattn.kernels.triton.four_bits:turned_back", "keys.VALUE_STAGES", "0"),
    ),
    *breaks(
        "F228",
        "the halves of a byte change places",
        ("refattn.rounding:_packed", "low | high << 4", "high | low << 4"),
        ("fastattn.kernels.torch_ops.four_bits:_pairs", "byte % 16, byte // 16", "byte // 16, byte % 16"),
        ("fastattn.kernels.triton.turned_rows:_write_int4_kernel", "even | (odd << 4)", "odd | (even << 4)"),
        ("fastattn.kernels.torch_ops.four_bits:_to_int4", "16 * quantized[..., 1::2]", "16 * quantized[..., ::2]"),
    ),
    *breaks(
        "F228",
        "values have the scales of keys",
        ("refattn.keys:_read_four_bits", "from_int4(value, of_value", "from_int4(value, of_key"),
        (
            "fastattn.kernels.triton.four_bits:load_int4_values",
            "keys.value_scales, keys.value_scale_strides",
            "keys.key_scales, keys.key_scale_strides",
        ),
    ),
    *breaks(
        "F228",
        "the zero point is not taken off",
        ("refattn.rounding:from_int4", "(_unpacked(quantized) - zero)", "_unpacked(quantized)"),
        ("fastattn.kernels.torch_ops.four_bits:numbers_of_int4", "& LARGEST)[..., None], out", "& 0)[..., None], out"),
    ),
    *breaks(
        "F228",
        "a row of one sign has no zero in its range",
        ("refattn.rounding:to_int4", ".clamp(min=0.0)", ""),
        ("fastattn.kernels.torch_ops.four_bits:_to_int4", "high.clamp(min=0)", "high"),
    ),
    *breaks(
        "F228",
        "values are cut, not rounded",
        ("refattn.rounding:to_int4", "(turned / scale).round()", "(turned / scale).trunc()"),
        ("fastattn.kernels.torch_ops.four_bits:_to_int4", "(turned / scale).round_()", "(turned / scale).trunc_()"),
    ),
    *breaks(
        "F229",
        "the number for all groups is left out",
        ("refattn.rounding:from_nvfp4", "* of_all", ""),
        (
            "fastattn.kernels.torch_ops.four_bits:numbers_of_nvfp4",
            "scales.to(out.dtype) * torch",
            "scales.to(out.dtype) + 0 * torch",
        ),
    ),
    *breaks(
        "F229",
        "elements are divided by the scale before it is rounded",
        ("refattn.rounding:to_nvfp4", "groups / (scale.float() * of_all)", "groups / (largest / 6.0)"),
        (
            "fastattn.kernels.torch_ops.four_bits:_to_nvfp4",
            "groups / (scale.float() * of_all)",
            "groups / (groups.abs().amax(-1, keepdim=True) / 6.0)",
        ),
    ),
    *breaks(
        "F229",
        "a tie goes up",
        ("refattn.rounding:to_nvfp4", "(2 * size).round()", "(2 * size + 0.5).floor()"),
        (
            "fastattn.kernels.torch_ops.four_bits:_to_nvfp4",
            "bucketize(size, edges)",
            "bucketize(size, edges, right=True)",
        ),
    ),
    *breaks(
        "F215",
        "a prefix is found whatever its images are",
        (
            "twinattn.engine.block_pool:block_key",
            "if span[0] < end and span[1] >= start)",
            "if span[0] > end > span[1])",
        ),
    ),
    *breaks(
        "F215",
        "a chunk ends inside a span",
        (
            "twinattn.engine.request:Request.cut",
            "for first, last in self.spans if first < end <= last), count)",
            "for first, last in self.spans if first > end > last), count)",
        ),
    ),
    *breaks(
        "F215",
        "only the first span of a prompt is seen",
        (
            "twinattn.engine.planner:StepPlanner.plan_spans",
            "rows = [[*its_spans, *",
            "rows = [[*its_spans[:1], *[(-1, -1)] * len(its_spans[1:]), *",
        ),
    ),
    *breaks(
        "F216",
        "index keys are written where the next token's belong",
        (
            "twinattn.engine.storages:SelectedLatentStorage.select",
            "twin.sparse.write(tokens.key, cache[1], slot_mapping)",
            "twin.sparse.write(tokens.key, cache[1], slot_mapping.roll(1))",
        ),
    ),
    *breaks(
        "F216",
        "every key is selected",
        (
            "twinattn.engine.storages:SelectedLatentStorage.select",
            "return twin.sparse.select(scores, min(self.topk, scores.shape[1]))",
            "return twin.sparse.select(scores, scores.shape[1])",
        ),
    ),
    *breaks(
        "F235",
        "entries are rotated as if each was the first",
        (
            "twinattn.engine.compressed_storage:CompressedStorage._write_entries",
            "compressed_modules.finish(module, new, plan.positions)",
            "compressed_modules.finish(module, new, plan.positions * 0)",
        ),
    ),
    *breaks(
        "F235",
        "all entries go to the first slot",
        (
            "twinattn.engine.compressed_storage:CompressedStorage._write_entries",
            "twin.mla.write(new, new[:, :0], entries, plan.slots)",
            "twin.mla.write(new, new[:, :0], entries, plan.slots.clamp(max=0))",
        ),
    ),
    *breaks(
        "F235",
        "every entry is selected",
        (
            "twinattn.engine.compressed_storage:CompressedStorage.compress",
            "min(self.topk, scores.shape[1])",
            "scores.shape[1]",
        ),
    ),
    *breaks(
        "F217",
        "packed rows have one scale",
        (
            "twinattn.engine.kv_cache_dtype:_pack",
            "return replace(storage, dtype=torch.uint8)",
            "return replace(storage, dtype=torch.float8_e4m3fn)",
        ),
    ),
    *breaks(
        "F217",
        "the scales of a packed row are not counted",
        (
            "twinattn.engine.storages:LatentStorage.bytes_per_token",
            "return packed_size(self.latent_rank, self.rope_size)",
            "return self.latent_rank + 2 * self.rope_size",
        ),
    ),
    # --- layers that keep a state ---
    *breaks(
        "R213",
        "a rank begins with what is before all of them",
        (
            "refattn.context_parallel:recurrent_attention",
            '"hv dv j, hv j dk -> hv dv dk") + added[rank, i]',
            '"hv dv j, hv j dk -> hv dv dk") + added[rank, i] * (rank + 1 == group.size)',
        ),
        (
            "fastattn.context_parallel:recurrent_attention",
            "if rank == group.rank:\n            _put(states, plan.state_indices, is_written, state)",
            "if not rank:\n            _put(states, plan.state_indices, is_written, state)",
        ),
    ),
    *breaks(
        "R213",
        "the convolution of a rank begins with the inputs before all of them",
        (
            "refattn.context_parallel:recurrent_convolve",
            "if rank == group.rank:\n                states[slot] = last",
            "if not rank:\n                states[slot] = last",
        ),
        (
            "fastattn.context_parallel:recurrent_convolve",
            "if rank == group.rank:\n            _put(states, plan.state_indices, is_written, last)",
            "if not rank:\n            _put(states, plan.state_indices, is_written, last)",
        ),
    ),
    *breaks(
        "R213",
        "a process gets the maps of the others in another order",
        (
            "refattn.ranks:DistributedGroup.all_gather",
            "torch.cat(parts.view(self.size, *part.shape).unbind(), dim)",
            "torch.cat(parts.view(self.size, *part.shape).flip(0).unbind(), dim)",
        ),
    ),
    *in_both(
        "R213",
        "maps without what came before them",
        "recurrent:compose",
        " + after.added",
        " * 0 + after.added",
    ),
    *breaks(
        "R201",
        "a sequence that begins goes on from what its slot held",
        ("refattn.recurrent:_sequences", "start if has_state else None", "start"),
        (
            "fastattn.kernels.torch_ops.recurrent:_sequences",
            "    start = start.where(plan.has_initial_state, -1)",
            "    pass",
        ),
        (
            "fastattn.kernels.triton.states:find_sequence",
            "    start = tl.where(has_state, start, -1)\n",
            "",
        ),
    ),
    *breaks(
        "R201",
        "the state after the first token is kept, and not that after the last",
        ("refattn.recurrent:_sequences", "kept[-1].append(slots)", "kept[0].append(slots)"),
        (
            "fastattn.kernels.torch_ops.recurrent:_Keep.write",
            "            elif count == sequence.length:",
            "            elif count == 1:",
        ),
    ),
    *breaks(
        "R202",
        "padding is the last slot, or the first",
        ("refattn.recurrent:_sequences", "if q0 == q1 or (slots[0] if plan.per_draft else slots) < 0:", "if q0 == q1:"),
        ("fastattn.kernels.torch_ops.recurrent:_sequences", "if slot >= 0 and q1 > q0:", "if q1 > q0:"),
        (
            "fastattn.kernels.triton.states:find_sequence",
            "    slot = tl.where(has_state & (start < 0), -1, slot)",
            "    slot, start = tl.maximum(slot, 0), tl.maximum(start, 0)",
        ),
    ),
    *breaks(
        "R202",
        "a sequence without tokens has a chunk, whose last row is of the sequence before it, and writes its state",
        ("fastattn.kernels.triton.states:find_sequence", "    slot = tl.where(length > 0, slot, -1)\n", ""),
    ),
    *breaks(
        "R203",
        "value heads share a query with those far away",
        ("refattn.recurrent:attention", '"t h dk -> t (h g) dk", g=group', '"t h dk -> t (g h) dk", g=group'),
        (
            "fastattn.kernels.torch_ops.recurrent:_fold",
            "x.repeat_interleave(group, 1)[..., None]",
            "x.repeat(1, group, 1)[..., None]",
        ),
    ),
    *breaks(
        "R203",
        "what the state answers is subtracted whole",
        ("refattn.recurrent:_step", "beta[:, None] * (value - seen)", "(beta[:, None] * value - seen)"),
        (
            "fastattn.kernels.torch_ops.recurrent:_fold",
            "new = (new - state @ key if delta else new) * beta[..., None, None]",
            "new = new * beta[..., None, None] - (state @ key if delta else 0.0)",
        ),
        (
            "fastattn.kernels.triton.states:fold_token",
            "        v -= tl.sum(state * k[None, :], 1)",
            "        v -= tl.sum(state * k[None, :], 1) / 2",
        ),
    ),
    *breaks(
        "R203",
        "in a chunk, keys meet the state before it without the decays since then",
        (
            "fastattn.kernels.torch_ops.recurrent:_solve",
            "right = torch.cat([value, key * from_start * beta], dim=-1)",
            "right = torch.cat([value, key * beta], dim=-1)",
        ),
        (
            "fastattn.kernels.triton.chunks:_solve_finite",
            "(part * (rates * from_start)[:, None]).to(OPERAND)",
            "(part * rates[:, None]).to(OPERAND)",
        ),
        (
            "fastattn.kernels.triton.chunks:_solve_carefully",
            "            part *= rates[:, None] * since",
            "            part *= rates[:, None]",
        ),
    ),
    *breaks(
        "R203",
        "with a decay per channel, a key fades by the decays of the next block, too",
        ("fastattn.kernels.triton.channels:_read_logs", " & (at % BLOCK != BLOCK - 1)", ""),
    ),
    *breaks(
        "R203",
        "of two halves with decays per channel, the first ends where it did",
        ("fastattn.kernels.torch_ops.recurrent:_halves", "        after_1 *= since_2[..., -1:, :]\n", ""),
    ),
    *breaks(
        "R203",
        "NaN in a token reaches those before it in its chunk",
        ("fastattn.kernels.torch_ops.recurrent:recurrent", "or not tokens.are_finite(sequence)", "or False"),
        (
            "fastattn.kernels.triton.chunks:_dot_with_earlier",
            "    rows = tl.where(is_finite, rows, 0.0).to(OPERAND)\n",
            "    rows = rows.to(OPERAND)\n",
        ),
        (
            "fastattn.kernels.triton.chunks:_solve_carefully",
            "                part = tl.where(is_good[:, None], part, 0.0).to(OPERAND)\n",
            "                part = part.to(OPERAND)\n",
        ),
        (
            "fastattn.kernels.triton.chunks:_repair_kernel",
            "    place = tl.max(places, 0)\n    while",
            "    place = tl.max(places, 0) * 0 - 1\n    while",
        ),
    ),
    *breaks(
        "F230",
        "of the tokens before, those of entry 0 are left out",
        ("refattn.compressed:compress", "if plan.overlap and entry > 0:", "if plan.overlap and entry > 1:"),
        ("fastattn.kernels.torch_ops.compressed:compress", "part((entry - 1) * ratio", "part((entry - 2) * ratio"),
        (
            "fastattn.kernels.triton.compressed:_compress_kernel",
            "if OVERLAP and entry > 0:",
            "if OVERLAP and entry > 1:",
        ),
    ),
    *breaks(
        "F230",
        "the bias is not added to the gates",
        ("refattn.compressed:compress", "read[:, width:] + added", "read[:, width:]"),
        ("fastattn.kernels.torch_ops.compressed:compress", "gate if bias is None else gate", "gate if True else gate"),
        (
            "fastattn.kernels.triton.compressed:_add_rows",
            "            gate += tl.load(rows.bias + at, is_there, 0.0).to(tl.float32)",
            "            pass",
        ),
    ),
    *breaks(
        "F230",
        "a step of tokens that are all hidden makes the next one NaN",
        (
            "fastattn.kernels.triton.compressed:_add_rows",
            'tl.where(softmax.max == float("-inf"), 0.0, tl.exp(softmax.max - new_max))',
            "tl.exp(softmax.max - new_max)",
        ),
    ),
    *breaks(
        "F231",
        "a query sees the entry of its own token, which is not complete",
        ("refattn.compressed:plan", "(where + 1) // ratio - 1", "where // ratio"),
        ("fastattn.compressed:plan", "+ 1) // ratio - 1", "+ ratio) // ratio - 1"),
    ),
    *breaks(
        "F231",
        "the entry before is computed",
        ("refattn.compressed:compress", "range(end - (e1 - e0), end)", "range(end - (e1 - e0) - 1, end - 1)"),
        ("fastattn.kernels.torch_ops.compressed:compress", "part(entry * ratio", "part((entry - 1) * ratio"),
        ("fastattn.kernels.triton.compressed:_compress_kernel", "+ row - end", "+ row - end - 1"),
    ),
    *in_both(
        "F232",
        "a sink counts in both parts",
        "compressed:attention",
        "plan.entries, options.without_sinks()",
        "plan.entries, options",
    ),
    *breaks(
        "F233",
        "entries of earlier steps are computed again",
        ("refattn.compressed:plan", "max(seq_len - query_len, 0) // ratio", "0 * query_len"),
        ("fastattn.compressed:plan", "clamp(min=0) // ratio", "clamp(max=0) // ratio"),
    ),
    *breaks(
        "F241",
        "the newest block is one as any other",
        ("refattn.compressed:candidates", "blocks[seen[-1] // size] = torch.inf", "pass"),
        ("fastattn.compressed:candidates", "-size).amax(1, keepdim=True)", "-size).amin(1, keepdim=True) * 0 - size"),
    ),
    *in_both(
        "F240",
        "entries have the scale of the keys",
        "compressed:attention",
        "Latents(entries, size, entry_scale)",
        "Latents(entries, size, cache_scale)",
    ),
    *breaks(
        "F240",
        "keys or entries are not quantized in the engine",
        (
            "twinattn.engine.compressed_storage:CompressedStorage.allocate",
            "pools[2] = pools[2].to(self.dtype or dtype)",
            "pools[2] = pools[2].to(dtype)",
        ),
        (
            "twinattn.engine.compressed_storage:SharedStorage.allocate",
            "dtype=self.dtype or dtype",
            "dtype=dtype",
        ),
    ),
    *in_both(
        "F234",
        "the first entry is selected in place of any",
        "compressed:select_entries",
        "positions=positions,",
        "positions=positions.clamp(max=0),",
    ),
    *breaks(
        "R214",
        "an input of a ring is written without the decay",
        ("refattn.replay:_rebuild", "_write(_fade(state, log_decay.exp()), ", "_write(state, "),
        ("fastattn.kernels.torch_ops.replay:_rebuild", "        _fade(now, log_decay.exp())\n", ""),
        (
            "fastattn.kernels.triton.replay:_rebuild",
            "            state *= tl.exp(tl.load(decays + at * rings.log_decay_strides[1]).to(tl.float32))",
            "            pass",
        ),
    ),
    *breaks(
        "R214",
        "the value is pushed, and not what the token wrote",
        ("refattn.replay:attention", "(inputs[0][row], written, ", "(inputs[0][row], value[row], "),
        ("fastattn.kernels.torch_ops.replay:replay", "written[pushed], ", "value[rows[pushed]], "),
        (
            "fastattn.kernels.triton.replay:_push_written",
            "written.to(rings.written.dtype.element_ty)",
            "(2 * written).to(rings.written.dtype.element_ty)",
        ),
    ),
    *breaks(
        "R214",
        "a decode adds what inputs past the cursor wrote",
        ("fastattn.kernels.triton.replay:_decode_kernel", "in_ring = (at[None, :] < held) & ", "in_ring = "),
    ),
    *breaks(
        "R214",
        "a decode takes another part of the ring beside the checkpoint",
        ("fastattn.kernels.triton.replay:_since", "at + 1 < held, (at == 0)", "at < held, (at == 0)"),
        ("fastattn.kernels.triton.replay:_share_kernel", "        keys *= left\n", ""),
        ("fastattn.kernels.triton.replay:_decode_kernel", "(read + v * tl.load(of_product))", "read"),
    ),
    *breaks(
        "R215",
        "nothing flushes where a plan asks for it",
        ("refattn.replay:_moves", "begins or asked or inputs >=", "begins or inputs >="),
        (
            "fastattn.kernels.torch_ops.replay:_sequences",
            "(not has_state or flushes or total >=",
            "(not has_state or total >=",
        ),
        (
            "fastattn.kernels.triton.replay:_find_ring",
            "            moves |= tl.load(of_flush, sequence.slot >= 0, 0) != 0",
            "            moves |= tl.load(of_flush, sequence.slot >= 0, 0) > 1",
        ),
    ),
    *breaks(
        "R215",
        "a slot that is taken over keeps the checkpoint of its last owner",
        ("refattn.replay:_moves", "return False, begins or asked or inputs", "return False, asked or inputs"),
        ("fastattn.kernels.torch_ops.replay:_sequences", "(not has_state or flushes or", "(flushes or"),
        (
            "fastattn.kernels.triton.replay:_find_ring",
            "moves = (sequence.start < 0) | (total >= cursors.SIZE)",
            "moves = total >= cursors.SIZE",
        ),
    ),
    *breaks(
        "R215",
        "the cursor stays where it is when the checkpoint moves",
        ("refattn.replay:advance", "0 if sequence.moves_after else before + kept", "before + kept"),
        (
            "fastattn.replay:advance",
            "after = total.masked_fill(moves, 0)",
            "after = total",
        ),
    ),
    *breaks(
        "R215",
        "rings of 16 bits are folded in 16 bits",
        ("refattn.replay:flush", "compute_dtype(ring.written.dtype)", "ring.written.dtype"),
        (
            "fastattn.kernels.torch_ops.replay:flush",
            "compute = torch.promote_types(ring.written.dtype, torch.float32)",
            "compute = ring.written.dtype",
        ),
    ),
    *breaks(
        "R216",
        "all drafts are accepted",
        ("refattn.replay:advance", "if num_accepted is None else int(num_accepted[sequence.number])", ""),
        ("fastattn.replay:advance", "after = num_accepted + held", "after = lens + held"),
    ),
    *breaks(
        "R216",
        "drafts without room for them do not move the checkpoint",
        (
            "refattn.replay:attention",
            "            states[slot] = state\n            state =",
            "            state =",
        ),
        (
            "fastattn.kernels.torch_ops.replay:replay",
            "        states[slots] = state[folded].to(states.dtype)\n",
            "",
        ),
        (
            "fastattn.kernels.triton.replay:_flush_kernel",
            " | (held + sequence.length > cursors.SIZE)",
            "",
        ),
    ),
    *breaks(
        "R218",
        "a checkpoint moves in its own slot, wherever it is to go",
        (
            "refattn.replay:_sequences",
            "target = slot if targets[i] < 0 else targets[i]",
            "target = slot",
        ),
        ("fastattn.kernels.torch_ops.replay:_sequences", "target = slot if target < 0 else target", "target = slot"),
        (
            "fastattn.kernels.triton.replay:_target_of",
            "        target = tl.where(given >= 0, given, target)\n",
            "",
        ),
    ),
    *breaks(
        "R218",
        "drafts are pushed into the ring that their sequence has left",
        ("refattn.replay:attention", "slot, first = sequence.target, 0", "first = 0"),
        (
            "fastattn.kernels.torch_ops.replay:_Sequence.first",
            "(self.target, 0) if self.moves_before",
            "(self.slot, 0) if self.moves_before",
        ),
        (
            "fastattn.kernels.triton.replay:_find_ring",
            "slot = tl.where(has_moved, _target_of(cursors, sequence), sequence.slot)",
            "slot = sequence.slot",
        ),
    ),
    *breaks(
        "R217",
        "the input at the cursor is read, too",
        ("refattn.replay:_rebuild", "for at in range(cursor):", "for at in range(cursor + 1):"),
        ("fastattn.kernels.torch_ops.replay:_rebuild", "if cursor > at]", "if cursor >= at]"),
        (
            "fastattn.kernels.triton.replay:_rebuild",
            "for number in range(0, held):",
            "for number in range(0, held + 1):",
        ),
    ),
    *breaks(
        "R217",
        "the cursor of an idle sequence is moved",
        ("refattn.replay:_sequences", "if q0 == q1 or slot < 0:", "if slot < 0:"),
        ("fastattn.replay:advance", "is_idle = (slots < 0) | (lens == 0)", "is_idle = slots < 0"),
    ),
    *breaks(
        "R214 R215",
        "a full ring moves the checkpoint a token later",
        ("refattn.replay:_moves", "or asked or inputs >= plan.ring_size", "or asked or inputs > plan.ring_size"),
        (
            "fastattn.kernels.torch_ops.replay:_sequences",
            "flushes or total >= plan.ring_size",
            "flushes or total > plan.ring_size",
        ),
        ("fastattn.kernels.triton.replay:_find_ring", "(total >= cursors.SIZE)", "(total > cursors.SIZE)"),
        ("fastattn.replay:advance", "(total >= plan.ring_size)", "(total > plan.ring_size)"),
    ),
    *breaks(
        "R217",
        "slot 0 is padding",
        ("refattn.replay:_sequences", "if q0 == q1 or slot < 0:", "if q0 == q1 or slot <= 0:"),
        ("fastattn.kernels.torch_ops.replay:_sequences", "if slot < 0 or q0 == q1:", "if slot <= 0 or q0 == q1:"),
        ("fastattn.replay:advance", "is_idle = (slots < 0) |", "is_idle = (slots <= 0) |"),
    ),
    *breaks(
        "R204",
        "the inputs that are kept are those before the last ones",
        ("refattn.recurrent:convolve", "            last = window[1:]", "            last = window[:-1]"),
        (
            "fastattn.kernels.torch_ops.recurrent:convolve",
            "joined[end : end + width - 1] for",
            "joined[end - 1 : end + width - 2] for",
        ),
        (
            "fastattn.kernels.triton.convolution:_keep",
            "        x = tl.load(of_inputs + (sequence.first_row + source) * inputs.strides[0]",
            "        x = tl.load(of_inputs + (sequence.first_row + source - 1) * inputs.strides[0]",
        ),
    ),
    *breaks(
        "R205",
        "a step goes on from the state after the first draft, whatever was accepted",
        ("refattn.recurrent:_sequences", "start = slots[accepted - 1]", "start = slots[0]"),
        (
            "fastattn.kernels.torch_ops.recurrent:_sequences",
            "        start = plan.state_indices.gather(1, columns[:, None])[:, 0]",
            "        pass",
        ),
        (
            "fastattn.kernels.triton.states:find_sequence",
            "(accepted - 1).to(tl.int64) * tables.column_stride",
            "0 * accepted * tables.column_stride",
        ),
    ),
    *breaks(
        "R205",
        "the state after the last draft is chosen",
        ("refattn.state_cache:accepted_slots", "row[accepted - 1] if row[0] >= 0", "row[-1] if row[0] >= 0"),
        ("fastattn.state_cache:accepted_slots", "(num_accepted - 1).clamp(0,", "(num_accepted + 99).clamp(0,"),
    ),
    *breaks(
        "R206",
        "blocks are those of the step, not of the sequence",
        (
            "refattn.recurrent:_sequences",
            "divmod(first + token + 1, plan.block_size)",
            "divmod(token + 1, plan.block_size)",
        ),
        (
            "fastattn.kernels.torch_ops.recurrent:_Keep.write",
            "if self.block_size is not None and (sequence.position + count) % self.block_size == 0:",
            "if self.block_size is not None and count % self.block_size == 0:",
        ),
        (
            "fastattn.kernels.triton.chunks:_chunks_kernel",
            "            end = sequence.position + tl.minimum(first + TILE.CHUNK, sequence.length)",
            "            end = sequence.position * 0 + first + TILE.CHUNK",
        ),
    ),
    *breaks(
        "R207",
        "no slot is copied",
        ("refattn.state_cache:copy", "    kv_cache.copy_blocks(pools, pairs)", "    return"),
        ("fastattn.state_cache:copy", "    dispatch.run_in_each(", "    return\n    dispatch.run_in_each("),
    ),
    *breaks(
        "R209",
        "the state moves on after a step that failed",
        ("twinattn.engine.state_pool:StatePool.settle", "        if count:", "        if slots.targets:"),
    ),
    *breaks(
        "R209",
        "a request that ends or waits keeps its slots",
        ("twinattn.engine.scheduler:Scheduler._stop", "            self.states.release(request)", "            pass"),
    ),
    *breaks(
        "R209",
        "a step that is undone keeps its slots",
        ("twinattn.engine.scheduler:Scheduler.undo", "            self.states.reset()", "            pass"),
    ),
    *breaks(
        "R209",
        "a decode writes where it reads",
        (
            "twinattn.engine.state_layers:rows_of",
            "prefill = one.targets, start, -1",
            "prefill = [max(one.targets[0], start), *one.targets[1:]], start, -1",
        ),
    ),
    *breaks(
        "R209",
        "a decode ahead writes where the one before it reads",
        (
            "twinattn.engine.state_pool:StatePool.hold_ahead",
            "Slots(slots.first + launched, target, [self._take()])",
            "Slots(slots.first + launched, target, [self._take() if slots.start is None else slots.start])",
        ),
    ),
    *breaks(
        "R202",
        "padding rows of a captured decode have slot 0",
        (
            "twinattn.engine.cuda_graphs:_Inputs.fill",
            "self.slots[:count], self.slots[count:] = rows.slots, -1",
            "self.slots[:count], self.slots[count:] = rows.slots, 0",
        ),
    ),
    *breaks(
        "R209",
        "a captured decode goes on with the slots of the one before",
        (
            "twinattn.engine.cuda_graphs:_Inputs.fill",
            "self.slots[:count], self.slots[count:] = rows.slots, -1",
            "self.slots[:count] = rows.slots.where(self.slots[:count] < 0, self.slots[:count])",
        ),
    ),
    *breaks(
        "R210",
        "a step is captured over its requests, whose states change twice",
        (
            "twinattn.engine.cuda_graphs:_Decode.launch",
            ("        replay = self.capture()\n", "        tokens = _choose(replay()["),
            ("", "        replay = self.capture()\n        tokens = _choose(replay()["),
        ),
    ),
    *breaks(
        "R210",
        "keys without a state are used",
        ("twinattn.engine.scheduler:Scheduler._find", "found[: self.states.usable([", "found[: len(["),
    ),
    *breaks(
        "R210",
        "the state after all of a prompt is kept",
        (
            "twinattn.engine.state_pool:StatePool._hold_checkpoint",
            "last = (seq_len - (seq_len == request.prompt_len)) //",
            "last = seq_len //",
        ),
    ),
    *breaks(
        "R210",
        "all states of an answer are kept",
        (
            "twinattn.engine.slots:SlotPool._register",
            "            self._forget(self.kept[latest])",
            "            pass",
        ),
    ),
    *breaks(
        "R210",
        "two requests read one slot",
        ("twinattn.engine.state_layers:rows_of", "(not is_decode or pool.is_shared(start))", "not is_decode"),
    ),
    *breaks(
        "R210",
        "a state that was used again is taken like any other",
        (
            "twinattn.engine.slots:SlotPool._release",
            "move_to_end(slot, last=slot in self._contents)",
            "move_to_end(slot, last=False)",
        ),
    ),
    *breaks(
        "R211",
        "the state after the last draft goes on",
        (
            "twinattn.engine.state_pool:StatePool.settle",
            "slots.targets.pop(min(count, len(slots.targets)) - 1)",
            "slots.targets.pop()",
        ),
    ),
    *breaks(
        "R211",
        "the state after a rejected draft is kept",
        (
            "twinattn.engine.state_pool:StatePool.settle",
            "if (block + 1) * self.block_size <= request.num_computed_tokens:",
            "if slots.first:",
        ),
    ),
    *breaks(
        "R219",
        "the cursor of a request stays where it is",
        ("twinattn.engine.ring_pool:RingSlots.after", "held + count if pushes else 0", "held"),
    ),
    *breaks(
        "R219",
        "rejected drafts stay in the ring",
        ("twinattn.engine.ring_pool:RingPool.settle", "slots.after(count)", "slots.after(slots.query_len)"),
    ),
    *breaks(
        "R219",
        "a full ring is folded where it is read",
        (
            "twinattn.engine.ring_pool:RingPool._row",
            ("here = target if slot is None else slot", "(target, 0, has_drafts) if moves", "target if moves and here"),
            ("here = target if slot is None else slot", "(here, 0, has_drafts) if moves", "-1 if moves and here"),
        ),
    ),
    *breaks(
        "R219",
        "the end of a block moves no checkpoint",
        ("twinattn.engine.ring_pool:RingPool._row", "int(slots.block is not None))", "0)"),
    ),
    *breaks(
        "R219",
        "several requests push into one ring",
        ("twinattn.engine.ring_pool:RingPool._row", "is_prefill or self.is_shared(slot) or", "is_prefill or"),
    ),
    *breaks(
        "R219",
        "a plain step leaves the ring out",
        ("twinattn.engine.ring_pool:RingPool._row", " or (plain and cursor)", ""),
    ),
    *breaks(
        "R219",
        "a prompt goes on from the checkpoint, without the ring",
        (
            "twinattn.engine.ring_pool:RingPool._row",
            "folds.append(Fold(slot, cursor, target))",
            "folds.append(Fold(slot, 0, target))",
        ),
    ),
    *breaks(
        "R219",
        "a state that is kept has one input more",
        (
            "twinattn.engine.ring_pool:RingPool._keep_states",
            "Fold(slots.slot, end - checkpoint, target)",
            "Fold(slots.slot, end - checkpoint + 1, target)",
        ),
    ),
    *breaks(
        "R219",
        "another sample begins with an empty ring",
        ("twinattn.engine.ring_pool:RingPool.fork", "slots.slot, slots.cursor)", "slots.slot, 0)"),
    ),
    *breaks(
        "R219",
        "folds that failed are forgotten",
        ("twinattn.engine.ring_pool:RingPool.plan", "folds = [*self._folds]", "folds, self._folds = self._folds, []"),
    ),
    *breaks(
        "R212",
        "a gate without its bias",
        (
            "twinattn.engine.state_modules:gated_delta_net",
            "softplus(a.float() + module.dt_bias)",
            "softplus(a.float())",
        ),
    ),
    *breaks(
        "R212",
        "a query and a key as long as they are",
        (
            "twinattn.engine.state_modules:kimi_delta_attention",
            "recurrence.attention(_unit(query), _unit(key), value,",
            "recurrence.attention(query, key, value,",
        ),
    ),
    *breaks(
        "R212",
        "what is written is not scaled by dt",
        (
            "twinattn.engine.state_modules:mamba2",
            "dt.float(), dt, ADDITION)",
            "dt.float(), dt.new_ones(dt.shape), ADDITION)",
        ),
    ),
    *breaks(
        "R212",
        "heads have the decays of others",
        (
            "twinattn.engine.state_modules:lightning_attention",
            "-module.slope_rate.flatten().expand",
            "-module.slope_rate.flatten().flip(0).expand",
        ),
    ),
    *breaks(
        "R208",
        "no gate is closed",
        (
            "refattn.recurrent:attention",
            "log_decay.to(compute).exp(), beta.to(compute)\n\n    result",
            "log_decay.to(compute).exp().clamp(min=1e-3), beta.to(compute)\n\n    result",
        ),
    ),
    *breaks(
        "R208",
        "sums of logarithms are subtracted",
        (
            "fastattn.kernels.torch_ops.recurrent:_solve",
            "between = decay[..., None].where(before, 1.0).cumprod(2).tril_()",
            "between = (decay.log().cumsum(2)[..., None] - decay.log().cumsum(2)[:, :, None]).exp().tril_()",
        ),
        (
            "fastattn.kernels.triton.chunks:_between",
            "    sums = (exact[:, None] - exact[None, :]) + (rest[:, None] - rest[None, :])",
            "    sums = (exact + rest)[:, None] - (exact + rest)[None, :]",
        ),
        (
            "fastattn.kernels.flash.flash_qla:recurrent",
            "log_decay.float().clamp(min=LEAST_LOG_DECAY).contiguous()",
            "log_decay.float().contiguous()",
        ),
    ),
    *breaks(
        "R201",
        "a sequence that begins has a state that is not 0",
        ("fastattn.kernels.flash.states:_gather_kernel", "has_state, 0.0)", "has_state, 1.0)"),
    ),
    *breaks(
        "R202",
        "rows of padding are what they were",
        (
            "fastattn.kernels.flash.states:_scatter_kernel",
            "(sequence.slot < 0) & (tl.program_id(2) == 0)",
            "(sequence.slot < 0) & (tl.program_id(2) < 0)",
        ),
    ),
]

# Rows that are broken in fastattn alone, by the reason why the reference has no such feature.
FASTATTN_ALONE = {
    "CUDA graphs, and what is made for them": (
        "A44 A45 B64 B69 B72 D137 D138 D160 D161 D162 D163 D164 D165 D166 D167 D168 D169 D191"
    ),
    "kernels, and which of them is chosen": "A13 A14 B52 B70 B71 B82 D129 E173 E174 E175 E178",
    "the reference computes sequence by sequence, with or without the option": "B73",
    "operators of PyTorch, which the reference has none of": "D192",
}

# Rows with tests and without a mutation, and why.
UNBROKEN: dict[str, str] = {}
