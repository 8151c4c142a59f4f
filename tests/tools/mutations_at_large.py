"""Mutations of what no row of docs/proof/coverage.toml is about: kernels, plans, serving, integrations.

`make mutants ARGS=--at-large` plants each, and sees that some test of the named files fails. They are mistakes that a
change could make without a word: an end off by one, a check that is gone, a block that is given away twice.
"""

from tests.tools.mutations import Mutation, Text

TRITON = "tests/kernels/test_kernels_triton.py"
REPLAY = "tests/kernels/test_replay.py"
ENGINE = "tests/serving/test_engine.py"
FAULTS = "tests/serving/test_engine_faults.py"
WINDOWS = "tests/serving/test_window_pool.py"
DRAFTS = "tests/serving/test_speculation.py"
NEXT_TOKENS = "tests/serving/test_sampling.py"
AHEAD = "tests/serving/test_decodes_ahead.py"
CAPTURED = "tests/serving/test_captured_states.py"
SELECTED = "tests/serving/test_engine_selected.py"
SPANS = "tests/serving/test_engine_spans.py"
TEXTS = "tests/serving/test_detokenize.py"
WEIGHTS = "tests/serving/test_weights.py"
TRANSFORMERS = "tests/integrations/test_transformers.py"
VLLM = "tests/integrations/test_vllm.py"
BAD_INPUT = "tests/paths/test_bad_input.py"
NEAR = "tests/paths/test_near_int32.py"
NATIVE = "tests/kernels/test_native.py"
PAIRS = "tests/paths/test_differential.py"
PAGED = "tests/paths/test_chunked_prefill.py"
CODES = "tests/paths/test_quantized.py"

TILE = "fastattn/kernels/gpu/tile.py"
ROLES = "fastattn/kernels/triton/latents_hopper.py"
IN_C = "fastattn/kernels/native/attention.c"
CALL_OF_C = "fastattn/kernels/native/attention.py"
TABLES = "fastattn/kernels/triton/metadata.py"
MERGE = "fastattn/kernels/triton/merge.py"
SCHEDULE = "fastattn/kernels/cpu/schedule.py"
KEY = "fastattn/kernels/replay.py"
DISPATCH = "fastattn/kernels/dispatch.py"
SCHEDULER = "refattn/serving/scheduler.py"
BLOCKS = "refattn/serving/block_pool.py"
WINDOW_POOL = "refattn/serving/window_pool.py"
SERVER = "refattn/serving/engine.py"
DETOKENIZE = "refattn/serving/detokenize.py"
KEPT = "refattn/serving/weights.py"
SAMPLING = "refattn/serving/sampling.py"
ROWS = "fastattn/serving/decode_rows.py"
GRAPHS = "fastattn/serving/cuda_graphs.py"
STATES = "refattn/serving/state_pool.py"
HUGGING = "fastattn/integrations/transformers.py"
BACKEND = "fastattn/integrations/vllm.py"
BACKEND_OVER_LATENTS = "fastattn/integrations/vllm_mla.py"


def planted(name: str, file: str, old: Text, new: Text, *tests: str) -> Mutation:
    """Return a mutation, and the files of which some test has to fail."""
    return Mutation(name, (), file, old, new, tests)


