"""Models of transformers with the attention of either twin: the logits and the tokens of eager, for every mask."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    StaticCache,
)
from transformers.masking_utils import (
    and_masks,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastattn.varlen
import refattn.varlen
from tests.helpers.padded import OWN_ATTENTION, PADDINGS, REBUILT, TOKENS, padded
from tests.helpers.tiny_models import CHANGES, FAMILY_SIZES, VISION, family_config, make_family, make_model
from twinattn.integrations import mask_layout
from twinattn.integrations import transformers as integration

TWINS = ("refattn", "fastattn")
FAMILIES = tuple(  # a sentence reads better here than a list of its words
    """
    bert cohere2 deepseek_v3 gemma2 gemma3_text glm4 gpt2 gpt_neox gpt_oss granite llama llama4_text longcat_flash
    mistral mixtral modernbert-decoder olmo2 persimmon phi3 qwen2 qwen3_moe starcoder2
    """.split()  # noqa: SIM905
) + tuple(family for family in REBUILT if family not in OWN_ATTENTION)


@pytest.fixture(autouse=True, scope="module")
def registered():
    integration.register()
    integration.register()  # again changes nothing


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of either twin, so that a test knows which one computed."""
    counted = dict.fromkeys(TWINS, 0)
    for name, module in (("refattn", refattn.varlen), ("fastattn", fastattn.varlen)):
        attention = module.attention

        def counting(*args, name=name, attention=attention, **options):
            counted[name] += 1
            return attention(*args, **options)

        monkeypatch.setattr(module, "attention", counting)
    return counted


def outputs(model, name):
    """Compute logits under each padding, and generate with caches that grow and caches of a fixed size."""
    model.set_attn_implementation(name)
    device = model.device
    tokens = TOKENS.to(device)
    with torch.no_grad():
        logits = []
        for padding in PADDINGS:
            mask = padded(padding).to(device)
            logits.append(model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()])
        greedy = dict(attention_mask=padded("left").to(device), max_new_tokens=4, do_sample=False)
        words = [model.generate(tokens, **greedy, **cache) for cache in ({}, dict(cache_implementation="static"))]
    return torch.cat(logits), torch.stack(words)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_and_tokens_of_eager(family, device, calls):
    model = make_family(family, device, **(CHANGES | REBUILT).get(family, {}))
    logits, words = outputs(model, "eager")
    assert calls == dict.fromkeys(TWINS, 0)
    for twin in TWINS:
        before = dict(calls)
        twin_logits, twin_words = outputs(model, twin)
        torch.testing.assert_close(twin_logits, logits, rtol=0, atol=2e-5 * float(logits.std()))
        assert torch.equal(twin_words, words)
        assert [name for name in TWINS if calls[name] > before[name]] == [twin]


def test_at_least_fifteen_architectures_are_compared():
    assert len(set(FAMILIES)) >= 15


@pytest.mark.parametrize("twin", TWINS)
def test_an_encoder_and_a_decoder_with_cross_attention(twin, device, calls):
    sizes = dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=97, d_model=32, init_std=0.4)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=96, decoder_start_token_id=1, forced_eos_token_id=None)
    config = BartConfig(**sizes, **heads, **ends, max_position_embeddings=64)
    model = make_model(BartForConditionalGeneration, config, device)
    results = []
    for name in ("eager", twin):
        model.set_attn_implementation(name)
        inputs = dict(input_ids=TOKENS.to(device), attention_mask=padded("right").to(device))
        with torch.no_grad():
            logits = model(**inputs, decoder_input_ids=TOKENS[:, :5].to(device)).logits
            results.append((logits, model.generate(**inputs, max_new_tokens=5, do_sample=False, num_beams=2)))
    (logits, words), (twin_logits, twin_words) = results
    torch.testing.assert_close(twin_logits, logits, rtol=0, atol=2e-5 * float(logits.std()))
    assert torch.equal(twin_words, words) and calls[twin] > 0


# --- numbers that are added to the scores ---

