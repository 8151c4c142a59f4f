"""Packed weights give the products of a model's own code, as long as they are its weights."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.helpers.engines import make_engine, outputs
from tests.helpers.tiny_models import make_llama
from twinattn.engine import SamplingParams, pack, packed_weights, unpack

ROWS = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(0))


class OwnCodeError(Exception):
    """The class's own `forward` was called."""


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.SiLU(), nn.Linear(40, 8, bias=False)).eval()


@pytest.fixture
def no_own_code(monkeypatch):
    """Make layers fail that are not packed."""

    def refuse(*_):
        raise OwnCodeError

    monkeypatch.setattr(nn.Linear, "forward", refuse)


def by_hand(layers, x):
    first, activation, second = layers
    return activation(x @ first.weight.T + first.bias) @ second.weight.T


def assert_same(out, expected):
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * float(expected.abs().max()) if out.numel() else 0)
    assert out.is_contiguous()


@torch.no_grad()
@pytest.mark.usefixtures("no_own_code")
@pytest.mark.parametrize(
    "x",
    [ROWS, ROWS[0], ROWS[0, 0], ROWS[:0], ROWS.transpose(0, 1), ROWS.mT.contiguous().mT, ROWS[:1, :1].expand(3, 2, 24)],
    ids=["batch", "matrix", "row", "empty", "transposed", "columns", "expanded"],
)
def test_products_are_those_of_the_weights(layers, x):
    assert_same(pack(layers)(x), by_hand(layers, x))


def changed_in_place(layers):
    layers[0].weight.mul_(2.0)
    layers[0].bias.zero_()


def replaced(layers):
    layers[0].weight = nn.Parameter(torch.randn(40, 24))
    layers[2].weight.data = torch.randn(8, 40)


def loaded(layers):
    layers.load_state_dict({name: x + 1.0 for name, x in layers.state_dict().items()})


def copied(layers):
    layers[2] = copy.deepcopy(layers[2])
    layers[2].weight.mul_(2.0)


@torch.no_grad()
@pytest.mark.usefixtures("no_own_code")
@pytest.mark.parametrize("change", [changed_in_place, replaced, loaded, copied])
def test_weights_that_have_changed_are_packed_anew(layers, change):
    pack(layers)(ROWS)
    change(layers)
    assert_same(layers(ROWS), by_hand(layers, ROWS))


def with_gradients(layers):
    torch.set_grad_enabled(True)
    return ROWS


def in_another_type(layers):
    layers.double()
    return ROWS.double()


def under_autocast(layers):
    torch.set_autocast_enabled("cpu", True)
    return ROWS


class Rows(torch.Tensor):
    """What another library may pass."""


def over_a_class_of_tensors(layers):
    return ROWS.as_subclass(Rows)


def over_rows_of_another_type(layers):
    return ROWS.bfloat16()


def with_a_weight_of_an_inference(layers):
    with torch.inference_mode():
        layers[0].weight = nn.Parameter(torch.randn(40, 24), requires_grad=False)
    return ROWS


def without_onednn(layers):
    torch._C._set_mkldnn_enabled(False)
    return ROWS


def parametrized(layers):
    parametrizations.weight_norm(layers[0])
    return ROWS


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        with_gradients,
        in_another_type,
        under_autocast,
        over_a_class_of_tensors,
        over_rows_of_another_type,
        with_a_weight_of_an_inference,
        without_onednn,
        parametrized,
    ],
)
def test_own_code_runs_where_packed_weights_are_of_no_use(layers, change, no_own_code):
    pack(layers)(ROWS)
    try:
        x = change(layers)
        with pytest.raises(OwnCodeError):
            layers[0](x)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch._C._set_mkldnn_enabled(True)


@torch.no_grad()
def test_a_copy_is_packed_by_itself_and_unpacking_restores_the_own_code(layers, monkeypatch):
    own = layers(ROWS)
    other = pickle.loads(pickle.dumps(copy.deepcopy(pack(layers))))
    assert vars(other[0])["forward"].linear is other[0]
    assert torch.equal(other(ROWS), layers(ROWS))
    assert unpack(layers) is layers and not any("forward" in vars(x) for x in layers.modules())
    assert torch.equal(layers(ROWS), own)
    monkeypatch.setattr(nn.Linear, "forward", lambda *_: torch.zeros(()))
    assert other(ROWS).shape == own.shape and layers(ROWS).shape == ()


def test_the_engine_gives_the_same_answers_over_packed_weights():
    prompts, sampling = [[3, 14, 3], [27], [5, 6, 7, 8]], SamplingParams(max_tokens=6)
    own = outputs(make_engine(make_llama(), twin="fastattn"), prompts, sampling)
    model = pack(make_llama())
    assert outputs(make_engine(model, twin="fastattn"), prompts, sampling) == own
    made = [vars(x)["forward"] for x in model.modules() if isinstance(vars(x).get("forward"), packed_weights._Packed)]
    assert made and all(one._packed is not None for one in made)


def test_what_cannot_be_packed_is_named(layers, monkeypatch):
    with pytest.raises(ValueError, match="model: expected one in evaluation mode, got one in training"):
        pack(layers.train())
    with pytest.raises(ValueError, match="model: expected linear layers of float32 on a CPU, got none in Sequential"):
        pack(layers.eval().double())
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="pack: expected torch with oneDNN"):
        pack(layers.float())
