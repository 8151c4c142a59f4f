"""What an engine, its prompts and its helpers are made of: another type is refused, by the name of the argument."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import refattn
import twinattn.engine
from tests.helpers.engines import make_engine
from tests.helpers.tiny_models import make_llama
from twinattn.engine import CudaGraphs, DraftModel, Engine, Prompt, calibrate, fuse, pack
from twinattn.engine.arguments import check_out_of_memory
from twinattn.engine.engine_thread import EngineThread

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


@pytest.fixture(scope="module")
def llama():
    return make_llama()


WRONG = {
    "machine": ["cpu"],
    "runner": [CudaGraphs, "graphs"],
    "tokenizer": ["gpt2", b"gpt2", AutoModelForCausalLM],
    "twin": ["fastattn", None, math, twinattn.engine],
    "speculation": [3],
    "trust_model": ["no", 1],
    "batch_invariant": [1],
    "calculate_kv_scales": ["yes"],
    "num_kept_states": [3, -1],
    "kv_cache_dtype": [torch.float8_e4m3fn, None, ["auto"]],
    "calibration": [[]],
    "num_blocks": [True, 2.0],
}


@pytest.mark.parametrize("name", WRONG)
def test_an_argument_of_another_type_is_refused_by_name(llama, name):
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            Engine(llama, **dict(num_blocks=16, block_size=4, twin=refattn) | {name: value})


def test_what_is_no_model_in_memory_is_refused_by_name():
    config = make_llama().config
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    for model in (None, "llama", LlamaForCausalLM, torch.nn.Linear(2, 2), empty):
        for build in (make_engine, fuse, lambda model: calibrate(model, [[1]])):
            with pytest.raises(ValueError, match="^model: expected"):
                build(model)
    for model in (None, "llama", LlamaForCausalLM):
        with pytest.raises(ValueError, match="^model: expected"):
            pack(model)


def test_what_is_no_engine_is_refused_by_name(llama):
    for engine in (None, llama, type(make_engine(llama))):
        with pytest.raises(ValueError, match="^engine: expected an Engine"):
            DraftModel(engine)
        with pytest.raises(ValueError, match="^engine: expected an Engine"):
            EngineThread(engine)


@pytest.mark.parametrize("spans", [None, 3, torch.tensor([[0, 1]]), [3], [(0, 1.0)]])
def test_spans_of_another_type_are_refused_by_name(llama, spans):
    engine = make_engine(llama)
    with pytest.raises(ValueError, match="^spans: expected"):
        engine.add(Prompt([1, 2], spans))
    assert not engine.waiting


def test_a_pool_for_which_there_is_no_memory_is_refused_by_name(llama):
    """On a CPU torch says so in words."""
    with pytest.raises(torch.OutOfMemoryError, match="num_blocks: expected a pool that fits into the memory of cpu"):
        make_engine(llama, num_blocks=2**31 - 1, block_size=2**20)
    with pytest.raises(RuntimeError, match="something else"):
        check_out_of_memory(RuntimeError("something else"))
