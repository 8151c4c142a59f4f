"""How far 8 and 4 bits move elements: the measure, and the table of the page that shows it."""

import json
from pathlib import Path

import torch

from refattn.four_bits import E2M1
from refattn.rounding import hadamard
from twinattn.bench import quantization_error

ROOT = Path(__file__).parents[2]


def test_errors_are_those_of_the_steps():
    """Numbers of the format have none; beside one large element, int8 loses all the others."""
    whole = torch.randint(-8, 9, (40, 2, 16)).float()
    whole[..., 0] = 127.0
    found = quantization_error.errors_of([(whole, whole)])
    assert found["int8"]["key"] == 0 and found["fp8_e4m3"]["key"] < 0.01
    outlier = torch.randn(40, 2, 16) * 0.01
    outlier[..., 3] = 100.0
    key, _ = quantization_error._errors(outlier, outlier, "int8")
    rest = (outlier[..., :3].square().mean() / outlier.square().mean()).sqrt()
    assert key > rest * 0.9, "all of the small elements become 0"
    assert found["fp8_e5m2"]["worst_value"] >= found["fp8_e5m2"]["value"]


def test_errors_of_four_bits_are_those_of_the_steps():
    """A row that is whole once it is turned has none in int4; numbers of nvfp4 have none under a scale of 1 or 1/4."""
    grid = torch.randint(0, 16, (40, 2, 16)).float() - 5
    grid[..., 0], grid[..., 1] = -5.0, 10.0  # so that the scale is 1 and the zero point 5
    row = hadamard(grid)
    found = quantization_error.errors_of([(row, row)])
    assert found["int4"]["key"] < 2e-6 < found["nvfp4"]["key"]
    levels = torch.tensor(E2M1)[torch.randint(0, 8, (40, 2, 32))] * torch.randn(40, 2, 32).sign()
    levels[..., ::16] = 6.0
    found = quantization_error.errors_of([(levels, levels / 4)])
    assert found["nvfp4"]["key"] == found["nvfp4"]["value"] == 0 < found["int4"]["key"]


def test_the_page_shows_the_committed_result():
    result = json.loads((ROOT / "docs/results/quantization/error.json").read_text())
    assert result["date"] and result["commit"] and result["versions"]["torch"] and result["machine"]["name"]
    found = result["errors"]
    page = (ROOT / "docs/paths/quantized.md").read_text()
    for kind in quantization_error.FORMATS:
        cells = [f"{found[data][kind][x]:.2%}".replace("%", " %") for data in found for x in ("key", "value")]
        assert f"| {kind} | {' | '.join(cells)} |" in page


def test_gaussian_numbers_are_measured_again():
    generator = torch.Generator().manual_seed(0)
    layers = [tuple(torch.randn(2, 1024, 8, 128, generator=generator))]
    committed = json.loads((ROOT / "docs/results/quantization/error.json").read_text())["errors"]["gaussian"]
    for kind, errors in quantization_error.errors_of(layers).items():
        for name, error in errors.items():
            assert abs(error / committed[kind][name] - 1) < 1e-3