BIASES = {  # what comes beside queries 3..7 of 8 keys: a bias for each head, and a mask
    "a-bias-without-a-mask": (1, 4, 5, 8, None),
    "a-bias-for-keys": (1, 4, 1, 8, "runs"),
    "a-mask-with-gaps": (2, 4, 5, 8, "gaps"),
    "a-float-mask": (2, 4, 5, 8, "float"),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("twin", TWINS)
def test_a_bias_of_the_scores_is_added(name, twin, device):
    *size, kind = BIASES[name]
    query, key, value = (draw(2, h, n, 16).to(device) for h, n in ((4, 5), (2, 8), (2, 8)))
    bias = draw(*size).to(device)
    i, j = torch.arange(3, 8, device=device)[:, None], torch.arange(8, device=device)
    visible, given = torch.ones(2, 1, 5, 8, dtype=torch.bool, device=device), dict(position_bias=bias)
    mask, module = None, torch.nn.Module()
    if kind is None:
        module.is_causal, query = True, query[:, :, -1:]
        bias = given["position_bias"] = bias[:, :, -1:]
        visible = visible[:, :, -1:]
    elif kind == "runs":
        padding = torch.tensor([[False, False, True, True, True, True, True, True], [True] * 8], device=device)
        mask = integration.visible_keys(2, 5, 8, q_offset=3, attention_mask=padding, device=device)
        visible = padding[:, None, None] & (j <= i)
        key[0, :, :2] = value[0, :, :2] = torch.nan
    elif kind == "gaps":
        mask = visible = ((j <= i) & (j != 1) & (i != 4))[None, None].expand(2, 1, 5, 8)
        key[:, :, 1] = value[:, :, 1] = torch.nan
    else:
        bias[1, ..., 5:] = bias[0, 2, 3] = -torch.inf  # keys that no query sees, and all keys of a query in one head
        mask, bias = bias, bias + draw(1, 4, 1, 8).to(device)
        given = dict(position_bias=draw(1, 4, 1, 8).to(device))
    out, _ = integration._attention(integration.TWINS[twin], module, query, key, value, mask, scaling=0.3, **given)
    k, v = (x.double().nan_to_num().repeat_interleave(2, 1) for x in (key, value))
    scores = (query.double() @ k.mT * 0.3 + bias).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("twin", TWINS)
def test_a_bias_of_another_size_is_an_error(twin):
    query, key = draw(2, 4, 5, 16), draw(2, 2, 8, 16)
    attend = partial(integration._attention, integration.TWINS[twin], torch.nn.Module(), query, key, key)
    for name, *size in (("position_bias", 1, 4, 5, 7), ("position_bias", 4, 5, 8), ("attention_mask", 2, 1, 4, 8)):
        given = dict(attention_mask=None) | {name: torch.zeros(size)}
        with pytest.raises(ValueError, match=f"{name}: expected a number for each of the scores"):
            attend(**given)
    with pytest.raises(ValueError, match="attention_mask: expected one for 2 rows of 5 queries over 8 keys"):
        attend(torch.ones(2, 1, 5, 7) > 0, position_bias=torch.zeros(1, 4, 5, 8))


@torch.no_grad()
def test_t5(device):
    """Positions are a bias of the scores, for encoder, decoder and cross attention alike."""
    sizes = dict(d_kv=8, d_ff=64, num_layers=2, decoder_start_token_id=0)
    model = make_family("t5", device, AutoModelForSeq2SeqLM, **sizes)
    inputs = dict(input_ids=TOKENS.to(device), attention_mask=padded("left").to(device))
    results = []
    for name in ("eager", *TWINS):
        model.set_attn_implementation(name)
        logits = model(**inputs, decoder_input_ids=TOKENS[:, :5].to(device)).logits
        greedy = dict(max_new_tokens=4, do_sample=False)
        words = [model.generate(**inputs, **greedy, **more) for more in ({}, dict(cache_implementation="static"))]
        results.append((logits, torch.stack(words)))
    for logits, words in results[1:]:
        torch.testing.assert_close(logits, results[0][0], rtol=0, atol=5e-5 * float(results[0][0].std()))
        assert torch.equal(words, results[0][1])


# --- caches and packed sequences ---


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "llama4_text"])
@torch.no_grad()
def test_a_prompt_in_chunks_through_a_cache(family, twin, cache, device):
    model = make_family(family, device, **CHANGES.get(family, {}))
    tokens, mask = TOKENS.to(device), padded("left").to(device)

    def through_a_cache():
        past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=24)
        positions, logits = (mask.cumsum(-1) - 1).clamp(min=0), []
        for first, last in ((0, 7), (7, 16), (16, 17)):
            step = dict(attention_mask=mask[:, :last], position_ids=positions[:, first:last], past_key_values=past)
            logits.append(model(tokens[:, first:last], **step).logits)
        return torch.cat(logits, dim=1)[mask.bool()]

    expected = through_a_cache()
    model.set_attn_implementation(twin)
    torch.testing.assert_close(through_a_cache(), expected, rtol=0, atol=2e-5 * float(expected.std()))


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("twin", TWINS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(family, twin, how, device):
    """Each sequence has the logits that it has alone."""
    model = make_family(family, device, **CHANGES.get(family, {}))
    lens = [1, 9, 1, 1, 5]
    parts = TOKENS.to(device).flatten()[: sum(lens)].split(lens)
    expected = torch.cat([model(part[None], use_cache=False).logits[0] for part in parts])
    model.set_attn_implementation(twin)
    positions = torch.cat([torch.arange(n, device=device) for n in lens])[None]
    edges = torch.tensor([0, *lens], device=device).cumsum(0).int()
    kwargs = dict(cu_seq_lens_q=edges, cu_seq_lens_k=edges, max_length_q=9, max_length_k=9)
    packed = dict(position_ids=positions, use_cache=False, **(kwargs if how == "cu_seq_lens" else {}))
    logits = model(torch.cat(parts)[None], **packed).logits[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.std()))


