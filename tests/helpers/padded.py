"""Three texts for models of transformers, with padding; and the families whose attention is in their own code."""

import torch
import transformers

TOKENS = torch.randint(1, 97, (3, 17), generator=torch.Generator().manual_seed(0))
PADDINGS = {"none": [[0, 0]] * 3, "left": [[5, 0], [1, 0], [0, 0]], "right": [[0, 5], [0, 1], [0, 0]]}
REBUILT = {  # on AttentionInterface since transformers 5.24, and what a small config of them needs
    "codegen": dict(n_embd=64, n_head=4, rotary_dim=8),
    "gptj": dict(rotary_dim=8),
}
OWN_ATTENTION = {  # likewise
    **dict.fromkeys("bloom mpt gpt_neox_japanese rembert roformer megatron-bert trocr mvp mpnet falcon".split(), {}),  # noqa: SIM905
    "big_bird": dict(attention_type="original_full"),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=6),
    "xglm": dict(num_layers=1, attention_heads=6),
}
if transformers.__version__.startswith("5.23."):
    OWN_ATTENTION |= REBUILT


def padded(padding):
    """Make the attention mask with some padding to the left and to the right in each row."""
    mask = torch.ones_like(TOKENS)
    for row, (left, right) in zip(mask, PADDINGS[padding], strict=True):
        row[:left], row[len(row) - right :] = 0, 0
    return mask
