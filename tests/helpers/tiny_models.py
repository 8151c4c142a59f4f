"""Tiny models with random weights, and a tokenizer whose tokens are bytes."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mistral4ForCausalLM,
    PaliGemmaForConditionalGeneration,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from twinattn.engine.models import LATENT

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.4,  # large, so that the logits differ enough and the words vary
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


# The same sizes under the names that other families have for them, and small numbers of experts.
FAMILY_SIZES = SIZES | dict(
    max_position_embeddings=128,
    sliding_window=5,
    is_decoder=True,
    d_model=48,
    encoder_layers=2,
    encoder_attention_heads=6,
    encoder_ffn_dim=64,
    decoder_layers=2,
    decoder_attention_heads=6,
    decoder_ffn_dim=64,
    n_positions=128,
    n_embd=48,
    n_layer=2,
    n_head=6,
    n_layers=2,
    n_heads=6,
    max_seq_len=128,
    n_inner=64,
    dff=64,
    ffn_dim=64,
    embedding_size=48,
    word_embed_proj_dim=48,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=4,
    num_local_experts=4,
    moe_num_experts=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)

# Sizes of latent attention, all different, and YaRN from the eighth position on: a factor in the softmax scale, too.
LATENT_SIZES = dict(
    num_key_value_heads=6,
    q_lora_rank=20,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    head_dim=8,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
# An indexer that selects fewer keys than the prompts have; with so many heads no two scores are equal.
INDEX_SIZES = LATENT_SIZES | dict(index_topk=5, index_head_dim=12, index_n_heads=8)
SHARED_SELECTION = INDEX_SIZES | dict(indexer_types=["full", "shared"])
YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=16.0,
    original_max_position_embeddings=8,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)

# Gemma 3n: the last two layers read the pool of the last layer of their kind before them.
SHARED_CACHES = dict(
    num_hidden_layers=5,
    layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=97,
    laurel_rank=4,
)


def family_config(family, **changes):
    """Make the configuration of a tiny model of a family, by its `config.model_type`."""
    config_class = CONFIG_MAPPING[family]
    known = {name for base in config_class.__mro__ for name in getattr(base, "__annotations__", {})}
    known -= {*config_class.attribute_map, "bos_token_id", "eos_token_id", "initializer_range"}
    return config_class(**{name: size for name, size in FAMILY_SIZES.items() if name in known} | changes)


def make_family(family, device="cpu", auto=AutoModelForCausalLM, **changes):
    """Make a tiny model of a family in which every parameter matters."""
    config = family_config(family, **changes)
    torch.manual_seed(1)
    own = {"mistral4": Mistral4ForCausalLM, "paligemma": PaliGemmaForConditionalGeneration}  # no "auto" for them
    make = own[family]._from_config if family in own else auto.from_config
    model = make(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # sinks, norms and biases begin as 0 or 1
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model.to(device)


def make_model(model_class, config, device="cpu"):
    torch.manual_seed(1)
    return model_class(config).eval().to(device)


def make_llama(device="cpu", **changes):
    return make_model(LlamaForCausalLM, LlamaConfig(**SIZES | changes), device)


def make_follower(after, **changes):
    """Make a model in which each token is followed by the one that `after` says."""
    heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_hidden_layers=1)
    model = make_llama(**heads | dict(vocab_size=len(after), hidden_size=len(after)) | changes)
    with torch.no_grad():
        for block in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            block.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(after)))
        model.lm_head.weight.zero_()
        for token, following in enumerate(after):
            model.lm_head.weight[following, token] = 1
    return model


def byte_tokenizer():
    """Make a tokenizer with a token for each byte, so that most characters take several, and 256 for the end."""
    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


WINDOWS = dict(layer_types=["sliding_attention", "full_attention"])
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
# Layers that keep a state around one with attention; sizes that are all different.
HYBRID = dict(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"])
DELTA = HYBRID | dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
)
MAMBA2 = dict(mamba_n_heads=6, mamba_d_head=16, mamba_d_state=10, mamba_n_groups=2, head_dim=8)
STATES = {
    "bamba": MAMBA2 | dict(attn_layer_indices=[1]),
    "falcon_h1": MAMBA2 | dict(mamba_d_ssm=48, mamba_d_head=8),
    "granitemoehybrid": MAMBA2 | dict(layer_types=HYBRID["layer_types"][:2], shared_intermediate_size=32),
    "kimi_linear": LATENT_SIZES | HYBRID | dict(linear_num_heads=3, linear_head_dim=8),
    "minimax": HYBRID | dict(block_size=8, sliding_window=None),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
        mamba_num_heads=6,
        mamba_head_dim=8,
        n_groups=2,
        ssm_state_size=10,
        sliding_window=None,
        moe_shared_expert_intermediate_size=32,
    ),
    "olmo_hybrid": DELTA | dict(head_dim=8),
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
}
COMPRESSED = dict(  # a layer of each kind: a window alone, selected entries that overlap, all entries
    num_hidden_layers=3,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    compress_rates=dict(compressed_sparse_attention=2, heavily_compressed_attention=4),
    mlp_layer_types=["moe"] * 3,
    qk_rope_head_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=12,
    index_n_heads=16,  # so that no score is a sum of zeros: torch.topk has no rule for ties
    index_head_dim=16,
    index_topk=3,
    hc_mult=2,
)
CHANGES = {  # what the tiny model of a family needs besides the sizes, or has in place of its defaults
    **dict.fromkeys(
        "afmoe beam cohere2 cohere2_moe cwm exaone4 exaone_moe flint gemma2 gemma3_text gpt_oss granite_swa "  # noqa: SIM905
        "granitemoe_swa kolibri1 laguna mellum ministral modernbert-decoder olmo3 vaultgemma".split(),
        WINDOWS,
    ),
    **dict.fromkeys(("qwen2", "qwen3", "smollm3"), dict(use_sliding_window=True) | WINDOWS),
    **dict.fromkeys(LATENT, LATENT_SIZES),
    **dict.fromkeys(("axk2", "deepseek_v32"), INDEX_SIZES),
    **dict.fromkeys(("glm_moe_dsa", "hy_v4"), SHARED_SELECTION),
    **STATES,
    "deepseek_v4": COMPRESSED,
    "dots1": dict(n_shared_experts=1) | WINDOWS,
    "ernie4_5_moe": dict(moe_k=2),
    "falcon": dict(new_decoder_architecture=True, num_kv_heads=2),
    "gemma3": dict(text_config=FAMILY_SIZES | WINDOWS, vision_config=VISION),
    "gemma3n_text": SHARED_CACHES,
    "helium": dict(head_dim=8),  # hidden_size / num_attention_heads
    "hunyuan_v1_dense": dict(rope_parameters=dict(rope_type="dynamic", alpha=100.0, factor=1.0, rope_theta=1e4)),
    "llama4_text": dict(
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        attention_chunk_size=8,
        intermediate_size_mlp=64,
    ),
    "longcat_flash": LATENT_SIZES
    | dict(num_layers=1, ffn_hidden_size=64, expert_ffn_hidden_size=32, zero_expert_num=2, moe_topk=2),
    "paligemma": dict(
        text_config=SIZES | dict(model_type="gemma", max_position_embeddings=128),
        vision_config=VISION | dict(model_type="siglip_vision_model"),
        projection_dim=48,
        hidden_size=48,
    ),
    "mistral4": LATENT_SIZES | dict(head_dim=20, rope_parameters=YARN | dict(llama_4_scaling_beta=0.1)),
}
