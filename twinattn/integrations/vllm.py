"""An attention backend for vLLM, over the paged paths of `fastattn`.

    vllm serve MODEL --attention-backend FASTATTN            on a GPU
    FASTATTN_REPLACES_CPU_ATTN=1 vllm serve MODEL            on a CPU, where vLLM takes its own backend for any other

vLLM finds `register` by the entry point `vllm.general_plugins` of this package, in every process that it starts. Its
scheduler, its block pool and its tensor parallelism stay as they are; what is computed here is a layer:

    once a step     the builder makes a `Batch` of vLLM's tables, and a plan for each width of window in the group
    in each layer   the new keys and values are written, and the queries attend, to where the answer is wanted

vLLM keeps keys and values side by side, `[n, hk, p, 2 d]` in any order of memory; a view of each, `[n, p, hk, d]`, is a
pool as the paths know it. An fp8 pool is one of bytes, with one scale for all keys of a layer and one for all values:
tensors of one number, which the host never reads.

What is declared here is what a validation of vLLM lets through; anything else it refuses by name before it loads a
model. On a CPU it does not validate; there, the layer and the builder refuse.

Where ranks share the keys of a sequence (`--decode-context-parallel-size`), each attends with the query heads of all of
them to its own keys, and the partial outputs merge by their log-sum-exps: `fastattn.context_parallel`, over vLLM's own
group of ranks.

Decodes of one token can be captured whole, as CUDA graphs. A captured step keeps what it launches, so it is made for
the longest sequence that the model serves; lengths, tables and slots are in buffers of vLLM, which a replay finds
filled anew, with 0 new tokens for padding. Of a step with prompts, vLLM captures what lies between the attentions.

Written against vLLM 0.32 (its CPU wheel) and 0.33.
"""

import copyreg
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

from fastattn import chunked_prefill, context_parallel, quantized, varlen
from fastattn.kv_cache import write
from refattn.batch import Batch
from refattn.options import AttentionOptions
from refattn.plan import ContextParallelPlan, Plan
from refattn.ranks import Shard
from refattn.scales import Fp8Scales
from twinattn.integrations.vllm_ranks import Ranks, is_capturing, refuse_over_ranks, shard_of
from twinattn.integrations.vllm_warm_up import steps_with_prompts, warm_up

NAME = "FASTATTN"
BACKEND = "twinattn.integrations.vllm.FastAttentionBackend"
NAME_OVER_LATENTS = "FASTATTN_MLA"
BACKEND_OVER_LATENTS = "twinattn.integrations.vllm_mla.FastMLABackend"
ON_CPU = "FASTATTN_REPLACES_CPU_ATTN"
LARGEST_HEAD = 256
# Fields of a step's metadata that the builder reads, and hints, which change no answer. What else is set, it refuses.
READ = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
    "causal",
)
OF_RANKS = ("dcp_local_seq_lens",)  # what it reads where ranks share the keys of a sequence
HINTS = (
    "logits_indices_padded",
    "num_logits_indices",
    "max_logits_per_req",
    "dcp_local_seq_lens_cpu_upper_bound",
    "positions",
    "is_prefilling",
    "seq_lens_cpu_upper_bound",
    "req_idx",
    "replayssm_decode_base_cpu",
)
ATTENDS = (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
FP8_FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def register() -> None:
    """Make the backend known to vLLM, which calls this in every process; to do so again changes nothing.

    On a CPU vLLM has backends of its own, and goes on with them whatever is asked for. Where the environment variable
    `FASTATTN_REPLACES_CPU_ATTN` is 1, these stand in their place.
    """
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, BACKEND)
        register_backend(NAME_OVER_LATENTS, BACKEND_OVER_LATENTS)
        copyreg.pickle(AttentionBackendEnum, _reduce)
    if current_platform.is_cpu() and os.environ.get(ON_CPU) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
        for name in ("CPU_MLA", "AMX_MLA"):  # whichever this processor has
            register_backend(AttentionBackendEnum[name], BACKEND_OVER_LATENTS)


