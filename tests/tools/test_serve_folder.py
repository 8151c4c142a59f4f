"""What `twinattn serve` loads from a folder: a whole model, or a sentence that says what is wrong with it."""

import logging

import pytest
from safetensors.torch import load_file, save_file
from transformers.utils import logging as of_transformers
from typer.testing import CliRunner

from tests.helpers.tiny_models import byte_tokenizer, make_llama
from twinattn.cli import main
from twinattn.engine.demo_model import without_bars
from twinattn.engine.server.folder import load_folder


@pytest.fixture
def folder(tmp_path):
    make_llama(vocab_size=257).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def change(folder, **changes):
    """Change some weights of a checkpoint, or remove those that are None."""
    weights = load_file(folder / "model.safetensors") | {name.replace("__", "."): x for name, x in changes.items()}
    save_file({name: x for name, x in weights.items() if x is not None}, folder / "model.safetensors", {"format": "pt"})


def lacks_weights(folder):
    change(folder, lm_head__weight=None, model__layers__1__mlp__up_proj__weight=None)


def has_another_shape(folder):
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    change(folder, lm_head__weight=head[:90].contiguous())


def has_pointers(folder):
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def is_cut(name):
    def cut(folder):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: len(whole) // 2])

    return cut


def names_no_family(folder):
    (folder / "config.json").write_text('{"model_type": "nothing"}')


SPOILT = {
    "no weights": (lacks_weights, r", which lacks the weights lm_head.weight, model.layers.1.mlp.up_proj.weight$"),
    "another shape": (
        has_another_shape,
        r", whose weights have other shapes than its config says: lm_head.weight \[90,",
    ),
    "pointers": (has_pointers, r": git-lfs has not fetched model.safetensors, tokenizer.json; `git lfs pull` brings"),
    "half a checkpoint": (is_cut("model.safetensors"), r": SafetensorError: "),
    "half a config": (is_cut("config.json"), r": "),
    "half a tokenizer": (is_cut("tokenizer.json"), r": "),
    "no family": (names_no_family, r": .*nothing"),
    "no checkpoint": (lambda folder: (folder / "model.safetensors").unlink(), r": OSError: "),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_a_folder_that_is_not_whole_is_refused_in_a_sentence(folder, spoil, message):
    spoil(folder)
    with pytest.raises(
        ValueError, match=r"^model: expected a folder with a model of transformers, got '[^']*'" + message
    ):
        load_folder(folder)
    done = CliRunner().invoke(main, ["serve", str(folder)])
    assert done.exit_code == 2 and "model: expected a folder with a model" in done.output
    assert "Traceback" not in done.output


def test_weights_that_a_model_does_not_have_are_said(folder, caplog):
    extra = load_file(folder / "model.safetensors")["lm_head.weight"].clone()
    change(folder, model__adapter__weight=extra)
    with caplog.at_level(logging.WARNING, "twinattn"):
        model, _ = load_folder(folder)
    assert "has weights that the model does not use: model.adapter.weight" in caplog.text
    assert model.lm_head.weight.equal(extra)


def test_a_head_that_is_the_embeddings_is_not_missing(tmp_path):
    make_llama(vocab_size=257, tie_word_embeddings=True).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, _ = load_folder(tmp_path)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_only_bars_are_quiet():
    assert of_transformers.is_progress_bar_enabled()
    with without_bars():
        assert not of_transformers.is_progress_bar_enabled()
    assert of_transformers.is_progress_bar_enabled()