@torch.no_grad()
def test_lengths_alone_part_packed_sequences(device):
    """Where the model was called without positions that say so, the first layer sees to it by the lengths."""
    module, options = torch.nn.Module(), dict(scaling=0.25, sliding_window=None)
    query, key, value = (draw(1, 2, 9, 16, device=device) for _ in range(3))
    edges = torch.tensor([0, 4, 5, 9], dtype=torch.int32, device=device)
    seen = integration.visible_keys(1, 9, 9, device=device)
    out, _ = integration._attention(
        integration.TWINS["fastattn"],
        module,
        query,
        key,
        value,
        seen,
        cu_seq_lens_q=edges,
        cu_seq_lens_k=edges,
        **options,
    )
    for first, last in pairwise(edges.tolist()):
        part = (x[:, :, first:last] for x in (query, key, value))
        expected = F.scaled_dot_product_attention(*part, is_causal=True, scale=0.25)
        torch.testing.assert_close(out[:, first:last].transpose(1, 2), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_q: expected the edges .* from 0 to 9"):
        integration._attention(
            integration.TWINS["fastattn"], module, query, key, value, seen, cu_seq_lens_q=edges[:-1], **options
        )


# --- every mask that transformers draws ---


def draw(*shape, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def causal(b, h, i, j):
    return j <= i


def everything(b, h, i, j):
    return j >= 0


def prefix_of_four(b, h, i, j):
    return (j <= i) | (j < 4)


def packed(rule):
    positions = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3]])
    number = (positions == 0).cumsum(-1)
    return and_masks(
        packed_sequence_mask_function(number.expand(2, -1)),
        remap_positions_for_packed_sequence(rule, positions.expand(2, -1)),
    )