def _reduce(backend: AttentionBackendEnum) -> tuple[Callable[[str], AttentionBackendEnum], tuple[str]]:
    """Return how to pickle a name of vLLM's: one of this package registers itself where it is read.

    `vllm serve` spawns its engine, and pickles the configuration for it. A spawned process reads that before it loads
    a plugin, and an enumeration reads a member by its value, which vLLM's own does not have until then.
    """
    if backend.name in (NAME, NAME_OVER_LATENTS):
        return _registered, (backend.name,)
    return AttentionBackendEnum, (backend.value,)


def _registered(name: str) -> AttentionBackendEnum:
    """Return the member of vLLM's enumeration for a backend of this package, and register it first if need be.

    Args:
        name: "FASTATTN" or "FASTATTN_MLA".
    """
    register()
    return AttentionBackendEnum[name]


def check_step(common: Any, shard: Shard | None = None, *, is_causal: bool = True) -> None:
    """Check that a builder knows every field that vLLM has set for a step.

    Raises:
        NotImplementedError: for one that it does not know, and for another mask.
    """
    known = (*READ, *HINTS, *(OF_RANKS if shard is not None else ()))
    for name in (x.name for x in fields(common) if x.name not in known and x.name[0] != "_"):
        value = getattr(common, name)
        if value is not None and (isinstance(value, Tensor) or not hasattr(value, "__len__") or len(value)):
            raise NotImplementedError(
                f"{name}: expected none, got {type(value).__name__}; this backend does not declare what it is for"
            )
    if common.causal is not is_causal:
        raise NotImplementedError(f"causal: expected {is_causal}, got {common.causal}; this backend declares no other")


@dataclass
class FastAttentionMetadata:
    """What the layers of a step share.

    Attributes:
        batch: vLLM's tables.
        block_size: tokens in a block.
        num_actual_tokens: query rows, without those that only pad.
        is_encoder: whether tokens see each other, in both directions, and no cache.
        shard: this rank's share of each sequence; None if it has all keys.
        plans: those of the step so far, by window.
        over_ranks: those of the step so far over several ranks, by whether they were captured.
    """

    batch: Batch
    block_size: int
    num_actual_tokens: int
    is_encoder: bool = False
    shard: Shard | None = None
    plans: dict[int | None, Plan] = field(default_factory=dict)
    over_ranks: dict[bool, ContextParallelPlan] = field(default_factory=dict)

    def plan(self, sliding_window: int | None) -> Plan:
        """Return the plan of a window, in tokens; None for no window. The layers of a group may differ in theirs."""
        if sliding_window not in self.plans:
            reach = -1 if sliding_window is None else sliding_window - 1
            if self.is_encoder:
                made = varlen.plan(self.batch, causal=False, window_size=(reach, reach))
            else:
                window = (reach, -1 if sliding_window is None else 0)
                made = chunked_prefill.plan(self.batch, block_size=self.block_size, window_size=window)
            self.plans[sliding_window] = made
        return self.plans[sliding_window]

    def plan_over_ranks(self) -> ContextParallelPlan:
        """Return the plan of this rank. A capture makes its own, so that a replay computes a rank's lengths anew."""
        captured = is_capturing(self.batch.device)
        if captured not in self.over_ranks:
            assert self.shard is not None
            made = context_parallel.plan(self.batch, shard=self.shard, block_size=self.block_size)
            self.over_ranks[captured] = made
        return self.over_ranks[captured]


def for_any_length(common: Any, vllm_config: Any) -> Any:
    """Return vLLM's metadata for a step to capture, whose replays may have sequences as long as the model serves."""
    return replace(common, max_seq_len=max(int(common.max_seq_len), vllm_config.model_config.max_model_len))


