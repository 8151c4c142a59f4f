"""Each integration once: transformers, FlashAttention's functions, operators. For vLLM, see test_vllm_interface."""

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fastattn import chunked_prefill
from refattn.metadata import make_batch
from tests.helpers.tiny_models import make_llama
from twinattn.integrations import flash_attn, ops
from twinattn.integrations import transformers as integration


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
def test_a_model_of_transformers_has_the_same_logits(twin):
    integration.register()
    model, tokens = make_llama().double(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    model.set_attn_implementation("sdpa")  # in float64, as ours
    with torch.no_grad():
        expected = model(tokens).logits
        model.set_attn_implementation(twin)
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("twin", ["refattn", "fastattn"])
def test_a_mask_of_transformers_with_a_gap_is_refused(twin):
    query, key = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    attend = partial(integration._attention, integration.TWINS[twin], torch.nn.Module(), query, key, key)
    expected = scaled_dot_product_attention(query, key, key, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(attend(mask)[0], expected, atol=1e-5, rtol=1e-5)
    mask[..., 3:, 1] = False
    with pytest.raises(NotImplementedError, match="to be one run, got one with a gap"):
        attend(mask)


def test_flash_attn_func_is_causal_attention():
    query, key, value = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16), torch.randn(2, 5, 2, 16)
    out = flash_attn.flash_attn_func(query, key, value, causal=True)
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    expected = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_an_operator_is_its_path():
    query, pools = torch.randn(4, 4, 16), torch.randn(2, 4, 4, 2, 16)
    plan = chunked_prefill.plan(make_batch([3, 1], [3, 6], [[0], [1, 2]]), block_size=4)
    out = ops.chunked_prefill(query, *pools, plan)
    assert torch.equal(out, chunked_prefill.attention(query, *pools, plan))
