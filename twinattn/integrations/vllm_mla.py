"""Multi-head latent attention for vLLM, over `fastattn.mla`: the part of the backend for DeepSeek's models.

vLLM splits a step in two, and its layer calls each by its own way:

    decodes     sequences with few new tokens come absorbed, and attend to the latents in the pool: `mla.attention`
    prefills    keys and values are made of the latents, new ones and those of the context by chunks: `mla.prefill`

vLLM projects queries and outputs of decodes itself. For prefills it has backends of its own, which this does not call.
The pool `[n, p, c]` is that of the path: a latent and a rotary key per token.

Where ranks share the latents of a sequence, vLLM gathers the queries of decodes from all ranks and merges their outputs
by the log-sum-exps that are returned here. Prefills attend absorbed to their context, with the heads of all ranks and
the rank's own latents, and merge likewise; so a context is not sent from rank to rank, but costs more products.

On a CPU vLLM has one backend of this kind for each processor. They are replaced as in `twinattn.integrations.vllm`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder, split_kv_b_proj
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from fastattn import context_parallel, merge, mla
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import Plan, PrefillPlan
from twinattn.integrations.vllm import NAME_OVER_LATENTS, check_step, for_any_length
from twinattn.integrations.vllm_ranks import LatentDecodes, Ranks, merge_over_ranks, refuse_over_ranks, shard_of

LARGEST_LATENT = 576


@dataclass
class FastMLAMetadata:
    """What the layers of a step share; vLLM's layer reads the numbers.

    Attributes:
        num_actual_tokens: query rows, without those that only pad.
        num_decodes: sequences that attend absorbed; they come first.
        num_decode_tokens: their query rows.
        num_prefills: the other sequences.
        decode: the decodes; None without one.
        prefill: the plan of the prefills; None without one. Where ranks share latents, of new tokens among themselves.
        context: the plan of the prefills over the context that this rank has; None if it has all, or there is none.
        query_start_loc: vLLM's tensor, `[b + 1]`, which it reads where ranks share latents.
    """

    num_actual_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: LatentDecodes | None
    prefill: PrefillPlan | None
    context: Plan | None
    query_start_loc: Tensor


class FastMLAMetadataBuilder(AttentionMetadataBuilder[FastMLAMetadata]):
    """Makes the two plans of a step from vLLM's tables."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.workspace = MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size(vllm_config)
        self.shard = shard_of(kv_cache_spec, vllm_config)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)  # then vLLM puts decodes first

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> FastMLAMetadata:
        """Make the plans of a step.

        Args:
            common_prefix_len: not used; vLLM has it 0.
            common_attn_metadata: lengths and tables of the step.
            fast_build: not used.

        Raises:
            NotImplementedError: if queries are to see later keys, or a field is set that this backend does not know.
        """
        common = common_attn_metadata
        check_step(common, self.shard)
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        starts, tables = common.query_start_loc, common.block_table_tensor
        longest = int(common.max_query_len), int(common.max_seq_len)
        decode = prefill = context = None
        if decodes:
            own_lens = common.seq_lens if self.shard is None else common.dcp_local_seq_lens
            sizes = min(longest[0], self.reorder_batch_threshold), self._most_of_rank(longest[1])
            batch = Batch(starts[: decodes + 1], own_lens[:decodes], tables[:decodes], *sizes)
            decode = LatentDecodes(mla.plan(batch, block_size=self.block_size), batch.seq_lens)
        if prefills:
            prefill, context = self._plan_prefills(common, slice(decodes, decodes + prefills), prefill_tokens)
        return FastMLAMetadata(
            common.num_actual_tokens, decodes, decode_tokens, prefills, decode, prefill, context, starts
        )

    def _plan_prefills(self, common: Any, seqs: slice, num_tokens: int) -> tuple[PrefillPlan, Plan | None]:
        """Plan the prefills of a step, and their context apart if other ranks have a share of it."""
        starts, seq_lens = common.query_start_loc, common.seq_lens[seqs]
        starts = starts[seqs.start : seqs.stop + 1] - starts[seqs.start]
        tables, longest = common.block_table_tensor[seqs], (int(common.max_query_len), int(common.max_seq_len))
        lengths, most = common.query_start_loc_cpu.diff()[seqs], None
        if common.seq_lens_cpu_upper_bound is not None:  # or all chunks are visited up to the longest sequence
            most = max(0, int((common.seq_lens_cpu_upper_bound[seqs] - lengths).max()))
        if self.shard is None:
            batch = Batch(starts, seq_lens, tables, *longest, num_tokens=num_tokens)
            sizes = dict(block_size=self.block_size, workspace=self.workspace, max_context_len=most)
            return mla.plan_prefill(batch, **sizes), None
        new = Batch(starts, starts.diff(), tables, longest[0], longest[0], num_tokens=num_tokens)
        own = mla.plan_prefill(new, block_size=self.block_size, workspace=self.workspace, max_context_len=0)
        if most == 0:  # on every rank, as the bound is that of the whole sequence
            return own, None
        lens = context_parallel.local_lens(seq_lens - new.seq_lens, self.shard)
        keys = Batch(starts, lens, tables, longest[0], self._most_of_rank(longest[1]), num_tokens=num_tokens)
        return own, Plan(keys, self.block_size, causal=False)

    def _most_of_rank(self, longest: int) -> int:
        """Return the most tokens that a rank may have of a sequence."""
        if self.shard is None:
            return longest
        period = self.shard.num_ranks * self.shard.interleave
        return min(longest, -(-longest // period) * self.shard.interleave)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FastMLAMetadata:
        """Make the plan of decodes that are captured, from the buffers that their replays find filled anew."""
        return self.build(0, for_any_length(common_attn_metadata, self.vllm_config))


class FastMLAImpl(MLAAttentionImpl[FastMLAMetadata]):
    """The attention of a layer."""

    supports_pcp: bool = False
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
        indexer: object | None = None,
        q_pad_num_heads: int | None = None,
    ) -> None:
        for name, given in (
            ("alibi_slopes", alibi_slopes),
            ("sliding_window", sliding_window),
            ("logits_soft_cap", logits_soft_cap),
            ("kv_sharing_target_layer_name", kv_sharing_target_layer_name),
            ("indexer", indexer),
            ("q_pad_num_heads", q_pad_num_heads),
        ):
            if given:
                raise NotImplementedError(f"{name}: expected none over latents, got {type(given).__name__}")
        if attn_type != AttentionType.DECODER:
            kind = AttentionType(attn_type).value
            raise NotImplementedError(f"attn_type: expected {AttentionType.DECODER.value}, got {kind}")
        if kv_cache_dtype not in FastMLABackend.supported_kv_cache_dtypes:
            names = ", ".join(FastMLABackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: expected one of {names}, got {kv_cache_dtype}")
        refuse_over_ranks(self)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim = kv_lora_rank, qk_nope_head_dim, v_head_dim
        self.kv_b_proj = kv_b_proj
        self.options = AttentionOptions(softmax_scale=self.scale)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take the projections out of the weight: `[h nope r]` for keys, `[h dv r]` for values."""
        sizes = self.kv_lora_rank, self.num_heads, self.qk_nope_head_dim, self.v_head_dim
        keys, values = split_kv_b_proj(self.kv_b_proj, act_dtype, *sizes)  # [r h nope], [r h dv]
        self.projections = dict(key_projection=keys.permute(1, 2, 0), value_projection=values.permute(1, 2, 0))

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return that vLLM must not fuse a quantization of the output with this attention."""
        return False

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write new latents and rotary keys.

        Args:
            kv_c_normed: latents of the new tokens `[t, r]`, or of more, for padding.
            k_pe: rotary keys `[t, 1, rope]`.
            kv_cache: the pool, `[n, p, c]`; empty while vLLM measures memory.
            slot_mapping: where each token goes, `[t]`; -1 for padding.
            kv_cache_dtype: that of the layer.
            k_scale: not used, as the pool is not quantized.
            skip_scale: not used, likewise.
        """
        if kv_cache.numel():
            mla.write(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten())

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FastMLAMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend from the new tokens of prefills to themselves and to their context.

        Args:
            q: their queries `[t, h, nope + rope]`.
            kv_c_normed: their latents `[t, r]`.
            k_pe: their rotary keys `[t, 1, rope]`.
            kv_c_and_k_pe_cache: the pool, `[n, p, c]`.
            attn_metadata: of the step.
            k_scale: not used, as the pool is not quantized.
            output: where the answer goes, `[t, h * dv]`.
            output_scale: of a quantized answer, which this backend does not declare.

        Raises:
            NotImplementedError: for a quantized answer.
        """
        if output_scale is not None:
            raise NotImplementedError("output_scale: expected none, as this backend does not quantize its answer")
        plan, out = attn_metadata.prefill, output.view(-1, self.num_heads, self.v_head_dim)
        assert plan is not None
        given = q, kv_c_normed, k_pe.squeeze(1), kv_c_and_k_pe_cache, plan, self.options
        if attn_metadata.context is None:
            mla.prefill(*given, **self.projections, out=out)
            return
        new, new_lse = mla.prefill(*given, **self.projections, return_lse=True)
        latents, lse = self._attend_over_ranks(q, kv_c_and_k_pe_cache, attn_metadata.context)
        part = mla.project(latents, self.projections["value_projection"])
        out.copy_(merge.merge([new, part], [new_lse, lse])[0])

    def _attend_over_ranks(self, query: Tensor, cache: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
        """Attend absorbed, with the heads of all ranks, to the latents of this one; and merge over the ranks.

        Returns:
            Latents `[t, h, r]` of the rank's own heads in the type of the query, and their log-sum-exp `[t, h]`.
        """
        ranks = Ranks()
        queries = ranks.all_gather(mla.absorb(query, self.projections["key_projection"]), dim=1)
        given = queries, cache, plan, self.options
        part, lse = mla.attention(*given, latent_rank=self.kv_lora_rank, return_lse=True)
        latents, own_lse = merge_over_ranks(part, lse, ranks)
        return latents.to(query.dtype), own_lse

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: FastMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from the absorbed queries of decodes to the latents in the pool.

        Args:
            q: `[t, h, r + rope]`, or its two parts.
            kv_c_and_k_pe_cache: the pool, `[n, p, c]`.
            attn_metadata: of the step.
            layer: not used.

        Returns:
            Latents `[t, h, r]`, which vLLM projects to the outputs of the heads; and where it merges those of several
            ranks their natural log-sum-exp `[t, h]`, else None.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert attn_metadata.decode is not None
        latents = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        given = query, kv_c_and_k_pe_cache, attn_metadata.decode.plan, self.options
        if not self.need_to_return_lse_for_decode:
            mla.attention(*given, latent_rank=self.kv_lora_rank, out=latents)
            return latents, None
        _, lse = mla.attention(*given, latent_rank=self.kv_lora_rank, return_lse=True, out=latents)
        return latents, lse


class FastMLABackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM's flag takes."""
        return NAME_OVER_LATENTS

    @staticmethod
    def get_impl_cls() -> type[FastMLAImpl]:
        """Return the class of a layer's attention."""
        return FastMLAImpl

    @staticmethod
    def get_builder_cls() -> type[FastMLAMetadataBuilder]:
        """Return the class that makes the metadata of a step."""
        return FastMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of blocks, in tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether latents with rotary keys of this size are computed."""
        return head_size % 16 == 0 and head_size <= LARGEST_LATENT

    @classmethod
    def is_mla(cls) -> bool:
        """Return that this is for layers over latents."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether a GPU is new enough."""
        return bool(capability.major >= 8)
