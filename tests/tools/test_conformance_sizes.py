"""The kit at the sizes where kernels change their way of computing, and the names that it gives to what it finds."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from refattn import chunked_prefill, differential, kv_cache, local, mla
from refattn.merge import merge
from refattn.options import AttentionOptions
from tests.helpers import by_hand
from tests.helpers.planted import PAST_A_SIZE, RETURNED, UNNAMED, plant
from twinattn.kit import Example, claims, combinations, landmarks, mistakes, options, properties, sizes
from twinattn.kit import __main__ as command
from twinattn.kit import check as checking
from twinattn.kit.check import check
from twinattn.kit.finding import Finding, Report
from twinattn.kit.kernel import BadKernelError, Kernel
from twinattn.kit.property import Broken

pytestmark = [
    pytest.mark.usefixtures("shapes_unchecked"),
    pytest.mark.filterwarnings("ignore:.*random:hypothesis.errors.HypothesisDeprecationWarning"),
]
OF = {"paged": "chunked_prefill", "write": "kv_cache", "merge": "merge", "recurrent": "recurrent"}
FLOAT32 = dict(dtypes=[torch.float32])


@pytest.fixture
def no_shrinking(monkeypatch):
    monkeypatch.setattr(checking, "SHRINKING", 0.0)
    monkeypatch.setattr(checking, "EVIDENCE", 4)
    monkeypatch.setattr(checking, "REPEATS", 3)


@pytest.mark.parametrize("name", PAST_A_SIZE)
def test_a_mistake_past_a_size_is_found_and_named(name, monkeypatch):
    mistake, prop, old, new, limits = PAST_A_SIZE[name]
    is_large = name.endswith("-bits")  # these take time
    numbers = dict(TILE=512, SPLIT=2048) if is_large else {}
    monkeypatch.setattr(landmarks, "PAST_A_MODEL", 2**17 + 77)  # as many are wrong here
    monkeypatch.setattr(landmarks, "PAST_2048", 1044)
    monkeypatch.setattr(checking, "SHRINKING", 0.0 if is_large else 1.0)
    monkeypatch.setattr(checking, "EVIDENCE", 1 if is_large else 4)
    monkeypatch.setattr(checking, "REPEATS", 1 if is_large else 3)
    kernel = claims(**limits)(plant("paged", old, new, **numbers))
    report = check(kernel, "chunked_prefill", examples=3, only=[prop], **FLOAT32)
    assert [name for name, _ in report.failures[0].mistakes][:1] == [mistake]
    example = checking.parse_example(report.failures[0].example)
    with pytest.raises(Broken):
        checking.reproduce(kernel, prop, example)
    checking.reproduce(plant("paged", old, old, **numbers), prop, example)


@pytest.mark.parametrize("name", UNNAMED)
@pytest.mark.usefixtures("no_shrinking")
def test_a_mistake_without_a_name_is_found(name, monkeypatch):
    kernel, prop, old, new = UNNAMED[name]
    monkeypatch.setattr(checking, "probable", lambda *args: [])  # what is known is asked above
    assert check(
        plant(kernel, old, new), OF[kernel], examples=3 if kernel == "paged" else 8, only=[prop], **FLOAT32
    ).failures


def test_there_are_enough_of_them():
    assert len(PAST_A_SIZE) >= 9 and len(UNNAMED) >= 25


def test_any_two_choices_meet():
    """In few enough batches that all of them are visited, where 20 are asked for."""
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    of = combinations.choices(kernel)
    cases = combinations.covering(of)
    for (one, xs), (other, ys) in itertools.combinations(of.items(), 2):
        assert {(case[one], case[other]) for case in cases} == set(itertools.product(xs, ys))
    assert {"causal", "window_size", "sinks", "layout", "poison", "return_lse", "out"} <= set(of)
    assert len(options.all_together(kernel)) <= 40


def test_each_option_meets_each_shape():
    """And in each type there are each head size and each block size, and in one of them each number of heads."""
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    claims_of, heads = kernel.claims, set()
    for number in range(len(claims_of.dtypes)):
        batches = sizes.at_every_shape(kernel, number)
        shapes = [(x.heads, (x.head_size, x.value_size), x.block_size) for x in batches]
        heads |= {shape[0] for shape in shapes}
        for i, claimed in enumerate((claims_of.head_sizes, claims_of.block_sizes), 1):
            assert {shape[i] for shape in shapes} == set(claimed)
        for shape in shapes:
            met = {name for x, of in zip(batches, shapes, strict=True) if of == shape for name in x.options}
            assert {"causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "sinks"} <= met
        assert len(batches) <= 20
    assert heads == set(claims_of.heads)
    longest = [max(s for _, s in x.lens) for x in sizes.past_tiles(kernel)]
    assert max(longest) > 2**15 and len(longest) <= 8


def test_heads_of_latents_meet_the_size_that_is_served():
    def mine(query, cache, cu_seqlens_q, seq_lens, block_table, latent_rank, softmax_scale, sinks=None): ...

    kernel = Kernel("mine", "mla", mine)
    options = [x.options for x in sizes.at_every_shape(kernel, 0) if (x.heads, x.head_size) == ((128, 1), 576)]
    assert any("sinks" in x for x in options)


@pytest.mark.usefixtures("no_shrinking")
def test_an_lse_that_was_rounded_is_named():
    kernel = plant("paged", RETURNED, RETURNED.replace("(out, lse)", "(out, lse.to(query.dtype).float())"))
    report = check(kernel, "chunked_prefill", examples=3, only=["lse"], dtypes=[torch.bfloat16])
    assert report.failures[0].mistakes[0][0] == "lse-rounded"


@pytest.mark.usefixtures("no_shrinking")
def test_sinks_that_were_rounded_are_named():
    kernel = plant("paged", "sinks.float()[:, None] - whole", "sinks.to(query.dtype).float()[:, None] - whole")
    report = check(kernel, "chunked_prefill", examples=3, only=["sinks"], dtypes=[torch.bfloat16])
    assert report.failures[0].mistakes[0][0] == "sinks-rounded"


# --- what is no mistake ---


def decode(query, key_cache, value_cache, block_table, seq_lens):
    """Attend from one query per sequence: nothing here could say that there are more, or none."""
    out, p = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), key_cache.shape[1]
    for b, s in enumerate(seq_lens.tolist()):
        j = torch.arange(s)
        k, v = (pool[block_table[b, j // p].long(), j % p].transpose(0, 1) for pool in (key_cache, value_cache))
        if s:
            answer = F.scaled_dot_product_attention(query[b][:, None][None], k[None], v[None], enable_gqa=True)
            out[b] = answer[0, :, 0]
    return out


def test_a_decode_is_not_asked_for_what_its_parameters_cannot_say():
    kernel = Kernel("decode", "chunked_prefill", decode)
    assert kernel.claims.max_query_len == 1 and not kernel.knows_query_lens
    asked = ["empty rows", "padding", "many sequences", "edges", "many queries", "upper bounds", "tail"]
    report = check(decode, "chunked_prefill", examples=6, only=asked, **FLOAT32)
    outcomes = {finding.property: finding.outcome for finding in report.findings}
    assert outcomes.pop("padding") == "not claimed" and set(outcomes.values()) == {"honoured"}


# --- what a failure is called ---


def test_a_race_is_called_a_race():
    chance = random.Random(0)

    def races(outs, lses):
        out, lse = by_hand.merge(outs, lses)
        return (out + (chance.random() < 0.3), lse)

    report = check(races, "merge", examples=6, only=["answer"], **FLOAT32)
    (finding,) = report.failures
    assert finding.mistakes == (checking.RACE,) and finding.code.endswith(", times=1000)")
    with pytest.raises(Broken):
        checking.reproduce(races, "answer", checking.parse_example(finding.example), times=1000)


def test_a_wrong_kernel_whose_last_bits_vary_is_no_race():
    def adds_in_any_order(outs, lses):
        out, lse = by_hand.merge(outs[:1], lses[:1])
        return out * (1 + 1e-7 * random.random()), lse

    report = check(adds_in_any_order, "merge", examples=6, only=["answer"], **FLOAT32)
    assert checking.RACE not in report.failures[0].mistakes


@pytest.mark.parametrize("prop", ["tail", "outside the window"])
@pytest.mark.usefixtures("no_shrinking")
def test_of_a_nan_the_cause_is_named_that_explains_what_is_right(prop):
    """All numbers are NaN, as those of many mistakes would be; but without the poison they are right."""

    def weighs_by_zero(query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, window_size=(-1, -1)):
        out, p = query.new_zeros(*query.shape[:2], value_cache.shape[-1]), key_cache.shape[1]
        edges = cu_seqlens_q.tolist()
        for b, s in enumerate(seq_lens.tolist()):
            first, last = edges[b], edges[b + 1]
            blocks = block_table[b, : -(-s // p)].long()
            k, v = (pool[blocks].flatten(0, 1).transpose(0, 1) for pool in (key_cache, value_cache))
            if first < last and s:
                pos, j = torch.arange(s - last + first, s)[:, None], torch.arange(k.shape[1])
                see = (j <= pos) & ((window_size[0] < 0) | (j >= pos - window_size[0]))
                q = query[first:last].transpose(0, 1)
                answer = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=see, enable_gqa=True)
                out[first:last] = answer[0].transpose(0, 1)
        return out

    report = check(weighs_by_zero, "chunked_prefill", examples=6, only=[prop], **FLOAT32)
    names = [name for name, _ in report.failures[0].mistakes]
    assert names[0] in ("zero-times-nan", "hidden-times-nan")
    assert not {"causal-top-left", "window-ignored", "past-the-end", "table-one-column-late"} & set(names)


def test_an_unknown_type_is_a_bad_argument(capsys):
    with pytest.raises(SystemExit) as status:
        command.main(["fastattn.merge", "--dtype", "float8"])
    assert status.value.code == 2 and "argument --dtype: invalid choice: 'float8'" in capsys.readouterr().err
    with pytest.raises(BadKernelError, match="claims none of the types asked for"):
        check("fastattn.merge", dtypes=[torch.float64], only=["answer"])


@pytest.mark.parametrize(
    ("lens", "heads", "options"),
    [
        (((3, 20), (1, 33)), (2, 1), {}),
        (((3, 20), (1, 33)), (2, 1), {"sinks": True, "window_size": (5, 0)}),
        (((5, 5), (5, 5)), (6, 2), {"causal": False, "window_size": (2, 1), "alibi_slopes": True, "softcap": 2.0}),
        (((1, 3), (0, 3), (1, 18)), (4, 4), {"sinks": True, "softmax_scale": 0.3}),
        (((4, 2),), (4, 2), {"alibi_slopes": True}),
    ],
    ids=["plain", "options", "not-causal", "decodes", "blind"],
)
def test_what_may_not_show_does_not(lens, heads, options):
    """Such mistakes are not computed when a failure is named; the others are the smaller part."""
    example = Example("chunked_prefill", lens, heads, options=options)
    arguments = example.tensors(torch.float32)
    right = mistakes.without_mistake(example.path).answers(example, arguments)
    known = list(mistakes.of_path(example.path))
    hidden = [mistake for mistake in known if not mistake.may_show(example, arguments)]
    assert len(known) / 2 < len(hidden) < len(known)
    for mistake in hidden:
        for name, x in mistake.answers(example, arguments).items():
            assert torch.allclose(x, right[name]), (mistake.name, mistake.variant)


def test_what_is_only_asked_at_landmarks_has_some():
    kernel = Kernel("paged", "chunked_prefill", by_hand.paged)
    for prop in properties.of_path("chunked_prefill"):
        assert prop.examples != 0 or prop.landmarks(kernel), prop.name


# --- wrong in one instance, or for sizes and numbers that a kernel's author did not think of ---


def attention(query, key_cache, value_cache, batch, window_size=(-1, -1), softmax_scale=None):
    options = AttentionOptions(softmax_scale=softmax_scale)
    plan = chunked_prefill.plan(batch, block_size=key_cache.shape[1], window_size=window_size)
    return chunked_prefill.attention(query, key_cache, value_cache, plan, options)


def blocks_by_shifts(query, key_cache, value_cache, batch):
    p = key_cache.shape[1]
    return attention(query, key_cache.roll(p & (p - 1), 1), value_cache, batch)


def heads_of_whole_16(query, key_cache, value_cache, batch):
    query = query.clone()
    query[..., query.shape[-1] // 16 * 16 :] = 0
    return attention(query, key_cache, value_cache, batch)


def row_b_is_of_sequence_b(query, key_cache, value_cache, batch):
    n = batch.num_seqs
    if batch.max_query_len == 1 and len(query) >= n:
        batch = replace(batch, cu_seqlens_q=torch.arange(n + 1, dtype=torch.int32), num_tokens=n)
    return attention(query, key_cache, value_cache, batch)


def keys_of_the_stated_number(query, key_cache, value_cache, batch):
    if batch.num_keys is not None and batch.num_keys < int(batch.seq_lens.sum()):
        batch = replace(batch, seq_lens=batch.seq_lens.clamp(max=batch.num_keys))
    return attention(query, key_cache, value_cache, batch)


def window_of_one_instance(query, key_cache, value_cache, batch, window_size=(-1, -1)):
    if query.dtype == torch.bfloat16 and query.shape[-1] == 192 and window_size[0] >= 0:
        window_size = (window_size[0] + 1, window_size[1])
    return attention(query, key_cache, value_cache, batch, window_size)


@claims(conventions=True)
def light_keys_hide_nan(query, key_cache, value_cache, batch):
    """Keys of zeros beside a large one have no weight."""
    light = (key_cache == 0).all(-1, keepdim=True)
    return attention(query, key_cache, value_cache.masked_fill(light & value_cache.isnan(), 0.0), batch)


def merge_of_high_parts(outs, lses):
    return merge(outs, [x.masked_fill(x < -80, -torch.inf) for x in lses])


@claims(conventions=True)
def merge_without_light_parts(outs, lses):
    top = torch.stack(lses).amax(0)
    return merge([x.masked_fill((y < top - 104)[..., None], 0.0) for x, y in zip(outs, lses, strict=True)], lses)


def merge_of_rounded_lses(outs, lses):
    return merge(outs, [x.to(outs[0].dtype).float() for x in lses])


@claims(heads=((2, 1),), head_sizes=((64, 64),))
def merge_of_one_part(outs, lses):
    return (outs[0].clone(), lses[0].clone()) if len(outs) == 1 else merge(outs, lses)


def merge_by_the_first_strides(outs, lses):
    return merge([x if x.stride() == outs[0].stride() else x * 1.1 for x in outs], lses)


def write_by_shifts(key, value, key_cache, value_cache, slot_mapping):
    p = key_cache.shape[1]
    slots = slot_mapping if p & (p - 1) == 0 else slot_mapping.flip(0)
    kv_cache.write(key, value, key_cache, value_cache, slots)


@claims(heads=((2, 2),), head_sizes=((64, 64),), block_sizes=(16,))
def norm_of_16_bits(query, cache, lambda_full, lambda_init, norm_weight, norm_eps, batch):
    plan = differential.plan(batch, block_size=cache.shape[-3])
    numbers = dict(lambda_full=lambda_full, lambda_init=lambda_init, norm_weight=norm_weight, norm_eps=norm_eps)
    out = differential.attention(query, cache, plan, **numbers)
    large = query.dtype == torch.float16 and bool((cache[:, 1].abs() > 256).any())
    return out * 0 if large else out


@claims(heads=((1, 1),), head_sizes=((264, 256),), block_sizes=(16,))
def packed_without_nan(query, cache, latent_rank, softmax_scale, batch):
    codes = cache[..., :latent_rank]
    cache = torch.cat([codes.where(codes & 0x7F != 0x7F, 0), cache[..., latent_rank:]], dim=-1)
    plan = mla.plan(batch, block_size=cache.shape[1])
    return mla.attention(query, cache, plan, AttentionOptions(softmax_scale=softmax_scale), latent_rank=latent_rank)


WRONG = [
    ("chunked_prefill", blocks_by_shifts, "answer", torch.float32),
    ("chunked_prefill", heads_of_whole_16, "answer", torch.float32),
    ("chunked_prefill", row_b_is_of_sequence_b, "empty rows", torch.float32),
    ("chunked_prefill", keys_of_the_stated_number, "upper bounds", torch.float32),
    ("chunked_prefill", light_keys_hide_nan, "nan without weight", torch.float32),
    ("chunked_prefill", window_of_one_instance, "options at shapes", torch.bfloat16),
    ("merge", merge_of_high_parts, "levels", torch.float32),
    ("merge", merge_without_light_parts, "nan", torch.float32),
    ("merge", merge_of_rounded_lses, "levels", torch.bfloat16),
    ("merge", merge_of_one_part, "empty parts", torch.float32),
    ("merge", merge_by_the_first_strides, "strides", torch.float32),
    ("kv_cache", write_by_shifts, "answer", torch.float32),
    ("differential", norm_of_16_bits, "sizes of values", torch.float16),
    ("packed_mla", packed_without_nan, "nan", torch.float32),
]


@pytest.mark.parametrize(("path", "function", "name", "dtype"), WRONG, ids=[x[1].__name__ for x in WRONG])
@pytest.mark.usefixtures("no_shrinking")
def test_a_wrong_kernel_is_found(path, function, name, dtype, monkeypatch):
    monkeypatch.setattr(checking, "probable", lambda *args: [])
    (finding,) = check(function, path, only=[name], dtypes=[dtype]).findings
    assert finding.outcome == "wrong", finding


def test_an_option_of_another_path_keeps_its_default():
    @claims(heads=((2, 1),), head_sizes=((64, 64),), block_sizes=(16,))
    def mine(query, key_cache, value_cache, batch, chunk_size, soft_cap=0.0, causal=True):
        assert causal is True
        plan = local.plan(batch, block_size=key_cache.shape[1], chunk_size=chunk_size)
        return local.attention(query, key_cache, value_cache, plan)

    report = check(mine, "local", examples=2, only=["answer", "together"], **FLOAT32)
    assert report.failures == []
    assert report.notes == (
        "the parameter soft_cap is none of this path's; did you mean softcap?",
        "the parameter causal is none of this path's",
    )


def test_a_kernel_that_refuses_everything_has_not_passed(capsys, monkeypatch):
    refuses = Report("mine", "select", "cpu", [Finding("call", "It can be called.", "refused", "no")])
    monkeypatch.setattr(command, "check_apart", lambda *args, **more: refuses)
    assert command.main(["mine", "--path", "select"]) == 1
    assert "nothing was checked: the kernel refuses every batch" in capsys.readouterr().out


def test_operations_are_among_the_paths_to_choose_from():
    with pytest.raises(BadKernelError, match="one of varlen, .*; or, beside attention, gather, "):
        check(lambda cache: cache)