NO_PADDING = torch.zeros(2, dtype=torch.long)
MASKS = {
    "causal": (causal, {}),
    "window": (sliding_window_causal_mask_function(4), {}),
    "window-of-one": (sliding_window_causal_mask_function(1), {}),
    "wide-window": (sliding_window_causal_mask_function(40), {}),
    "chunks": (chunked_causal_mask_function(5, NO_PADDING), {}),
    "chunks-of-one": (chunked_causal_mask_function(1, NO_PADDING), {}),
    "bidirectional": (everything, {}),
    "bidirectional-window": (sliding_window_bidirectional_mask_function(3), {}),
    "prefix": (prefix_of_four, {}),
    "packed": (packed(causal), {}),
    "packed-windows": (packed(sliding_window_causal_mask_function(3)), {}),
    "packed-chunks": (packed(chunked_causal_mask_function(2, NO_PADDING)), {}),
    "later-queries": (causal, dict(q_length=3, q_offset=10)),
    "one-query": (sliding_window_causal_mask_function(4), dict(q_length=1, q_offset=12)),
    "room-behind": (causal, dict(q_length=4, q_offset=5)),
    "window-and-room-behind": (sliding_window_causal_mask_function(4), dict(q_length=6, q_offset=3)),
    "keys-begin-later": (sliding_window_causal_mask_function(6), dict(q_length=5, q_offset=12, kv_offset=4)),
}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_as_rows_is_the_mask(name, padding, device):
    """The plan of a mask shows each query what the mask does; what no query sees may hold anything."""
    rule, sizes = MASKS[name]
    sizes = dict(batch_size=2, q_length=13, kv_length=13, q_offset=0, kv_offset=0) | sizes
    mask = torch.ones(2, sizes["kv_length"] + sizes["kv_offset"], dtype=torch.bool)
    if padding == "left":
        mask[0, :3] = False
    if padding == "right":
        mask[0, 9:] = False
    arguments = dict(**sizes, mask_function=rule, attention_mask=mask.to(device), device=device)
    if name.startswith(("packed", "chunks")) and device != "cpu":
        pytest.skip("these functions have their positions on the CPU")
    visible = integration.sdpa_mask(**arguments, allow_is_causal_skip=False)[:, 0]  # [b, q, kv]
    query = draw(2, 4, sizes["q_length"], 16, device=device)
    key, value = (draw(2, 2, sizes["kv_length"], 16, device=device) + i for i in (0, 1))
    unseen = ~visible.any(1)
    clean = [x.clone() for x in (key, value)]
    for x in (key, value):
        x.masked_fill_(rearrange(unseen, "b kv -> b 1 kv 1"), torch.nan)
    expected = F.scaled_dot_product_attention(
        query.double(), *(x.double().repeat_interleave(2, 1) for x in clean), attn_mask=visible[:, None]
    ).nan_to_num()
    module = torch.nn.Module()
    for skip in (False, True):
        seen = integration.visible_keys(**arguments, allow_is_causal_skip=skip)
        first, end = seen.as_subclass(torch.Tensor)[:, 0].unbind(-1)
        dropped = (first == end) if skip else ~visible.any(-1)
        assert skip or not dropped[visible.any(-1)].any()
        for twin in integration.TWINS.values():
            out, _ = integration._attention(twin, module, query, key, value, seen)
            wanted = expected.transpose(1, 2).masked_fill(dropped[..., None, None], 0.0)
            torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-6)
            assert seen.layout_of_rows[-1].plan is not None
    plain = name in ("causal", "window", "chunks", "later-queries", "one-query", "packed", "packed-windows")
    if plain and padding != "right":
        assert seen.layout_of_rows[-1].plan.positions is None, "FlashAttention would not compute this"


@pytest.mark.core
def test_padding_of_plain_masks_is_neither_read_nor_computed():
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :4], mask[1, 7:] = False, False
    for rule in (causal, sliding_window_causal_mask_function(3)):
        seen = integration.visible_keys(2, 9, 9, mask_function=rule, attention_mask=mask)
        assert torch.equal((seen[:, 0, :, 1] > 0), mask)
        layout = mask_layout.lay_out(seen[:, 0], 9, integration.TWINS["fastattn"][1])
        assert layout.plan.positions is None and len(layout.query_rows) == 12
        assert layout.plan.batch.seq_lens.tolist() == [5, 7]


def test_a_long_mask_is_read_in_parts(monkeypatch):
    rule = sliding_window_causal_mask_function(4)
    whole = integration.visible_keys(2, 50, 50, mask_function=rule)
    monkeypatch.setattr(integration, "ENTRIES", 700)
    assert torch.equal(integration.visible_keys(2, 50, 50, mask_function=rule), whole)


