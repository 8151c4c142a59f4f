"""Doubles of what the backend takes from vLLM, as vLLM 0.33 has it, for environments without vLLM.

`test_vllm_interface.py` compares them with a table made from vLLM's sources, and `call` passes arguments as vLLM does.
"""

import enum
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from tests.helpers import vllm_interface

T = TypeVar("T")


class AttentionType(enum.StrEnum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionCGSupport(enum.Enum):
    UNIFORM_SINGLE_TOKEN_DECODE = 1
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
    _token_to_req_indices_cache: torch.Tensor | None = None


class AttentionBackend:
    supported_kv_cache_dtypes = ["auto"]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes


class AttentionImplBase(Generic[T]):
    dcp_world_size, pcp_world_size, need_to_return_lse_for_decode = 1, 1, False


class AttentionImpl(AttentionImplBase[T]):
    pass


class MLAAttentionImpl(AttentionImplBase[T]):
    def fused_output_quant_supported(self, quant_key):
        return True


class EncoderOnlyAttentionSpec(SimpleNamespace):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = device

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold=1, supports_spec_as_decode=False, supports_dcp_with_varlen=False
    ):
        self.reorder_batch_threshold = reorder_batch_threshold


class MLACommonMetadataBuilder:
    @staticmethod
    def determine_chunked_prefill_workspace_size(vllm_config):
        return 24  # tokens, so that contexts come in several chunks


def split_kv_b_proj(kv_b_proj, out_dtype, kv_lora_rank, num_heads, qk_nope_head_dim, v_head_dim):
    """Split a weight `[h * (nope + dv), r]` into `[r, h, nope]` and `[r, h, dv]`."""
    weight = kv_b_proj.weight.to(out_dtype).T.view(kv_lora_rank, num_heads, qk_nope_head_dim + v_head_dim)
    return weight.split([qk_nope_head_dim, v_head_dim], dim=-1)


def split_decodes_and_prefills(
    common_attn_metadata, decode_threshold=1, require_uniform=False, treat_short_extends_as_decodes=True
):
    """Split where the first sequence has more new tokens, as vLLM has put decodes first."""
    lens = common_attn_metadata.query_start_loc_cpu.diff().tolist()
    decodes = next((i for i, length in enumerate(lens) if length > decode_threshold), len(lens))
    tokens = sum(lens[:decodes])
    return decodes, len(lens) - decodes, tokens, sum(lens) - tokens


class GroupCoordinator:
    """vLLM's ranks, over those of a simulation."""

    def __init__(self, group, device_communicator=None):
        self.rank_in_group, self.world_size, self._group = group.rank, group.size, group
        self.device_communicator = device_communicator

    def all_gather(self, input_, dim=-1):
        return self._group.all_gather(input_, dim)

    def reduce_scatter(self, input_, dim=-1):
        return self._group.reduce_scatter(input_, dim)


RANKS: ContextVar[GroupCoordinator | None] = ContextVar("ranks", default=None)  # each thread has its own


def get_dcp_group():
    return RANKS.get()


def get_dcp_world_size_and_rank(enabled=True):
    ranks = RANKS.get() if enabled else None
    return (1, 0) if ranks is None else (ranks.world_size, ranks.rank_in_group)


REGISTERED: dict[str, str] = {}


class AttentionBackendEnum:
    """An enumeration of names: one is pickled by its value, which nothing but a member has."""

    CPU_ATTN = "CPU_ATTN"
    __members__ = REGISTERED

    def __init__(self, value):
        self.name = next((name for name, path in REGISTERED.items() if path == value), None)
        if self.name is None:
            raise ValueError(f"{value!r} is not a valid AttentionBackendEnum")
        self.value = value

    def __class_getitem__(cls, name):
        return name

    def __reduce__(self):
        return type(self), (self.value,)


def register_backend(backend, class_path=None, is_mamba=False):
    REGISTERED[backend] = class_path


def call(receiver: Any, to: str, **values: Any) -> Any:
    """Call a method, named as in the table of vLLM's calls, with the arguments by position that vLLM so passes.

    Args:
        receiver: a backend, a builder or a layer's attention of ours.
        to: vLLM's base class and the method, as "AttentionImpl.forward".
        values: by vLLM's names; the others are None, as vLLM passes what a model does not have.
    """
    table = [*vllm_interface.stored().values()][-1]
    callers = (*(f"{vllm_interface.LAYERS}/{x}.py" for x in ("attention", "mla_attention")), "v1/worker/utils.py")
    by = next(x for x in table["calls"] if x["to"] == to and set(x["files"]).intersection(callers))
    names = list(vllm_interface.signature(table["signatures"][to]).parameters)[1:]
    names, by_name = names[: by["positional"]], by["names"]
    assert {*values} <= {*names, *by_name}, f"vLLM passes {names} and {by_name} to {to}"
    method = getattr(receiver, to.partition(".")[2])
    return method(*(values.get(name) for name in names), **{name: values.get(name) for name in by_name})


def modules(on_cpu: bool) -> dict[str, ModuleType]:
    """Make the modules of vLLM that the backend imports."""
    REGISTERED.clear()

    registry = ModuleType("vllm.v1.attention.backends.registry")
    registry.AttentionBackendEnum = AttentionBackendEnum
    registry.register_backend = register_backend
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
    ranks = ModuleType("vllm.distributed.parallel_state")
    ranks.get_dcp_group, ranks.get_dcp_world_size_and_rank = get_dcp_group, get_dcp_world_size_and_rank
    made = [vllm, envs, platforms, backend, registry, specs, utils, over_latents, ranks, ModuleType("vllm.distributed")]
    made += [ModuleType(name) for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends")]
    made += [ModuleType(f"vllm.model_executor{name}") for name in ("", ".layers", ".layers.attention")]
    return {module.__name__: module for module in made}


def install(monkeypatch, *, on_cpu: bool = True) -> ModuleType:
    """Import the backend over the doubles, until a test ends."""
    for name, module in modules(on_cpu).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "twinattn.integrations.vllm", raising=False)
    import twinattn.integrations.vllm as backend

    monkeypatch.delattr("twinattn.integrations.vllm", raising=False)
    monkeypatch.setitem(sys.modules, "twinattn.integrations.vllm", backend)
    return backend


def install_over_latents(monkeypatch) -> ModuleType:
    """Import the part for latents over the doubles, until a test ends."""
    install(monkeypatch)
    monkeypatch.delitem(sys.modules, "twinattn.integrations.vllm_mla", raising=False)
    import twinattn.integrations.vllm_mla as backend

    monkeypatch.delattr("twinattn.integrations.vllm_mla", raising=False)
    monkeypatch.setitem(sys.modules, "twinattn.integrations.vllm_mla", backend)
    return backend


NOT_DECLARED = {  # what vLLM does not validate on a CPU
    "mm_req_doc_ranges": {0: [(1, 4)]},
    "rswa_prefix_lens": torch.tensor([3]),
    "encoder_seq_lens": torch.tensor([3]),
    "encoder_seq_lens_cpu": np.array([3]),
}
