"""An attention backend for SGLang, over the paged paths of `fastattn`.

    python -m twinattn.integrations.sglang_server --model-path MODEL --attention-backend fastattn

SGLang finds `register` by the entry point `sglang.srt.plugins` of this package, in every process that it starts; but it
parses its arguments before, so a server is started by `sglang_server`.

SGLang's scheduler, its radix cache and its tensor parallelism stay as they are; what is computed here is a layer:

    once a step     a `Batch` of the slots of each request, by pages, and a plan for each width of window
    in each layer   SGLang's own pool writes the new keys and values, and the queries attend to it

A pool of SGLang has a row per slot, `[slots, hk, d]`; the paths read a view of it, `[n, p, hk, d]`. Slot 0, or page 0,
is that of padding. A request's slots of one page lie side by side, so its first slot names the page.

Decodes can be captured whole, as CUDA graphs. A captured step keeps what it launches, so it is made for the longest
sequence that is served; its lengths and tables are in fixed memory, which `init_forward_metadata_out_graph` fills
before a replay. Of a step with prompts, SGLang captures what lies between the attentions.

SGLang asks a backend nothing before it loads a model, so this one refuses by name what it does not compute: a pool (of
latents, or apart for windows), a step (of drafts, or over slots that are mapped to others) and a layer (of cross
attention, or with an unknown argument).

Written against SGLang 0.5.23.
"""

import os
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.server_args import add_attention_backend_choices
from torch import Tensor

from fastattn import chunked_prefill, quantized
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan
from refattn.scales import FP8_FORMATS, Fp8Scales

NAME = "fastattn"
CAUSAL = {
    AttentionType.DECODER: True,
    AttentionType.DECODER_BIDIRECTIONAL: False,
    AttentionType.ENCODER_ONLY: False,  # the keys of a step are all of its keys, and they are in the pool
}
POOLS = {  # what a pool has, and is refused for
    "swa_kv_pool": "layers with a window have another: serve with --disable-hybrid-swa-memory",
    "kv_lora_rank": "it has latents",
    "k_scale_buffer": "its scales are of blocks",
    "full_to_hisparse_device_index_mapping": "its slots are mapped to others",
    "shard_spec": "its pages are shared out to ranks",
}


def register() -> None:
    """Make `--attention-backend fastattn` known to SGLang; to do so again changes nothing.

    With `FASTATTN_REPLACES_TRITON=1`, the name `triton` is this backend's, too: SGLang serves GPT-OSS under names of a
    list of its own alone.
    """
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(FastAttentionBackend)
    if os.environ.get("FASTATTN_REPLACES_TRITON") == "1":
        register_attention_backend("triton")(FastAttentionBackend)