# --- what is refused ---


def attention(mask=None, module=None, **options):
    query, key, value = draw(2, 4, 5, 16), draw(2, 2, 5, 16), draw(2, 2, 5, 16)
    twin = integration.TWINS["fastattn"]
    return integration._attention(twin, module or torch.nn.Module(), query, key, value, mask, **options)[0]


def gap(b, h, i, j):
    return (j <= i) & (j != 1)


def two_windows(b, h, i, j):
    return (j <= i) & (i - j < 2 + 2 * (i > 6))


REFUSED = {
    "dropout: neither twin computes dropout, got 0.5": lambda: attention(dropout=0.5),
    "output_attentions: neither twin has": lambda: attention(output_attentions=True),
    "attention_mask: expected .*, got bool [2, 4, 5, 5]": lambda: attention(torch.ones(2, 4, 5, 5) > 0),
    "softcap: expected none beside a bias": lambda: attention(torch.zeros(2, 1, 5, 5), softcap=3.0),
    "s_aux: expected none beside a bias": lambda: attention(torch.zeros(2, 1, 5, 5), s_aux=torch.zeros(4)),
    "cu_seq_lens_q: expected none beside a bias": lambda: attention(
        torch.zeros(2, 1, 5, 5), cu_seq_lens_q=torch.tensor([0, 5])
    ),
    "attention_mask: expected one of transformers, or a boolean one, beside a bias, got torch.int64": lambda: attention(
        torch.ones(2, 5).long(), position_bias=torch.zeros(1, 4, 5, 5)
    ),
    # What a model makes of the mask of its own, in the one length at which it would have the size of scores.
    "attention_mask: expected a model that passes its mask": lambda: integration._attention(
        integration.TWINS["fastattn"],
        torch.nn.Module(),
        *draw(3, 1, 4, 2, 16),
        (1.0 - integration.visible_keys(1, 2, 2).to(torch.float32)) * -1e4,
    ),
    "attention_mask: expected the keys that a query sees to be one run": lambda: integration.visible_keys(
        1, 5, 5, mask_function=gap
    ),
    "attention_mask: expected one window for all": lambda: mask_layout.lay_out(
        torch.tensor([[[0, 2], [1, 3], [2, 3], [2, 4]]], dtype=torch.int32), 5, integration.TWINS["fastattn"][1]
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("message", REFUSED)
def test_what_no_twin_computes_is_refused_by_name(message):
    pattern = message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(NotImplementedError, match=pattern):
        REFUSED[message]()


def test_a_mask_of_other_sizes_is_an_error():
    for mask, message in (
        (integration.visible_keys(2, 4, 5), r"2 rows of 5 queries, got \[2, 1, 4, 2\]"),
        (integration.visible_keys(3, 5, 5), r"2 rows of 5 queries, got \[3, 1, 5, 2\]"),
        (integration.visible_keys(2, 5, 9, q_offset=4), "expected one for 5 keys, got 9 that are seen"),
    ):
        with pytest.raises(ValueError, match=f"attention_mask: expected .*{message}" if "rows" in message else message):
            attention(mask)


@pytest.mark.core
def test_a_model_is_refused_what_the_twins_do_not_do():
    model = make_family("llama", attention_dropout=0.5)
    model.set_attn_implementation("fastattn")
    with pytest.raises(NotImplementedError, match="dropout: "):
        model.train()(TOKENS)
    logits = model.eval()(TOKENS).logits  # parameters want gradients, which are not asked for
    with pytest.raises(NotImplementedError, match="backward: the twins have no gradients"):
        logits.sum().backward()
    with pytest.raises((NotImplementedError, ValueError), match="attentions"):
        model(TOKENS, output_attentions=True)
    own = torch.ones(17, 17).tril().bool().expand(3, 1, 17, 17)
    torch.testing.assert_close(model(TOKENS, attention_mask=own).logits, logits)
    added = torch.zeros(3, 1, 17, 17).masked_fill(~own, -torch.inf)
    torch.testing.assert_close(model(TOKENS, attention_mask=added).logits, logits)


# Models with an attention of their own, which adds its mask to the scores, and what their tiny configurations need.
@pytest.mark.parametrize("family", OWN_ATTENTION)
@torch.no_grad()
def test_a_model_with_an_attention_of_its_own_is_refused_before_it_computes(family):
    """The name alone would be taken for them, and they would add the integers of the mask to their scores."""
    auto = AutoModelForMaskedLM if family == "mpnet" else AutoModelForCausalLM
    for name in (*TWINS, "flash_fastattn"):
        message = f"attn_implementation: expected a model built on .*AttentionInterface for '{name}', got "
        with pytest.raises(NotImplementedError, match=message):
            auto.from_config(family_config(family, **OWN_ATTENTION[family]), attn_implementation=name)
    model = make_family(family, auto=auto, **OWN_ATTENTION[family])
    two = TOKENS[:, :2]
    logits = model(two).logits
    model.set_attn_implementation("fastattn")  # transformers logs that it does not do it
    assert torch.equal(model(two).logits, logits)
    model.config._attn_implementation = "fastattn"  # past all checks
    with pytest.raises(NotImplementedError, match="attention_mask: expected a model that passes its mask to Attention"):
        model(two)


def test_no_number_comes_of_what_each_query_sees():
    """However a model would take it for a mask of its own."""
    seen, scores = integration.visible_keys(1, 2, 2), torch.zeros(1, 1, 2, 2)
    for wrong in (
        lambda: scores + seen,
        lambda: scores + seen[:, :, :, :2].expand(1, 3, 2, 2),
        lambda: scores + (1.0 - seen.to(torch.float32)) * -1e4,
        lambda: scores.masked_fill(seen == 0, -torch.inf),
        lambda: torch.where(seen > 0, scores, -torch.inf),
        lambda: torch.baddbmm(seen[0], scores[0], scores[0]),
        lambda: F.scaled_dot_product_attention(scores, scores, scores, attn_mask=seen),
        lambda: scores.add_(seen),
        lambda: torch.cat([scores, seen]),
    ):
        with pytest.raises(NotImplementedError, match="attention_mask: expected a model that passes its mask"):
            wrong()
    assert not scores.any()


def test_diffllama_is_refused_in_generate_batch():
    """Its layers attend twice, and the second call would write over the values of the first."""
    with pytest.raises(NotImplementedError, match="model: DiffLlama attends twice in each layer"):
        integration.use_in_generate_batch(make_family("diffllama"), "fastattn")


@pytest.mark.core
def test_an_option_that_is_a_tensor_is_not_printed_whole():
    with pytest.raises(NotImplementedError, match=r"relative_bias: .*, got float32 \[1, 4, 5, 5\]; attn_impl"):
        attention(relative_bias=torch.zeros(1, 4, 5, 5))


# --- what users do besides ---


@pytest.mark.parametrize("twin", TWINS)
def test_autocast_casts_what_rotary_positions_leave_in_float32(twin):
    query, key, value = torch.randn(3, 1, 2, 5, 8)
    attend = partial(integration._attention, integration.TWINS[twin], torch.nn.Module())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = attend(query, key, value.bfloat16(), None)
    expected, _ = attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), None)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("twin", TWINS)
