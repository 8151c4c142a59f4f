"""Tiny models with random weights, and a tokenizer whose tokens are bytes."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

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


def make_model(model_class, config, device="cpu"):
    torch.manual_seed(1)
    return model_class(config).eval().to(device)


def make_llama(device="cpu", **changes):
    return make_model(LlamaForCausalLM, LlamaConfig(**SIZES | changes), device)


def byte_tokenizer():
    """Make a tokenizer with a token for each byte, so that most characters take several, and 256 for the end."""
    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
