"""The modules of transformers whose layers keep a state: what they do between their projections, over paged states.

transformers calls no interface for them, so their `forward` is replaced while an engine runs the model. Projections,
norms and gates stay the module's own; the convolution and the recurrence are those of the twin:

    class                                                       decay          rule        model
    Qwen3NextGatedDeltaNet, Qwen3_5.., OlmoHybrid..             per head       delta       `gated_delta_net`
    KimiLinearDeltaAttention                                    per channel    delta       `kimi_delta_attention`
    NemotronHMamba2Mixer, GraniteMoeHybrid.., Bamba.., Falcon.. per head       addition    `mamba2`
    MiniMaxLightningAttention                                   constant       addition    `lightning_attention`

Where one token is decoded, the Mamba-2 modules of transformers do not bound `dt`, and elsewhere they do; here every
token is treated as in a prompt.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import sigmoid, silu, softplus

from refattn.options import RecurrentOptions
from twinattn.engine.state_layers import Recurrence, StateLayer

NORM_EPS = 1e-6  # the norm of queries and keys
ADDITION = RecurrentOptions(scale=1.0, delta=False)


def gated_delta_net(
    module: Any, recurrence: Recurrence, hidden_states: Float[Tensor, "1 t width"]
) -> Float[Tensor, "1 t width"]:
    """Take a gated delta net: one projection for all (Qwen3-Next), or several (Qwen3.5, OLMo Hybrid)."""
    if hasattr(module, "in_proj_qkvz"):
        both = module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
        query, key, value, gate, b, a = (x[0] for x in module.fix_query_key_value_ordering(*both))
        inputs = torch.cat([x.flatten(1) for x in (query, key, value)], dim=-1)
        project = module.out_proj
    elif hasattr(module, "in_proj_qkv"):
        parts = module.in_proj_qkv, module.in_proj_z, module.in_proj_b, module.in_proj_a
        inputs, gate, b, a = (projection(hidden_states)[0] for projection in parts)
        project = module.out_proj
    else:
        inputs = torch.cat([p(hidden_states)[0] for p in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        gate, b, a = (p(hidden_states)[0] for p in (module.g_proj, module.b_proj, module.a_proj))
        project = module.o_proj
    query, key, value = _convolve(module, recurrence, inputs).split(
        [module.key_dim, module.key_dim, module.value_dim], dim=-1
    )
    query, key = (_unit(_heads(x, module.head_k_dim)) for x in (query, key))
    log_decay = -module.A_log.float().exp() * softplus(a.float() + module.dt_bias)
    beta = b.sigmoid() * (2.0 if getattr(module, "allow_neg_eigval", False) else 1.0)
    out = recurrence.attention(query, key, _heads(value, module.head_v_dim), log_decay, beta)
    norm = module.o_norm if hasattr(module, "o_norm") else module.norm
    out = norm(out.flatten(0, 1), gate.reshape(-1, module.head_v_dim))
    return project(out.view(1, -1, module.value_dim))


def kimi_delta_attention(
    module: Any, recurrence: Recurrence, hidden_states: Float[Tensor, "1 t width"]
) -> Float[Tensor, "1 t width"]:
    """Take Kimi Linear: a decay for each channel of the keys."""
    inputs = torch.cat([p(hidden_states)[0] for p in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
    mixed = _convolve(module, recurrence, inputs).chunk(3, dim=-1)
    query, key, value = (_heads(x, module.head_dim) for x in mixed)
    log_decay, beta = module.forget_gate(hidden_states)[0], module.b_proj(hidden_states)[0].sigmoid()
    out = recurrence.attention(_unit(query), _unit(key), value, log_decay, beta)
    gate = _heads(module.g_b_proj(module.g_a_proj(hidden_states))[0], module.head_dim)
    return module.o_proj(module.o_norm(out, gate).flatten(1)[None])


def mamba2(
    module: Any, recurrence: Recurrence, hidden_states: Float[Tensor, "1 t width"]
) -> Float[Tensor, "1 t width"]:
    """Take a Mamba-2: `C`, `B` and `x` are query, key and value, and `dt` says how much is written and forgotten."""
    if hasattr(module, "mup_vector"):  # Falcon-H1
        projected = module.in_proj(hidden_states * module.ssm_in_multiplier) * module.mup_vector
    else:
        projected = module.in_proj(hidden_states)
    gate, inputs, dt = projected[0].split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    group_size = module.n_groups * module.ssm_state_size
    x, b, c = _convolve(module, recurrence, inputs).split([module.intermediate_size, group_size, group_size], dim=-1)
    x, b, c = _heads(x, module.head_dim), _heads(b, module.ssm_state_size), _heads(c, module.ssm_state_size)
    dt = softplus(dt + module.dt_bias.to(dt.dtype)).clamp(*module.time_step_limit)
    out = recurrence.attention(c, b, x, -module.A_log.float().exp() * dt.float(), dt, ADDITION)
    out = (out + module.D[:, None] * x).flatten(1)
    out = module.norm(out, gate) if getattr(module, "mamba_rms_norm", True) else out * silu(gate)
    return module.out_proj(out.to(hidden_states.dtype)[None])


def lightning_attention(
    module: Any, recurrence: Recurrence, hidden_states: Float[Tensor, "1 t width"]
) -> tuple[Float[Tensor, "1 t width"], None]:
    """Take MiniMax: each head has a decay of its own, the same for all tokens."""
    heads = _heads(module.act_fn(module.qkv_proj(hidden_states))[0], 3 * module.head_dim)
    query, key, value = heads.chunk(3, dim=-1)
    num_tokens = len(query)
    log_decay = -module.slope_rate.flatten().expand(num_tokens, -1)
    out = recurrence.attention(query, key, value, log_decay, torch.ones_like(log_decay), ADDITION)
    normed = module.norm(out.flatten(1)[None])
    return module.out_proj(sigmoid(module.output_gate(hidden_states)) * normed), None


def _convolve(module: Any, recurrence: Recurrence, inputs: Float[Tensor, "t c"]) -> Float[Tensor, "t c"]:
    return recurrence.convolve(inputs, module.conv1d.weight[:, 0], module.conv1d.bias)


def _heads(x: Float[Tensor, "t width"], size: int) -> Float[Tensor, "t h d"]:
    return rearrange(x, "t (h d) -> t h d", d=size)


def _unit(x: Float[Tensor, "t h d"]) -> Float[Tensor, "t h d"]:
    """Return vectors of length 1, but for what keeps those of length 0 from a division by 0."""
    wide = x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)


def _delta_state(module: Any) -> StateLayer:
    sizes = module.num_v_heads, module.head_v_dim, module.head_k_dim
    return StateLayer(*sizes, module.conv_kernel_size, module.conv_dim, module.num_k_heads)


def _kimi_state(module: Any) -> StateLayer:
    sizes = module.num_heads, module.head_dim, module.head_dim
    return StateLayer(*sizes, module.conv_kernel_size, module.conv_dim, per_channel=True)


def _mamba2_state(module: Any) -> StateLayer:
    sizes = module.num_heads, module.head_dim, module.ssm_state_size
    return StateLayer(*sizes, module.conv_kernel_size, module.conv_dim, module.n_groups)


def _lightning_state(module: Any) -> StateLayer:
    return StateLayer(module.num_attention_heads, module.head_dim, module.head_dim)


class Kind(NamedTuple):
    """A kind of module: what to call in place of its `forward`, and the layer that it is."""

    forward: Callable[..., Any]
    layer: Callable[[Any], StateLayer]


DELTA, MAMBA2 = Kind(gated_delta_net, _delta_state), Kind(mamba2, _mamba2_state)
KINDS: dict[str, Kind] = {  # by the name of the class
    "Qwen3NextGatedDeltaNet": DELTA,
    "Qwen3_5GatedDeltaNet": DELTA,
    "Qwen3_5MoeGatedDeltaNet": DELTA,
    "OlmoHybridGatedDeltaNet": DELTA,
    "KimiLinearDeltaAttention": Kind(kimi_delta_attention, _kimi_state),
    "NemotronHMamba2Mixer": MAMBA2,
    "GraniteMoeHybridMambaLayer": MAMBA2,
    "BambaMixer": MAMBA2,
    "FalconH1Mixer": MAMBA2,
    "MiniMaxLightningAttention": Kind(lightning_attention, _lightning_state),
}


def kind_of(module: Any) -> Kind | None:
    """Return the kind of a module, by its class or one that it is derived from; None if it keeps no state."""
    return next((KINDS[base.__name__] for base in type(module).__mro__ if base.__name__ in KINDS), None)


def state_layers(model: Any) -> dict[int, StateLayer]:
    """Return the layers of a model that keep a state, by their index.

    Raises:
        ValueError: if one of them has another activation than SiLU after its convolution.
    """
    found = {}
    for name, module in model.named_modules():
        kind = kind_of(module)
        if kind is None:
            continue
        if getattr(module, "activation", "silu") not in ("silu", "swish"):
            raise ValueError(f"model: expected SiLU after the convolution of {name}, got {module.activation}")
        found[module.layer_idx] = kind.layer(module)
    return found


def replace_states(model: Any) -> None:
    """Make the layers of a model that keep a state call the engine; without one they are what they were."""
    for module in model.modules():
        kind = kind_of(module)
        if kind is not None:
            module.forward = partial(_forward, module, kind.forward)


def _forward(
    module: Any, forward: Callable[..., Any], hidden_states: Float[Tensor, "1 t width"], *args: Any, **options: Any
) -> Any:
    """Call what stands in for a module's own forward, if an engine runs the model; else it is what it was.

    Raises:
        ValueError: if the model has a mask or a cache of its own, or an option that the engine does not know.
    """
    if "layer_pools" not in options:
        return type(module).forward(module, hidden_states, *args, **options)
    if args:
        raise ValueError(f"hidden_states: expected all other arguments by name, got {len(args)} without one")
    pools, step = options.pop("layer_pools"), options.pop("step")
    options.pop("position_embeddings", None)  # these layers do not use them
    for name in ("attention_mask", "cache", "cache_params"):  # cache_params until transformers 5.23
        value = options.pop(name, None)
        if value is not None:
            raise ValueError(f"{name}: expected None, as the step says who sees whom, got {type(value).__name__}")
    return forward(module, pools.recurrence(module, step, **options), hidden_states)