@torch.no_grad()
def test_hidden_states_and_autocast(family, twin, calls):
    model = make_family(family)
    expected = model(TOKENS, output_hidden_states=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(TOKENS).logits
    model.set_attn_implementation(twin)
    out = model(TOKENS, output_hidden_states=True)
    assert len(out.hidden_states) == len(expected.hidden_states) == 3
    for one, other in zip(out.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(TOKENS).logits  # queries and keys in float32, values in bfloat16
    error = (low - expected.logits).abs().max()
    assert 0 < (logits - expected.logits).abs().max() <= 2 * error and calls[twin] == 4


@torch.no_grad()
def test_llava(device):
    """A model of two parts, whose images come from a layer of the first one."""
    vision = dict(VISION, model_type="clip_vision_model", num_hidden_layers=3)
    text = dict(FAMILY_SIZES, model_type="llama", num_hidden_layers=1)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)
    model = make_model(LlavaForConditionalGeneration, config, device)
    tokens = TOKENS[:1].clone().to(device)
    tokens[0, 3:7] = 96
    pixels = torch.rand(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)).to(device)
    model.set_attn_implementation("eager")
    expected = model(input_ids=tokens, pixel_values=pixels).logits
    model.set_attn_implementation("fastattn")
    logits = model(input_ids=tokens, pixel_values=pixels).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5 * float(expected.std()))


