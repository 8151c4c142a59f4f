"""Doubles of what the backend takes from SGLang, as SGLang 0.5.23 has it, for environments without SGLang.

`make sglang-test` runs the backend over SGLang's own classes.
"""

import enum
import sys
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

REGISTRY: dict[str, Any] = {}  # backends by name
CHOICES: list[str] = []  # what the argument parser takes


class AttentionType(enum.Enum):
    DECODER = "decoder"
    DECODER_BIDIRECTIONAL = "decoder_bidirectional"
    ENCODER_ONLY = "encoder_only"


class AttentionBackend:
    kv_index_translator: Any = None


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None


def register_attention_backend(name):
    return lambda made: REGISTRY.setdefault(name, made)


def add_attention_backend_choices(names):
    CHOICES.extend(names)


class Mode(enum.Enum):
    """What of SGLang's `ForwardMode` a step may be."""

    DECODE = enum.auto()
    EXTEND = enum.auto()
    MIXED = enum.auto()
    TARGET_VERIFY = enum.auto()
    IDLE = enum.auto()

    def is_decode(self):
        return self is Mode.DECODE

    def is_idle(self):
        return self is Mode.IDLE

    def is_extend(self):
        return self in (Mode.EXTEND, Mode.MIXED, Mode.TARGET_VERIFY)


class Pool:
    """A pool of rows, `[slots, hk, d]`, for layer 3; fp8 is written divided by the layer's scales."""

    def __init__(self, slots, kv_heads, size, value_size, dtype=torch.float32):
        self.dtype = dtype
        self.key = torch.full((slots, kv_heads, size), torch.nan).to(dtype)
        self.value = torch.full((slots, kv_heads, value_size), torch.nan).to(dtype)

    def get_key_buffer(self, layer_id):
        assert layer_id == 3
        return self.key

    def get_value_buffer(self, layer_id):
        assert layer_id == 3
        return self.value

    def set_kv_buffer(self, layer, loc_info, key, value, k_scale=None, v_scale=None):
        for pool, rows, scale in ((self.key, key, k_scale), (self.value, value, v_scale)):
            pool[loc_info.loc] = (rows if scale is None else rows / scale).to(self.dtype)


def layer(heads, kv_heads, size, value_size, **changes):
    """Make a `RadixAttention`."""
    given = dict(
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        tp_v_head_num=kv_heads,
        qk_head_dim=size,
        v_head_dim=value_size,
        scaling=size**-0.5,
        layer_id=3,
        logit_cap=0.0,
        logit_capping_method="tanh",
        sliding_window_size=-1,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        xai_temperature_len=-1,
        use_irope=False,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
    )
    assert given.keys() >= changes.keys()
    return SimpleNamespace(**given | changes)


MODULES = {
    "layers.attention.attention_registry": dict(register_attention_backend=register_attention_backend),
    "layers.attention.base_attn_backend": dict(AttentionBackend=AttentionBackend),
    "layers.radix_attention": dict(AttentionType=AttentionType),
    "mem_cache.memory_pool": dict(KVWriteLoc=KVWriteLoc),
    "server_args": dict(add_attention_backend_choices=add_attention_backend_choices),
}


def install(monkeypatch):
    """Import the backend over the doubles, until a test ends."""
    for path, members in MODULES.items():
        name = "sglang"
        for part in ["srt", *path.split(".")]:
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
            name = f"{name}.{part}"
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "twinattn.integrations.sglang", raising=False)
    REGISTRY.clear()
    CHOICES.clear()
    return import_module("twinattn.integrations.sglang")