AT_LARGE: list[Mutation] = [
    # --- which latents are for warps with roles ---
    planted("latents in a window, too", ROLES, "plan.window == (-1, 0) and plan", "plan", TRITON),
    planted("latents of a capped score, too", ROLES, "options.softcap == 0 and options", "options", TRITON),
    planted("latents of rows anywhere, too", ROLES, "last == 1 and all(", "last == 1 or all(", TRITON),
    # --- the kernel in C ---
    planted(
        "a window in C shows one key more",
        IN_C,
        "*first = largest(*first, position - call->left);",
        "*first = largest(*first, position - call->left - 1);",
        PAGED,
    ),
    planted(
        "a query in C does not see itself",
        IN_C,
        "*end = smallest(*end, position + call->right + 1);",
        "*end = smallest(*end, position + call->right);",
        NATIVE,
    ),
    planted(
        "both halves of a pair meet the first keys in C",
        IN_C,
        "multiply(room->query + (r0 + r) * width, width, some, tile->keys[half] + from,",
        "multiply(room->query + (r0 + r) * width, width, some, tile->keys[0] + from,",
        PAIRS,
    ),
    planted(
        "heads of the first half of a pair come first in C",
        IN_C,
        "return kv_head * group + row % of_half * call->halves + row / of_half;",
        "return kv_head * group + row;",
        PAIRS,
    ),
    planted(
        "a query of a pair does not meet the second value in C",
        IN_C,
        "merged ? merged[half * part_width + c] / sum",
        "merged ? merged[c] / sum",
        PAIRS,
    ),
    planted(
        "C merges splits without their maxima",
        IN_C,
        "float factor = expf(softmax[s * softmax_apart].max - shift), *part",
        "float factor = 1.f, *part",
        NATIVE,
    ),
    planted(
        "C forgets to rescale the sum",
        IN_C,
        "softmax->sum = softmax->sum * factor + sum;",
        "softmax->sum += sum;",
        NATIVE,
    ),
    planted(
        "sinks in C are left out",
        IN_C,
        "        sum += expf(call->sinks[head] - shift);",
        "        sum += 0.f;",
        NATIVE,
    ),
    planted(
        "C reads keys past the last one of a tile again",
        IN_C,
        "key##k = keys[j + k % KEYS < count ? j + k % KEYS : count - 1];",
        "key##k = keys[j + k % KEYS < count ? j : count - 1];",
        NATIVE,
    ),
    planted(
        "C multiplies no scale of a key",
        IN_C,
        "        scores[j] *= key_scales[j];",
        "        scores[j] *= 1.f;",
        CODES,
    ),
    planted(
        "padding rows in C are left unwritten",
        IN_C,
        "        call->lse[i] = -INFINITY;",
        "        call->lse[i] += 0.f;",
        NATIVE,
    ),
    planted(
        "C rounds bfloat16 down",
        IN_C,
        "(bits + 0x7fff + (bits >> 16 & 1)) >> 16)",
        "bits >> 16)",
        NATIVE,
    ),
    planted(
        "ALiBi in C loses its root",
        IN_C,
        "(call->sqrt_distance ? sqrtf(far) : far)",
        "far",
        NATIVE,
    ),
    planted(
        "a row in C that sees nothing is NaN",
        IN_C,
        "sum == 0.f ? nothing : merged",
        "merged",
        NATIVE,
    ),
    planted(
        "a replay of C has the number of threads of its first call",
        CALL_OF_C,
        "        again.threads = torch.get_num_threads()\n",
        "",
        NATIVE,
    ),
    # --- kernels ---
    planted(
        "a right side and a position are added as they are",
        TILE,
        "last_key = last_position + 1 + tl.minimum(right, seq_len - 1 - last_position)",
        "last_key = last_position + 1 + right",
        NEAR,
    ),
    planted(
        "a window begins one key late",
        TILE,
        "first_key -= tl.minimum(left, first_key)",
        "first_key -= tl.minimum(left - 1, first_key)",
        TRITON,
    ),
    planted(
        "a tile belongs to the sequence before",
        TILE,
        "if _first_tile(cu_seqlens_q, middle, GROUP, BLOCK_M) <= tile:",
        "if _first_tile(cu_seqlens_q, middle, GROUP, BLOCK_M) < tile:",
        TRITON,
    ),
    planted(
        "a capped score has no sign",
        TILE,
        "tl.where(x < 0.0, -1.0, 1.0) * tl.where(size < 0.05, small, large)",
        "tl.where(size < 0.05, small, large)",
        TRITON,
    ),
    planted(
        "sums are not rescaled",
        TILE,
        "    alpha = tl.exp2(row_max - base)\n    return weights",
        "    alpha = tl.exp2(base - base)\n    return weights",
        TRITON,
    ),
    planted(
        "the last step of a tile is not masked",
        TILE,
        "full_to = first_key + tl.maximum(all_to - first_key, 0) // BLOCK_N * BLOCK_N",
        "full_to = first_key + tl.cdiv(tl.maximum(all_to - first_key, 0), BLOCK_N) * BLOCK_N",
        TRITON,
    ),
    planted(
        "the second word of a mask is shifted by one bit less",
        TILE,
        "words = (low >> shift) | ((high << (63 - shift)) << 1)",
        "words = (low >> shift) | (high << (63 - shift))",
        "tests/paths/test_speculative.py",
    ),
    planted(
        "a small score is capped by a formula for large ones",
        TILE,
        "tl.where(size < 0.05, small, large)",
        "tl.where(size < 0.5, small, large)",
        TRITON,
        "tests/paths/test_chunked_prefill.py",
    ),
    planted(
        "a window is cut at the end of the sequence",
        TABLES,
        "cut = tl.maximum(seq_len - query_len - left, 0) // block_size",
        "cut = tl.maximum(seq_len - left, 0) // block_size",
        "tests/paths/test_sliding_window.py",
        TRITON,
    ),
    planted(
        "chunks of negative positions are rounded up",
        TABLES,
        "first_chunk = (context_len - tl.where(context_len < 0, chunk_size - 1, 0)) // chunk_size",
        "first_chunk = context_len // chunk_size",
        "tests/paths/test_local.py",
        TRITON,
    ),
    planted(
        "the first row of a sequence is the last one of that before",
        TABLES,
        "before = (middle < num_seqs) & (ends <= row)",
        "before = (middle < num_seqs) & (ends < row)",
        "tests/kernels/test_kernels.py",
        "tests/paths/test_metadata.py",
    ),
    planted(
        "nodes of a tree stand one after the other",
        TABLES,
        "tl.load(seq_lens + sequence) - tree_len + depth, mask=is_row)",
        "tl.load(seq_lens + sequence) - tree_len + node, mask=is_row)",
        "tests/paths/test_speculative.py",
    ),
    planted(
        "a merge of nothing divides by 0",
        MERGE,
        "row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)",
        "row_sum = row_sum + 0.0",
        TRITON,
    ),
    planted(
        "a merge of many parts rounds in between",
        MERGE,
        "out, lse = _merge(outs[:PARTS_AT_ONCE], lses[:PARTS_AT_ONCE], torch.float32)",
        "out, lse = _merge(outs[:PARTS_AT_ONCE], lses[:PARTS_AT_ONCE], dtype)",
        "tests/paths/test_merge.py",
        TRITON,
    ),
    planted(
        "a decode's window has one key less",
        SCHEDULE,
        "num_keys = [seq_len if left < 0 else min(seq_len, left + 1) for _, seq_len in lens]",
        "num_keys = [seq_len if left < 0 else min(seq_len, max(1, left)) for _, seq_len in lens]",
        "tests/paths/test_sliding_window.py",
    ),
    planted(
        "a chunk of a prompt is taken for a whole one",
        SCHEDULE,
        "1 < query_len == seq_len <= SHORT_PROMPT",
        "1 < query_len <= seq_len <= SHORT_PROMPT",
        "tests/paths/test_chunked_prefill.py",
    ),
    planted(
        "positions are counted from the start of the sequence, whose first blocks are cut off",
        SCHEDULE,
        "given = self.positions[rows].long() - first_key",
        "given = self.positions[rows].long()",
        "tests/paths/test_sliding_window.py",
        "tests/paths/test_local.py",
        "tests/paths/test_cascade.py",
    ),
    planted(
        "a replay knows no softcap",
        KEY,
        "if one.name not in PER_HEAD",
        'if one.name not in (*PER_HEAD, "softcap")',
        REPLAY,
    ),
    planted(
        "a replay asks for no gradient",
        KEY,
        "torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),",
        "False,",
        "tests/paths/test_gradients.py",
        REPLAY,
    ),
    planted(
        "a replay of any address",
        KEY,
        "        if address % ALIGNMENT or layouts is None:\n            return None\n        return (\n",
        "        if layouts is None:\n            return None\n        return (\n",
        REPLAY,
    ),
    planted(
        "an answer is written into strided memory as if it were contiguous",
        DISPATCH,
        "return out if out is not None and out.is_contiguous() and not _overlaps(out, read) else None",
        "return None if out is None or _overlaps(out, read) else out",
        "tests/kernels/test_kernels.py",
    ),
    planted(
        "an answer is written over what is still to be read",
        DISPATCH,
        "out.is_contiguous() and not _overlaps(out, read) else None",
        "out.is_contiguous() else None",
        REPLAY,
    ),
    planted(
        "memory is shared only where it begins alike",
        DISPATCH,
        "if x.data_ptr() < end and begin < _addresses(x)[1]:",
        "if x.data_ptr() == begin:",
        REPLAY,
    ),
    planted(
        "a state is folded over the tokens that it is folded from",
        DISPATCH,
        "memory = None if out is None or _overlaps(out, tensors) else out",
        "memory = out",
        "tests/paths/test_recurrent.py",
    ),
    planted(
        "sinks count in every level",
        DISPATCH,
        "*((level, options.without_sinks()) for level in shared), (own, options)]",
        "*((level, options) for level in shared), (own, options)]",
        "tests/paths/test_cascade.py",
    ),
    # --- plans and checks ---
    planted(
        "rows of keys may be too few",
        "refattn/interface/keys.py",
        "if plan.needs is not None and plan.needs.key_rows > self.key.shape[0]:",
        "if False:",
        BAD_INPUT,
    ),
    planted(
        "shared levels are not checked",
        "refattn/interface/keys.py",
        "        check_levels(pool, self.key_cache, plan, options)\n",
        "",
        "tests/paths/test_plans_on_a_device.py",
        BAD_INPUT,
    ),
    planted(
        "a pool may have too few blocks",
        "refattn/interface/call.py",
        "if plan.needs is not None and plan.needs.blocks > num_blocks:",
        "if False:",
        BAD_INPUT,
    ),
    planted(
        "a query may have too few rows",
        "refattn/interface/call.py",
        "if plan.needs is not None and plan.needs.query_rows > query.shape[0]:",
        "if False:",
        BAD_INPUT,
    ),
    planted(
        "an output may overlap itself",
        "refattn/interface/call.py",
        '        check_own_memory("out", out)\n',
        "",
        BAD_INPUT,
    ),
    planted(
        "a table of a plan may lie in pieces",
        "refattn/interface/plan.py",
        "                check_side_by_side(name, numbers)\n",
        "",
        BAD_INPUT,
    ),
    planted(
        "a slot may be given twice", "refattn/interface/writes.py", "    if twice:\n", "    if False:\n", BAD_INPUT
    ),
    planted(
        "a destination may be given twice",
        "refattn/interface/writes.py",
        "if pairs[:, 1].unique().numel() != pairs.shape[0]:",
        "if False:",
        "tests/paths/test_kv_cache.py",
    ),
    planted(
        "a path takes a plan of another",
        "fastattn/chunked_prefill.py",
        "    check_plan(plan, Plan)\n",
        "",
        BAD_INPUT,
    ),
    planted(
        "a prefix may be used after a gap",
        WINDOW_POOL,
        "if run >= count - _first_block(count * self.block_size, self.left, self.block_size):",
        "if run >= 1:",
        WINDOWS,
        ENGINE,
    ),
    planted(
        "a block is given back while a token of it is seen",
        WINDOW_POOL,
        "return 0 if left < 0 else max(0, position - left) // block_size",
        "return 0 if left < 0 else max(0, position - left + block_size - 1) // block_size",
        WINDOWS,
    ),
    planted(
        "a block that is shared again stays free",
        WINDOW_POOL,
        "                del self._free[self.window_block[block]]\n",
        "",
        WINDOWS,
    ),
    planted(
        "padding is written into the last block of a window",
        WINDOW_POOL,
        "return slots.masked_fill((block < 0) | (slot_mapping < 0), -1)",
        "return slots.masked_fill(block < 0, -1)",
        WINDOWS,
    ),
    # --- serving ---
    planted(
        "all of a prompt may be cached, and no token is left for its logits",
        SCHEDULER,
        "self.pool.find(request.tokens[:-1], request.spans)",
        "self.pool.find(request.tokens, request.spans)",
        ENGINE,
    ),
    planted(
        "cached blocks that are free count as free once more",
        SCHEDULER,
        "unused = sum(self.pool.users[block] == 0 for block in cached)",
        "unused = 0",
        ENGINE,
        FAULTS,
    ),
    planted(
        "a block is found before it is full",
        SCHEDULER,
        "for i in range(len(request.contents), request.num_computed_tokens // self.block_size):",
        "for i in range(len(request.contents), -(-request.num_computed_tokens // self.block_size)):",
        ENGINE,
    ),
    planted(
        "a preempted request goes to the end of the queue",
        SCHEDULER,
        "self.waiting.appendleft(youngest)",
        "self.waiting.append(youngest)",
        ENGINE,
    ),
    planted(
        "a finished request keeps its blocks of windows",
        SCHEDULER,
        "            pool.release(request)\n",
        "            pass\n",
        ENGINE,
    ),
    planted("a block that is written anew is still found", BLOCKS, "        self.forget(blocks)\n", "", ENGINE),
    planted(
        "an equal hash is a proof",
        BLOCKS,
        "return block if prefix.parent is parent and prefix.tokens == tokens else None",
        "return block",
        ENGINE,
    ),
    planted("a block in use is allocated again", BLOCKS, "            self.free.pop(block, None)\n", "", ENGINE),
    planted(
        "the beginning of a prefix is reused first",
        BLOCKS,
        "for block in reversed(blocks):",
        "for block in blocks:",
        ENGINE,
    ),
    planted(
        "what a failed request wrote is found",
        SERVER,
        "            self.pool.forget(request.blocks)  # nobody can say what they hold\n",
        "",
        FAULTS,
    ),
    planted(
        "half a character at the end is lost",
        DETOKENIZE,
        "if text.endswith(INCOMPLETE) and not is_last:",
        "if text.endswith(INCOMPLETE):",
        TEXTS,
    ),
    planted(
        "a window of text moves on without text",
        DETOKENIZE,
        "request.decoded = (end, start + len(window)) if text else (start, end)",
        "request.decoded = (end, start + len(window))",
        TEXTS,
    ),
    planted(
        "the token that stops a request is text",
        DETOKENIZE,
        '*[token] * (reason != "stop")]',
        "token]",
        TEXTS,
    ),
    planted("a tokenizer's end is none", SERVER, 'getattr(tokenizer, "eos_token_id", None)', "None", TEXTS),
    planted(
        "weights that were written to are not seen", SERVER, "if were_moved or were_written:", "if were_moved:", WEIGHTS
    ),
    planted(
        "a weight that was replaced is not seen", KEPT, "not all(map(is_, values, self._values))", "False", WEIGHTS
    ),
    planted("graphs outlive the place of weights", GRAPHS, "        self._steps.clear()\n", "", WEIGHTS),
    planted(
        "a decode ahead takes the token of another row",
        ROWS,
        "torch.zeros_like(kept),\n            kept,",
        "torch.zeros_like(kept),\n            torch.zeros_like(kept),",
        AHEAD,
    ),
    planted(
        "a decode ahead draws with the random number of the token before",
        ROWS,
        "settings_of(requests, [1] * len(rows))",
        "settings_of(requests, [0] * len(rows))",
        AHEAD,
    ),
    planted(
        "a block that begins in a decode ahead is not in its table",
        ROWS,
        "table[row, place] = requests[row].blocks[place]",
        "table[row, place] = requests[row].blocks[place - 1]",
        AHEAD,
    ),
    planted(
        "a request that waits does not wait for the blocks of one under way that begins alike",
        SCHEDULER,
        "if request.spans or self._begins_like_one_of(filling, request, len(cached)):",
        "if request.spans:",
        AHEAD,
    ),
    planted(
        "a request waits for one under way that begins differently",
        SCHEDULER,
        "any(full > found and other.tokens[:end] == start for other, full in filling)",
        "any(full > found for other, full in filling)",
        AHEAD,
    ),
    planted(
        "a prompt with spans is cut ahead like any other",
        SCHEDULER,
        "if request.spans or self._begins_like_one_of(filling, request, len(cached)):",
        "if self._begins_like_one_of(filling, request, len(cached)):",
        SPANS,
    ),
    planted(
        "a step ahead goes on past the last token of a request",
        SCHEDULER,
        "if request.num_outputs + 1 == request.sampling.max_tokens:",
        "if False:",
        AHEAD,
    ),
    planted(
        "a step ahead has no block for its token",
        SCHEDULER,
        "self._allocate_blocks(request, launched + count)",
        "self._allocate_blocks(request, count)",
        AHEAD,
    ),
    planted(
        "window pools hold the blocks of two steps, and are as large as for one",
        SCHEDULER,
        "room = self.max_num_batched_tokens - (sum(launched.values()) if self.window_pools else 0)",
        "room = self.max_num_batched_tokens",
        AHEAD,
        FAULTS,
    ),
    planted(
        "a chunk ahead begins where the one under way began",
        "refattn/serving/request.py",
        "first = request.num_computed_tokens + launched.get(request, 0)",
        "first = request.num_computed_tokens",
        AHEAD,
    ),
    planted(
        "a step ahead takes the token of another row",
        "refattn/serving/request.py",
        "tokens.input_ids.append(-1 - rows[request])",
        "tokens.input_ids.append(-1)",
        AHEAD,
    ),
    planted(
        "a row that failed goes on with a token that is none",
        "refattn/serving/request.py",
        "chosen[row].clamp(min=0).where(input_ids < 0, input_ids)",
        "chosen[row].where(input_ids < 0, input_ids)",
        AHEAD,
    ),
    planted(
        "a decode after a prompt draws with the random number of the token before",
        ROWS,
        "settings_of(requests, unknown),",
        "settings_of(requests, [0] * len(requests)),",
        AHEAD,
    ),
    planted(
        "a decode after a prompt takes the token of another row",
        ROWS,
        "before.get(request, -1)",
        "min(before.get(request, -1), 0)",
        AHEAD,
    ),
    planted(
        "a chunk beside decodes draws with the random numbers of the tokens before",
        GRAPHS,
        "settings_of(due, [int(request in (before or ())) for request in due])",
        "settings_of(due, [0] * len(due))",
        AHEAD,
    ),
    planted(
        "a step launched one by one leaves its tokens on the host",
        GRAPHS,
        "self.chosen[: len(due)] = chosen",
        "chosen.clone()",
        AHEAD,
    ),
    planted(
        "a graph is given the columns of somebody who left",
        GRAPHS,
        "= len(rows.requests), min(rows.block_table.shape[1], self.block_table.shape[1])",
        "= rows.block_table.shape",
        AHEAD,
    ),
    planted(
        "a captured step with prompts reads token -1",
        GRAPHS,
        "input_ids = fill_in(self.input_ids, self.runner.chosen)",
        "input_ids = self.input_ids.clamp(min=0)",
        CAPTURED,
    ),
    planted(
        "a step that fails leaves the one after it under way",
        SERVER,
        "            vars(self.counters).update(counted)\n            self._under_way = None\n            failure",
        "            vars(self.counters).update(counted)\n            failure",
        AHEAD,
    ),
    planted(
        "a step ahead reads the states that the one under way reads",
        STATES,
        "return slots.ahead or slots if ahead else slots",
        "return slots",
        CAPTURED,
    ),
    planted(
        "slots of a step that was launched ahead are never taken over",
        SCHEDULER,
        "            for request in requests:\n                self.states.follow(request)",
        "            pass",
        CAPTURED,
    ),
    planted(
        "accepted drafts do not count in the length",
        SERVER,
        "length = request.num_outputs + len(request.accepted) + 1",
        "length = request.num_outputs + 1",
        DRAFTS,
    ),
    planted(
        "the last token needs a block",
        SERVER,
        "length = len(tokens) + sampling.max_tokens - 1",
        "length = len(tokens) + sampling.max_tokens",
        ENGINE,
    ),
    planted(
        "drafts go on after the end",
        SERVER,
        "if events[-1].token_id is None or self._reason_to_end(request, events[-1].token_id):",
        "if events[-1].token_id is None:",
        DRAFTS,
    ),
    planted(
        "a draft's random number is that of the token before",
        SAMPLING,
        "place + count for",
        "place for",
        DRAFTS,
    ),
    planted(
        "the token that reaches top_p is cut off",
        SAMPLING,
        "before < top_p * ends[-1]",
        "ends < top_p * ends[-1]",
        NEXT_TOKENS,
    ),
    planted(
        "a draft has one node too many",
        "refattn/serving/speculation.py",
        "if len(tokens) == nodes:",
        "if len(tokens) > nodes:",
        DRAFTS,
    ),
    planted(
        "the last tokens are found at the end itself",
        "refattn/serving/speculation.py",
        "for start in range(len(tokens) - length - 1, -1, -1):",
        "for start in range(len(tokens) - length, -1, -1):",
        DRAFTS,
    ),
    planted(
        "a pool of windows has no room for the blocks that a window begins and ends in",
        "refattn/serving/layers.py",
        "seen = min(max_num_seqs, num_blocks) * (self.mask.reach - 1 + 2 * block_size - 2)",
        "seen = min(max_num_seqs, num_blocks) * (self.mask.reach - 1)",
        ENGINE,
        "tests/serving/test_layers.py",
    ),
    planted(
        "the index key of a token lies in the slot of another",
        "refattn/serving/layers.py",
        "twin.sparse.write(tokens.key, cache[1], slot_mapping)",
        "twin.sparse.write(tokens.key, cache[1], slot_mapping.roll(1))",
        SELECTED,
    ),
    planted(
        "every key that a query may see is selected",
        "refattn/serving/layers.py",
        "return twin.sparse.select(scores, min(self.topk, scores.shape[1]))",
        "return twin.sparse.select(scores, scores.shape[1])",
        SELECTED,
    ),
    planted(
        "an index key is rotated by pairs of neighbours",
        "refattn/serving/index_modules.py",
        'HALVES = Kind("apply_rotary_pos_emb", rotary_first=True)',
        'HALVES = Kind("apply_rotary_pos_emb_interleave", rotary_first=True)',
        SELECTED,
    ),
    planted(
        "a block is found by its own tokens, whatever they have seen of others",
        BLOCKS,
        "return *tokens[start:end], *((first, last, *tokens[first : last + 1]) for first, last in touched)",
        "return *tokens[start:end], *((first, last) for first, last in touched)",
        SPANS,
    ),
    planted(
        "a cached prefix ends inside a span",
        SCHEDULER,
        "found = found[: first // self.block_size]",
        "found = found[: last // self.block_size]",
        SPANS,
    ),
    planted(
        "a chunk of a prompt ends inside a span",
        "refattn/serving/request.py",
        "for first, last in self.spans if first < end <= last), count)",
        "for first, last in self.spans if first < end < last), count)",
        SPANS,
    ),
    planted(
        "a window shows one token more to the tokens of a span",
        "refattn/serving/layers.py",
        "window_size = (self.mask.reach - 1, -1) if",
        "window_size = (self.mask.reach, -1) if",
        SPANS,
    ),
    # --- integrations ---
    planted(
        "a mask with a gap is one without",
        HUGGING,
        "if not torch.equal(end - first, count):",
        "if False:",
        TRANSFORMERS,
    ),
    planted(
        "queries of padding see keys",
        HUGGING,
        'seen = seen * rearrange(real, "b q -> b 1 q 1")',
        "pass",
        TRANSFORMERS,
    ),
    planted(
        "a window of generate_batch has one key more",
        HUGGING,
        "left = -1 if sliding_window is None else sliding_window - 1",
        "left = -1 if sliding_window is None else sliding_window",
        TRANSFORMERS,
    ),
    planted(
        "the rest of a mask is left out", HUGGING, "        part = part.rest\n", "        part = None\n", TRANSFORMERS
    ),
    planted(
        "the softcap of generate_batch is lost",
        HUGGING,
        "slice(None))\n    options = AttentionOptions(scaling, softcap or 0.0, sinks=s_aux)",
        "slice(None))\n    options = AttentionOptions(scaling, sinks=s_aux)",
        TRANSFORMERS,
    ),
    planted(
        "dropout is passed over",
        HUGGING,
        '        if name in ("dropout", "output_attentions"):\n            if value:\n',
        '        if name in ("dropout", "output_attentions"):\n            if value and False:\n',
        TRANSFORMERS,
    ),
    planted(
        "autocast is not asked",
        HUGGING,
        "if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):",
        "if False:",
        TRANSFORMERS,
    ),
    planted(
        "unknown options are passed over",
        HUGGING,
        "elif name not in IGNORED and value is not None and value is not False:",
        "elif False:",
        TRANSFORMERS,
    ),
    planted(
        "vLLM's window has one key more",
        BACKEND,
        "reach = -1 if sliding_window is None else sliding_window - 1",
        "reach = -1 if sliding_window is None else sliding_window",
        VLLM,
    ),
    planted(
        "vLLM may ask for queries that see later keys",
        BACKEND,
        "if common.causal is not is_causal:",
        "if False:",
        VLLM,
    ),
    planted(
        "what vLLM sets and nobody knows is passed over",
        BACKEND,
        "if value is not None and (isinstance(value, Tensor) or",
        "if False and (isinstance(value, Tensor) or",
        VLLM,
    ),
    planted(
        "vLLM's encoders are decoders",
        BACKEND,
        "if not FastAttentionBackend.supports_attn_type(attn_type):",
        "if False:",
        VLLM,
    ),
    planted(
        "a window of vLLM's encoders ends at a token itself",
        BACKEND,
        "window_size=(reach, reach)",
        "window_size=(reach, 0)",
        VLLM,
    ),
    planted(
        "a context of vLLM's latents is cut",
        BACKEND_OVER_LATENTS,
        "contexts = max(0, int(",
        "contexts = min(16, int(",
        VLLM,
    ),
    planted(
        "the root of ALiBi's distance is its distance",
        BACKEND,
        "alibi_sqrt=self.alibi_sqrt)",
        "alibi_sqrt=False)",
        VLLM,
    ),
    planted(
        "a captured decode of vLLM is for the lengths of its capture",
        BACKEND,
        "max_seq_len=max(int(common.max_seq_len), vllm_config.model_config.max_model_len)",
        "max_seq_len=int(common.max_seq_len)",
        VLLM,
    ),
    planted(
        "context that vLLM splits is taken for whole",
        BACKEND,
        "if getattr(layer, name, 1) > 1:",
        "if False:",
        VLLM,
    ),
]