def images_under_a_window(*images, window):
    """Return a rule: a window, and images whose tokens see each other whole, whatever the window hides."""

    def rule(b, h, i, j):
        seen = (j <= i) & (i - j < window)
        for first, last in images:
            seen = seen | ((i >= first) & (i < last) & (j > i) & (j < last))
        return seen

    return rule


@pytest.mark.parametrize("padding", [0, 3])
def test_images_past_a_window(padding):
    """Gemma 3 with images after its window: of each query the run has another beginning, and all have one end.

    A sequence for each of them would copy the keys of the cache as often as there are queries in images.
    """
    kv = 96
    rule = images_under_a_window((2, 9), (20, 50), (50, 60), (70, 96), window=12)
    mask = torch.ones(2, kv, dtype=torch.bool)
    mask[0, :padding] = False
    for q in (kv, 40):  # a prompt, and its last chunk, which begins inside an image
        sizes = dict(batch_size=2, q_length=q, kv_length=kv, q_offset=kv - q, mask_function=rule, attention_mask=mask)
        seen = integration.visible_keys(**sizes)
        visible = integration.sdpa_mask(**sizes, allow_is_causal_skip=False)
        query, key, value = draw(2, 4, q, 16), draw(2, 2, kv, 16), draw(2, 2, kv, 16)
        repeated = (x.double().repeat_interleave(2, 1) for x in (key, value))
        expected = F.scaled_dot_product_attention(query.double(), *repeated, attn_mask=visible).nan_to_num()
        for twin in integration.TWINS.values():
            out, _ = integration._attention(twin, torch.nn.Module(), query, key, value, seen)
            rows = visible.any(-1)[:, 0] & mask[:, kv - q :]
            torch.testing.assert_close(out.double()[rows], expected.transpose(1, 2)[rows], rtol=1e-4, atol=2e-6)
        layout = seen.layout_of_rows[-1]
        copied = sum(int(part.plan.batch.seq_lens.sum()) for part in (layout, layout.rest))
        assert copied <= mask_layout.COPIES * 2 * kv


@pytest.mark.core
@torch.no_grad()
def test_an_image_alone_under_a_window():
    """Every query is of an image: nothing is left for the window."""
    rule = images_under_a_window((0, 40), window=4)
    seen = integration.visible_keys(1, 40, 40, mask_function=rule)
    query, key, value = draw(1, 2, 40, 16), draw(1, 2, 40, 16), draw(1, 2, 40, 16)
    out, _ = integration._attention(integration.TWINS["fastattn"], torch.nn.Module(), query, key, value, seen)
    visible = integration.sdpa_mask(1, 40, 40, mask_function=rule, allow_is_causal_skip=False)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=visible).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=2e-6)


# --- continuous batching ---