class FastAttentionBackend(AttentionBackend):
    """Attends to a pool of keys and values.

    Attributes:
        forward_metadata: the batch of the step, whose plans are made when a layer first asks.
        req_to_token_pool: the runner's; SGLang's backend for layers with a state takes both pools from here.
        token_to_kv_pool: the runner's pool of keys and values.

    Args:
        runner: SGLang's model runner.

    Raises:
        NotImplementedError: for a pool whose layers' keys are not rows of slots, `[slots, hk, d]`.
    """

    needs_cpu_seq_lens = True  # the longest sequence is known without waiting for the device

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size = int(runner.page_size)
        self.kv_index_translator = getattr(runner, "kv_index_translator", None)  # SGLang's wrappers hand theirs not on
        self._chunk = getattr(runner, "attention_chunk_size", None)
        of_layers = getattr(self.token_to_kv_pool, "full_kv_pool", self.token_to_kv_pool)  # beside layers with a state
        for name, what in POOLS.items():
            if any(getattr(pool, name, None) is not None for pool in (self.token_to_kv_pool, of_layers)):
                raise NotImplementedError(f"token_to_kv_pool: expected one pool of keys and values, but {what}")
        layout = getattr(of_layers, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise NotImplementedError(f"kv_cache_layout: expected 'nhd', got {layout!r}")
        self.forward_metadata: _Step | None = None
        self._fixed: Batch | None = None  # memory of captured decodes
        self._captured: dict[int, _Step] = {}  # a step by how many requests it has, padding included

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Describe a step.

        Args:
            forward_batch: SGLang's; a decode has one new token per request, an extend as many as it says.

        Raises:
            NotImplementedError: for drafts, and for slots that are not those of the pool.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        self._check(forward_batch)
        self.forward_metadata = _Step(self._batch(forward_batch, mode.is_decode()), self.page_size)

    def _check(self, forward_batch: Any) -> None:
        """Refuse a step that is not computed here."""
        mode = forward_batch.forward_mode
        if forward_batch.spec_info is not None or not (mode.is_decode() or mode.is_extend()):
            raise NotImplementedError(f"forward_mode: expected a decode or an extend without drafts, got {mode}")
        if self.kv_index_translator is not None and self.kv_index_translator.needs_read_translate:
            raise NotImplementedError(
                "kv_index_translator: expected none that translates, as slots are read as they are"
            )
        if any(getattr(forward_batch, "encoder_lens_cpu", None) or ()):
            raise NotImplementedError("encoder_lens: expected none, as a request's slots are read from the first on")

    def _batch(self, forward_batch: Any, is_decode: bool) -> Batch:
        """Make the batch of a step, without waiting for the device."""
        seq_lens = forward_batch.seq_lens.to(torch.int32)
        num_seqs, device = len(seq_lens), seq_lens.device
        longest = int(forward_batch.seq_lens_cpu.max()) if num_seqs else 0
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
        if is_decode:
            torch.arange(num_seqs + 1, out=starts)
            most, total = min(num_seqs, 1), num_seqs
        else:
            torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
            most, total = max(forward_batch.extend_seq_lens_cpu, default=0), sum(forward_batch.extend_seq_lens_cpu)
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : longest or 1 : self.page_size]
        return Batch(
            cu_seqlens_q=starts,
            seq_lens=seq_lens,
            block_table=(slots // self.page_size).to(torch.int32),
            max_query_len=most,
            max_seq_len=longest,
            num_tokens=total,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured decodes read: lengths, and tables for the longest sequence that is served.

        Args:
            max_bs: requests in a captured step, with padding.
            max_num_tokens: their tokens.
        """
        table = self.req_to_token_pool.req_to_token
        new = {"dtype": torch.int32, "device": table.device}
        self._captured = {}
        self._fixed = Batch(
            cu_seqlens_q=torch.arange(max_bs + 1, **new),
            seq_lens=torch.ones(max_bs, **new),
            block_table=torch.zeros(max_bs, -(-table.shape[1] // self.page_size), **new),
            max_query_len=1,
            max_seq_len=table.shape[1],
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Describe a decode before it is captured or replayed, in the memory that the graph reads.

        Args:
            forward_batch: SGLang's, with requests of padding.
            in_capture: not used, as a replay needs the same.

        Raises:
            NotImplementedError: for what `init_forward_metadata` refuses, and for an extend.
        """
        if not forward_batch.forward_mode.is_decode():
            raise NotImplementedError(
                "only decodes are captured as a whole: serve with --cuda-graph-backend-prefill breakable or disabled"
            )
        self._check(forward_batch)
        batch, fixed = self._batch(forward_batch, is_decode=True), self._fixed
        assert batch.block_table is not None and fixed is not None and fixed.block_table is not None
        count, pages = batch.block_table.shape
        fixed.seq_lens[:count] = batch.seq_lens
        fixed.block_table[:count, :pages] = batch.block_table
        if count not in self._captured:
            of_these = Batch(
                cu_seqlens_q=fixed.cu_seqlens_q[: count + 1],
                seq_lens=fixed.seq_lens[:count],
                block_table=fixed.block_table[:count],
                max_query_len=1,
                max_seq_len=fixed.max_seq_len,
                num_tokens=count,
            )
            self._captured[count] = _Step(of_these, self.page_size)
        self.forward_metadata = self._captured[count]

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a request of padding, which data parallelism adds to steps without a graph, too."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the same, which SGLang asks for on a CPU."""
        return 1

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **more: Any
    ) -> Tensor:
        """Attend in a layer, as `forward_extend` does."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **more)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Write the new keys and values of a layer, and attend.

        Args:
            q: `[t, h * d]`, or with its heads apart.
            k: `[t, hk, d]`; None if they are in the pool.
            v: `[t, hk, dv]`; None with `k`.
            layer: SGLang's `RadixAttention`.
            forward_batch: of this step.
            save_kv_cache: whether keys and values are to be written.
            sinks: `[h]`.
            more: nothing else is taken.

        Returns:
            The outputs, `[t, h * dv]`.

        Raises:
            NotImplementedError: naming what is not computed; nothing is written then.
        """
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata comes first"
        asked = [name for name, x in more.items() if x is not None and x is not False]
        if asked:
            raise NotImplementedError(f"{', '.join(asked)}: not an argument of this backend")
        if layer.is_cross_attention or layer.attn_type not in CAUSAL:
            raise NotImplementedError(f"attention of {layer.attn_type}, cross: {layer.is_cross_attention}")
        if (layer.logit_cap and layer.logit_capping_method != "tanh") or layer.xai_temperature_len > 0:
            raise NotImplementedError("logits: expected none capped but by tanh, and none scaled by position")
        if layer.use_irope and self._chunk:
            raise NotImplementedError(f"use_irope: expected False, as chunks of {self._chunk} keys are not computed")
        options = AttentionOptions(softmax_scale=layer.scaling, softcap=layer.logit_cap or 0.0, sinks=sinks)
        plan = step.plan(CAUSAL[layer.attn_type], layer.sliding_window_size)
        if save_kv_cache and k is not None:
            of_write = (layer.k_scale, layer.v_scale) if self.token_to_kv_pool.dtype in FP8_FORMATS else ()
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v, *of_write)
        pool, number = self.token_to_kv_pool, layer.layer_id
        rows = pool.get_key_buffer(number), pool.get_value_buffer(number)
        key, value = (x.unflatten(0, (-1, self.page_size)) for x in rows)
        query = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim)
        out: Any
        if key.dtype in FP8_FORMATS:
            of_key, of_value = (1.0 if x is None else x for x in (layer.k_scale_float, layer.v_scale_float))
            scales = Fp8Scales(of_key, of_value, format=key.dtype)
            out = quantized.attention(query, key, value, plan, options, scales=scales)
        else:
            out = chunked_prefill.attention(query, key, value, plan, options)
        answer: Tensor = out.flatten(1)
        return answer


class _Step:
    """The batch of a step, and a plan for each mask that its layers have.

    Args:
        batch: the lengths, and the pages of each sequence.
        page_size: slots in a page.
    """

    def __init__(self, batch: Batch, page_size: int) -> None:
        self.batch, self._page_size = batch, page_size
        self._plans: dict[tuple[bool, int], Plan] = {}

    def plan(self, causal: bool, window: int | None) -> Plan:
        """Return the plan of a mask: a token sees itself and, with a window, as many before it.

        In a layer of both directions, it sees as many behind it.
        """
        left = -1 if window is None else window
        if (causal, left) not in self._plans:
            right = 0 if causal else left
            window_size = (left, right) if left >= 0 else (-1, -1)
            self._plans[causal, left] = chunked_prefill.plan(
                self.batch, block_size=self._page_size, causal=causal, window_size=window_size
            )
        return self._plans[causal, left]