class FastAttentionMetadataBuilder(AttentionMetadataBuilder[FastAttentionMetadata]):
    """Makes the metadata of a step from vLLM's tables, which it takes as they are: nothing is read or copied."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size: int = kv_cache_spec.block_size
        self.is_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        self.shard = None if self.is_encoder else shard_of(kv_cache_spec, vllm_config)
        self.is_warm = device.type == "cpu" or self.is_encoder or self.shard is not None

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FastAttentionMetadata:
        """Make the metadata of a step.

        Args:
            common_prefix_len: not used; vLLM has it 0.
            common_attn_metadata: lengths and tables of the step.
            fast_build: not used, as nothing here takes long.

        Raises:
            NotImplementedError: if queries are to see later keys, or a field is set that this backend does not know:
                ranges of images that see each other, prefixes that a window keeps.
        """
        common = common_attn_metadata
        check_step(common, self.shard, is_causal=not self.is_encoder)
        # Not how many tokens there are: vLLM may count padding, and kernels would take all sequences for equally long.
        batch = Batch(
            cu_seqlens_q=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=None if self.is_encoder else common.block_table_tensor,
            max_query_len=int(common.max_query_len),  # chunked attention makes them with NumPy
            max_seq_len=int(common.max_seq_len),
        )
        return FastAttentionMetadata(batch, self.block_size, common.num_actual_tokens, self.is_encoder, self.shard)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return which steps can be captured: decodes of one token; none of an encoder, which has no decodes."""
        is_encoder = isinstance(kv_cache_spec, EncoderOnlyAttentionSpec)
        return AttentionCGSupport.NEVER if is_encoder else cls._cudagraph_support

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FastAttentionMetadata:
        """Make the metadata of a step that is captured, from the buffers that its replays find filled anew.

        Before the first one, steps with prompts are computed, as vLLM computes none before it serves.
        """
        if not (self.is_warm or is_capturing(self.device)):
            self.is_warm = True
            self._warm_up()
        return self.build(0, for_any_length(common_attn_metadata, self.vllm_config))

    def _warm_up(self) -> None:
        """Compile the kernels that prompts take in the layers of this group."""
        config = self.vllm_config
        sizes = config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs
        steps = steps_with_prompts(*sizes, config.model_config.max_model_len)
        known = config.compilation_config.static_forward_context
        layers = [known[name] for name in self.layer_names if name in known]

        def make_step(batch: Batch, num_tokens: int) -> FastAttentionMetadata:
            return FastAttentionMetadata(batch, self.block_size, num_tokens)

        warm_up(layers, make_step, steps, config.model_config.dtype)


