"""What a model loses by few bits: the measure, the turn around a storage, and the table of the page."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn.kernels.torch_ops import four_bits
from tests.helpers.tiny_models import make_llama
from twinattn.bench import quantization_quality
from twinattn.engine import Engine

ROOT = Path(__file__).parents[2]
PROMPTS = [[11, 40, 41, 5], list(range(60, 85))]


def engine(**options):
    return Engine(make_llama("cpu"), num_blocks=8, block_size=16, twin=fastattn, **options)


def logits(server):
    return torch.cat(quantization_quality.logits_of(server, PROMPTS))


def test_logits_are_those_of_the_model():
    """Of every position but the last, read out of pages."""
    model = make_llama("cpu")
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([x])).logits[0, :-1] for x in PROMPTS])
    torch.testing.assert_close(logits(engine()), expected, rtol=1e-4, atol=1e-4)


def test_a_turn_around_a_storage_changes_nothing_but_rounding():
    plain, turned = engine(), engine()
    layers = turned.layer_pools.layers
    layers[:] = [replace(layer, storage=quantization_quality.turned(layer.storage)) for layer in layers]
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-4, atol=1e-4)
    assert not torch.equal(turned.caches[0][0], plain.caches[0][0]), "keys are turned in the pool"


def test_the_turn_of_int4_is_left_out_only_where_it_is_asked():
    size = four_bits.turned_size(64)
    for name, expected in (("", size), ("turned", size), ("not turned", 1)):
        with quantization_quality.without_turns(name):
            assert four_bits.turned_size(64) == expected
    off = []
    for name in ("", "not turned"):
        with quantization_quality.without_turns(name):
            off.append((logits(engine(kv_cache_dtype="int4")) - logits(engine())).norm())
    assert off[0] != off[1] and min(off) > 0


def test_the_page_shows_the_committed_result():
    result = json.loads((ROOT / "docs/results/quantization/quality.json").read_text())
    assert result["date"] and result["commit"] and result["versions"]["torch"] and result["tokens"] > 900
    assert result["rows"].keys() == quantization_quality.ROWS.keys()
    page = (ROOT / "docs/paths/quantized.md").read_text()
    for name, row in result["rows"].items():
        cells = f"{row['perplexity']:.2f} | {row['kl']:.4f} | {row['same_choice']:.1%}".replace("%", " %")
        assert f"| {name} | {cells} |" in page
    rows = {name: row["kl"] for name, row in result["rows"].items()}
    assert rows["unquantized"] == pytest.approx(0, abs=1e-6)
    assert rows["int4"] < rows["int4, not turned"] / 2 and rows["int8 keys, turned"] < rows["int8 keys"] / 3
