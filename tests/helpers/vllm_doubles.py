"""Doubles of what the backend takes from vLLM, as vLLM 0.33 has it, for environments without vLLM.

`vllm_engine.py` runs the backend in vLLM itself and compares these with the real ones.
"""

import enum
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(enum.Enum):
    NEVER = 0


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    logits_indices_padded: torch.Tensor | None = None
    num_logits_indices: int | None = None
    max_logits_per_req: int | None = None
    encoder_seq_lens: torch.Tensor | None = None
    encoder_seq_lens_cpu: np.ndarray | None = None
    dcp_local_seq_lens: torch.Tensor | None = None
    dcp_local_seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    req_idx: np.ndarray | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None
    replayssm_decode_base_cpu: torch.Tensor | None = None
    _num_computed_tokens_cache: torch.Tensor | None = None


class AttentionBackend:
    supported_kv_cache_dtypes = ["auto"]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes


class AttentionImpl(Generic[T]):
    pass


class MLAAttentionImpl(Generic[T]):
    pass


class EncoderOnlyAttentionSpec(SimpleNamespace):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = device

    def _init_reorder_batch_threshold(self, reorder_batch_threshold, supports_spec_as_decode):
        self.reorder_batch_threshold = reorder_batch_threshold


class MLACommonMetadataBuilder:
    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config):
        return 24  # tokens, so that contexts come in several chunks


def split_kv_b_proj(kv_b_proj, out_dtype, kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim):
    """Split a weight `[h * (nope + dv), r]` into `[r, h, nope]` and `[r, h, dv]`."""
    weight = kv_b_proj.weight.to(out_dtype).T.view(kv_lora_rank, num_heads, qk_nope_head_dim + v_head_dim)
    return weight.split([qk_nope_head_dim, v_head_dim], dim=-1)


def split_decodes_and_prefills(common, decode_threshold):
    """Split where the first sequence has more new tokens, as vLLM has put decodes first."""
    lens = common.query_start_loc_cpu.diff().tolist()
    decodes = next((i for i, length in enumerate(lens) if length > decode_threshold), len(lens))
    tokens = sum(lens[:decodes])
    return decodes, len(lens) - decodes, tokens, sum(lens) - tokens


def modules(on_cpu: bool) -> dict[str, ModuleType]:
    """Make the modules of vLLM that the backend imports."""
    registered = {}

    class AttentionBackendEnum:
        CPU_ATTN = "CPU_ATTN"
        __members__ = registered

        def __class_getitem__(cls, name):
            return name

    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.register_backend = registered.__setitem__
    backend = ModuleType("vllm.v1.attention.backend")
    for kind in (
        AttentionType,
        MultipleOf,
        AttentionCGSupport,
        CommonAttentionMetadata,
        AttentionBackend,
        AttentionImpl,
        MLAAttentionImpl,
        AttentionMetadataBuilder,
    ):
        setattr(backend, kind.__name__, kind)
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(is_cpu=lambda: on_cpu)
    envs = ModuleType("vllm.envs")
    envs.VLLM_BATCH_INVARIANT = False
    specs, utils = ModuleType("vllm.v1.kv_cache_interface"), ModuleType("vllm.v1.attention.backends.utils")
    over_latents = ModuleType("vllm.model_executor.layers.attention.mla_attention")
    specs.EncoderOnlyAttentionSpec, utils.split_decodes_and_prefills = (
        EncoderOnlyAttentionSpec,
        split_decodes_and_prefills,
    )
    over_latents.MLACommonMetadataBuilder, over_latents.split_kv_b_proj = MLACommonMetadataBuilder, split_kv_b_proj
    vllm = ModuleType("vllm")
    vllm.envs = envs
    made = [vllm, envs, platforms, backend, registry, specs, utils, over_latents]
    made += [ModuleType(name) for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")]
    made += [ModuleType(f"vllm.model_executor{name}") for name in ("", ".layers", ".layers.attention")]
    return {module.__name__: module for module in made}


def install(monkeypatch, *, on_cpu: bool = True) -> ModuleType:
    """Import the backend over the doubles, until a test ends."""
    for name, module in modules(on_cpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fastattn.integrations.vllm", raising=False)
    import fastattn.integrations.vllm as backend

    monkeypatch.delattr("fastattn.integrations.vllm", raising=False)
    monkeypatch.setitem(sys.modules, "fastattn.integrations.vllm", backend)
    return backend


def install_over_latents(monkeypatch) -> ModuleType:
    """Import the part for latents over the doubles, until a test ends."""
    install(monkeypatch)
    monkeypatch.delitem(sys.modules, "fastattn.integrations.vllm_mla", raising=False)
    import fastattn.integrations.vllm_mla as backend

    monkeypatch.delattr("fastattn.integrations.vllm_mla", raising=False)
    monkeypatch.setitem(sys.modules, "fastattn.integrations.vllm_mla", backend)
    return backend


NOT_DECLARED = {  # what vLLM does not validate on a CPU
    "mm_req_doc_ranges": {0: [(1, 4)]},
    "rswa_prefix_lens": torch.tensor([3]),
    "dcp_local_seq_lens": torch.tensor([3]),
    "encoder_seq_lens": torch.tensor([3]),
    "encoder_seq_lens_cpu": np.array([3]),
}