class FastAttentionImpl(AttentionImpl[FastAttentionMetadata]):
    """The attention of a layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
        chunk_lookback: int | None = -1,
    ) -> None:
        if not FastAttentionBackend.supports_attn_type(attn_type):
            names, kind = " or ".join(x.value for x in ATTENDS), AttentionType(attn_type).value
            raise NotImplementedError(f"attn_type: expected {names}, got {kind}")
        if chunk_lookback not in (None, -1):  # windows that begin at a chunk
            raise NotImplementedError(f"chunk_lookback: expected -1, got {chunk_lookback}")
        self.is_encoder = attn_type == AttentionType.ENCODER_ONLY
        if not FastAttentionBackend.supports_kv_cache_dtype(kv_cache_dtype):
            names = ", ".join(FastAttentionBackend.supported_kv_cache_dtypes)
            raise NotImplementedError(f"kv_cache_dtype: expected one of {names}, got {kv_cache_dtype}")
        refuse_over_ranks(
            self,
            sliding_window=sliding_window,
            use_alibi_sqrt=use_alibi_sqrt,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
        )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks, self.alibi_sqrt = sinks, use_alibi_sqrt
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    @cached_property
    def options(self) -> AttentionOptions:
        """The options of the layer: made by its first step, as sinks are weights, which a model loads later."""
        given = (self.scale, self.softcap, self.alibi_slopes, self.sinks, envs.VLLM_BATCH_INVARIANT)
        return AttentionOptions(*given, alibi_sqrt=self.alibi_sqrt)

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values; vLLM does not call this in a layer that shares the cache of another.

        It does in a layer of an encoder, whose pool is an empty tensor: there is nothing to write.

        Args:
            layer: has the scales of an fp8 pool.
            key: of the new tokens `[t, hk, d]`, or of more, for padding.
            value: likewise.
            kv_cache: the pool, `[n, hk, p, 2 d]`.
            slot_mapping: where each token goes, `[t]`; -1 for padding.
        """
        if self.is_encoder:
            return
        new = (key, value, *self._pools(kv_cache), slot_mapping)
        if self.kv_cache_dtype in FP8_FORMATS:
            quantized.write(*new, scales=self._scales(layer))
        else:
            write(*new)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FastAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from the new tokens to those in the pool.

        Args:
            layer: has the scales of an fp8 pool.
            query: of the new tokens `[t, h, d]`, and of padding; not quantized, as this backend does not ask for that.
            key: of the tokens `[t, hk, d]`, for an encoder, and where ranks share the keys of a sequence; otherwise
                not used, as the keys are in the pool.
            value: likewise.
            kv_cache: the pool, `[n, hk, p, 2 d]`.
            attn_metadata: of the step; None while vLLM measures memory.
            output: where the answer goes, `[t, h, d]`.
            output_scale: of a quantized answer, which this backend does not declare.
            output_block_scale: likewise.

        Raises:
            NotImplementedError: for a quantized answer.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: expected none, as this backend does not quantize its answer")
        if attn_metadata is None:
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        if attn_metadata.shard is not None:
            context_parallel.attention(
                *(query[:tokens], key[:tokens], value[:tokens], *self._pools(kv_cache)),
                attn_metadata.plan_over_ranks(),
                self.options,
                group=Ranks(),
                scales=self._scales(layer) if self.kv_cache_dtype in FP8_FORMATS else None,
                out=output[:tokens],
            )
            return output
        plan = attn_metadata.plan(self.sliding_window)
        if self.is_encoder:  # its tokens are all here; there is no pool
            varlen.attention(query[:tokens], key[:tokens], value[:tokens], plan, self.options, out=output[:tokens])
            return output
        arguments, out = (query[:tokens], *self._pools(kv_cache), plan, self.options), output[:tokens]
        if self.kv_cache_dtype in FP8_FORMATS:
            quantized.attention(*arguments, scales=self._scales(layer), out=out)
        else:
            chunked_prefill.attention(*arguments, out=out)
        return output

    def _scales(self, layer: Any) -> Fp8Scales:
        """Return the scales of a layer, seen once for each KV head: what vLLM writes into them later shows."""
        for name in ("_k_scale", "_v_scale"):
            if getattr(layer, name).numel() != 1:
                shape = list(getattr(layer, name).shape)
                raise NotImplementedError(
                    f"{name}: expected one number for the layer, got {shape}; there is none per head"
                )
        key, value = (scale.reshape(1).expand(self.num_kv_heads) for scale in (layer._k_scale, layer._v_scale))
        return Fp8Scales(key, value, format=FP8_FORMATS[self.kv_cache_dtype])

    def _pools(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a pool as views `[n, p, hk, d]`."""
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return key_cache, value_cache


class FastAttentionBackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *FP8_FORMATS]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM's flag takes."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FastAttentionImpl]:
        """Return the class of a layer's attention."""
        return FastAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FastAttentionMetadataBuilder]:
        """Return the class that makes the metadata of a step."""
        return FastAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the sizes of blocks, in tokens."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether a head of this size is computed."""
        return head_size % 8 == 0 and head_size <= LARGEST_HEAD

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return whether layers of this type are computed: of decoders, and of encoders that stand alone."""
        return attn_type in ATTENDS

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether attention sinks are computed."""
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        """Return whether ALiBi by the root of the distance is computed."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether windows are computed."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether a row can be computed alike whatever else is in the batch."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether a GPU is new enough."""
        return bool(capability.major >= 8)