OF_A_LAYER = {
    "plain": {},
    "scale": dict(scaling=0.9),
    "softcap": dict(softcap=0.5),
    "window": dict(sliding_window=2),
    "sinks": dict(s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": dict(scaling=0.9, softcap=0.5, sliding_window=3, s_aux=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@pytest.mark.core
@pytest.mark.parametrize("asked", OF_A_LAYER)
@pytest.mark.parametrize("twin", TWINS)
def test_what_a_layer_of_generate_batch_fixes_reaches_it(twin, asked, device):
    """By the formula, as the tokens of a small model stay the same where a softcap is lost."""
    layer = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in OF_A_LAYER[asked].items()}
    query, key, value = (torch.randn(1, heads, n, 8, device=device) for heads, n in ((4, 5), (2, 9), (2, 9)))
    lens = [(2, 5), (3, 4)]  # new tokens and keys of two sequences
    step = dict(
        cu_seq_lens_q=torch.tensor([0, 2, 5], device=device),
        cu_seq_lens_k=torch.tensor([0, 5, 9], device=device),
        max_length_q=3,
        max_length_k=5,
    )
    cache = SimpleNamespace(update=lambda **_: (key, value))  # it returns the keys of the step, old ones too
    attend = ALL_ATTENTION_FUNCTIONS[integration.PAGED_PREFIX + twin]
    module = SimpleNamespace(layer_idx=0)
    out, _ = attend(module, query, key[:, :, :5], value[:, :, :5], None, cache=cache, **layer, **step)
    updated, _ = attend(module, query, key, value, None, **layer, **step)  # by the model, since transformers 5.24
    assert torch.equal(updated, out)

    cap, window, sinks = layer.get("softcap"), layer.get("sliding_window", 9), layer.get("s_aux")
    rows, first_query, first_key = [], 0, 0
    for new, total in lens:
        q = query[0, :, first_query : first_query + new].double()
        k, v = (x[0, :, first_key : first_key + total].double().repeat_interleave(2, 0) for x in (key, value))
        scores = q @ k.mT * layer.get("scaling", 8**-0.5)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        behind = torch.arange(total - new, total)[:, None] - torch.arange(total)
        scores = scores.masked_fill(((behind < 0) | (behind >= window)).to(device), -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, new, 1)], -1)
        rows.append((scores.softmax(-1)[..., :total] @ v).transpose(0, 1))
        first_query, first_key = first_query + new, first_key + total
    torch.testing.assert_close(out[0].double(), torch.cat(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "twins"), [("llama", TWINS), ("gemma2", TWINS[:1]), ("gpt_oss", TWINS[1:])])
def test_continuous_batching_gives_the_tokens_of_eager(family, twins, device, calls):
    """What a layer is asked for is the same for either twin: one has windows and a softcap, one windows and sinks."""
    model = make_family(family, device, **CHANGES.get(family, {}))
    model.generation_config.eos_token_id = 10**6
    greedy = dict(max_new_tokens=4, do_sample=False)
    prompts = [TOKENS.flatten()[:n].tolist() for n in (5, 19, 3)]
    expected = [model.generate(torch.tensor([p], device=device), **greedy)[0, len(p) :].tolist() for p in prompts]
    small = dict(page_size=8, num_blocks=48, max_batch_tokens=12, max_requests_per_batch=8, use_async_batching=False)
    for twin in twins:
        integration.use_in_generate_batch(model, twin)
        config = GenerationConfig(**greedy, eos_token_id=10**6, pad_token_id=0)
        batching = ContinuousBatchingConfig(**small, use_cuda_graph=False)
        answers = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, progress_bar=False
        )
        assert [answer.generated_tokens for answer in answers.values()] == expected
        assert calls[twin] > 0
    with pytest.raises(NotImplementedError, match="names that begin with 'flash_' are for generate_batch"):
        model(TOKENS.to(device))
    with pytest.raises(ValueError, match="name: expected one of refattn, fastattn, got 'sdpa'"):
        integration.use_in_generate_batch(model, "sdpa")


def test_an_error_in_the_thread_of_generate_batch_is_raised(device, monkeypatch):
    """There it is only logged, and outputs have no tokens."""
    model = make_family("llama", device)
    integration.use_in_generate_batch(model, "fastattn")
    monkeypatch.setattr(fastattn.varlen, "attention", mock.Mock(side_effect=ValueError("plan: expected another")))
    batching = ContinuousBatchingConfig(page_size=8, num_blocks=48, use_async_batching=False, use_cuda_graph=False)
    with pytest.raises(RuntimeError, match="expected 2 outputs without an error, got 0; plan: expected another"):
        model.generate_batch([[3, 14], [15]], continuous_batching_config=batching, progress_bar=False)
