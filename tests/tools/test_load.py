"""The load of many requests: what is asked, what is measured, and what a results file says."""

import dataclasses
import gc
import io
import json
import re
import sys
import textwrap
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from twinattn.bench import load, load_sglang, load_vllm
from twinattn.bench.load import Load, Round, make_engine, make_model, serve, table
from twinattn.cli import main
from twinattn.engine.storages import FourBitStorage, PagedStorage, QuantizedStorage

TINY = dict(
    vocab_size=load.LARGEST_TOKEN + 1,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
)


def test_the_load_is_that_of_nano_vllm():
    """As its bench.py draws it; these sums are of `random.seed(0)`, then prompts, then lengths of answers."""
    drawn = Load.draw(0)
    assert (len(drawn.prompts), sum(drawn.max_tokens), sum(map(len, drawn.prompts))) == (256, 133966, 142827)
    assert all(100 <= n <= 1024 for n in (*map(len, drawn.prompts), *drawn.max_tokens))
    assert Load.draw(1).prompts != drawn.prompts and Load.draw(0) == drawn


def test_what_a_round_sums_up():
    one = Round.of("x", 0.6, 1, 10.0, [[11.0, 11.5, 12.5], [13.0, 14.0]])
    assert (one.tokens, one.seconds, one.tokens_per_second) == (5, 4.0, 1.25)
    assert one.first[0] == 2.0 and one.between[0] == median([0.5, 1.0, 1.0])
    assert 2.9 < one.first[1] <= 3.0
    assert Round.of("x", 0.0, 0, 1.0, [[2.0]]).between == (0.0, 0.0), "an answer of one token has nothing between"


@pytest.fixture
def small(monkeypatch):
    """A load of four requests over a tiny model."""
    monkeypatch.setitem(load.MODELS, "qwen3-0.6b", TINY)
    draw = Load.draw
    monkeypatch.setattr(Load, "draw", lambda seed: draw(seed, num_requests=4, most=9))


@pytest.mark.parametrize("kv_cache_dtype", load.CACHES)
def test_the_engine_serves_it(small, kv_cache_dtype):
    model = make_model(TINY, torch.device("cpu"), torch.float32)
    engine = make_engine(model, num_seqs=4, budget=64, kv_cache_dtype=kv_cache_dtype)
    storages = dict(auto=PagedStorage, fp8_e4m3=QuantizedStorage, int4=FourBitStorage)
    assert type(engine.layers[0].storage) is storages[kv_cache_dtype]
    given = Load.draw(0)
    done = serve(engine, given, 0.6, 0)
    assert done.tokens == sum(given.max_tokens) and 0 < done.first[0] <= done.seconds
    assert engine.counters.preemptions == 0 and not engine.running
    text = Console(width=150, record=True, file=io.StringIO())
    text.print(table([done]))
    assert f"{done.tokens_per_second:.0f}" in text.export_text()


@pytest.mark.core
@pytest.mark.parametrize("ring", [None, 0, 16])
def test_on_a_gpu_layers_are_fused_where_none_keeps_a_state(ring, monkeypatch):
    """With doubles of what needs a GPU; the real `fuse` refuses a model of Qwen3-Next (`test_fused.py`)."""
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(load, "fuse", lambda model: ("fused", model))
    monkeypatch.setattr(load, "CudaGraphs", lambda: "graphs")
    monkeypatch.setattr(load, "Engine", lambda model, **options: (model, options))
    model, options = make_engine(on_gpu, ring=ring)
    assert model == (("fused", on_gpu) if ring is None else on_gpu)
    assert (options["runner"], options["state_ring_size"]) == ("graphs", ring)


def test_a_failure_is_no_figure(small):
    engine = make_engine(make_model(TINY, torch.device("cpu"), torch.float32), num_seqs=4, budget=64)
    with torch.no_grad():
        engine.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="4 requests failed, the first with FloatingPointError"):
        serve(engine, Load.draw(0), 0.0, 0)


NANO = """
    class Sequence:
        num_completion_tokens = 0
    class SamplingParams:
        def __init__(self, temperature=1.0, ignore_eos=True, max_tokens=0):
            assert temperature > 0 and ignore_eos
            self.max_tokens = max_tokens
    class LLM:
        def __init__(self, folder, max_model_len, max_num_seqs, max_num_batched_tokens):
            import json, pathlib, types
            assert json.loads(pathlib.Path(folder, "config.json").read_text())["hidden_size"] == 16
            self.scheduler = types.SimpleNamespace(waiting=[])
            self.left = {}
        def generate(self, prompts, params, use_tqdm):
            pass
        def add_request(self, prompt, params):
            self.scheduler.waiting.append(Sequence())
            self.left[self.scheduler.waiting[-1]] = params.max_tokens
        def is_finished(self):
            return not self.left
        def step(self):
            self.scheduler.waiting.clear()
            for sequence in list(self.left):
                sequence.num_completion_tokens += 1
                self.left[sequence] -= 1
                if not self.left[sequence]:
                    del self.left[sequence]
"""


def test_nano_vllm_is_asked_the_same(small, tmp_path, monkeypatch):
    """With a double of its interface: `LLM`, `SamplingParams`, `scheduler.waiting` and `step`."""
    package = tmp_path / "nanovllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(NANO))
    (package / "engine/__init__.py").touch()
    (package / "engine/model_runner.py").write_text("load_model = None\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(load.transformers, "AutoTokenizer", type("AutoTokenizer", (), {}))
    load.transformers.Qwen3Config(**TINY).save_pretrained(tmp_path / "model")
    found = load._serve_with_nano_vllm(str(tmp_path), str(tmp_path / "model"), load.ROUNDS, [0.0, 0.6])
    for name in [name for name in sys.modules if name.startswith("nanovllm")]:
        del sys.modules[name]
    assert [(one.server, one.temperature, one.number) for one in found] == [
        ("nano-vllm", temperature, number) for temperature in (0.0, 0.6) for number in range(load.ROUNDS)
    ]
    assert [one.tokens for one in found] == [sum(Load.draw(number).max_tokens) for number in range(4)]


class Vllm:
    """A double of `LLM`, of its engine, and of the engine's core: each step gives a token to each request."""

    def __init__(self, folder, **options):
        assert json.loads(Path(folder, "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
        assert options["attention_backend"] == "FASTATTN" and options["load_format"] == "dummy"
        assert options["kv_cache_dtype"] == "fp8_e4m3"
        assert options["compilation_config"] == dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
        self.llm_engine = self.engine_core = self
        self.left = {}

    def generate(self, prompt, params, use_tqdm):
        pass

    def add_request(self, name, prompt, params):
        assert prompt["prompt_token_ids"] and params.ignore_eos and params.output_kind == "at the end"
        self.left[name] = params.max_tokens

    def has_unfinished_requests(self):
        return any(self.left.values())

    def get_output(self):
        running = [name for name, count in self.left.items() if count]
        self.left |= {name: self.left[name] - 1 for name in running}
        return SimpleNamespace(outputs=[SimpleNamespace(request_id=name, new_token_ids=[5]) for name in running])

    def step(self):
        self.engine_core.get_output()


def test_vllm_is_asked_the_same(small, tmp_path, monkeypatch):
    """With doubles of vLLM's classes; when tokens come is seen between its engine and the core of it."""
    params = ModuleType("vllm.sampling_params")
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="at the end")
    made = dict(vllm=ModuleType("vllm"), registered=ModuleType("twinattn.integrations.vllm"))
    made["vllm"].LLM, made["vllm"].SamplingParams = Vllm, SimpleNamespace
    made["registered"].register = lambda: None
    for module in (params, *made.values()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    job = {}

    def run(command, env, **_):
        assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and command[1:3] == ["-m", "twinattn.bench.load_vllm"]
        job.update(json.loads(command[3]))
        found = load_vllm._serve(**job)
        Path(command[4]).write_text(json.dumps([dataclasses.asdict(one) for one in found]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(load.subprocess, "run", run)
    found = load_vllm.of_vllm("FASTATTN", TINY, [0.0, 0.6], rounds=1, kv_cache_dtype="fp8_e4m3")
    assert [(one.server, one.temperature, one.number) for one in found] == [
        ("vLLM, FASTATTN", temperature, 0) for temperature in (0.0, 0.6)
    ]
    assert [one.tokens for one in found] == [sum(Load.draw(number).max_tokens) for number in range(2)]
    assert all(0 < one.first[0] <= one.seconds for one in found)
    monkeypatch.setattr(load.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(load.LoadError, match="vLLM with TRITON_ATTN ended with exit code 1"):
        load_vllm.of_vllm("TRITON_ATTN", TINY, [0.0], rounds=1)


class Sglang:
    """Answers every request with as many tokens as it asks for."""

    def __init__(self, **given):
        assert given["attention_backend"] == "fastattn" and given["kv_cache_dtype"] == "fp8_e4m3"
        assert given["cuda_graph_backend_prefill"] == "disabled", "full graphs of decodes alone"

    def generate(self, input_ids, sampling_params):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
        assert len(params) == len(input_ids)
        return [dict(output_ids=[5] * one["max_new_tokens"]) for one in params]

    def shutdown(self):
        pass


def test_sglang_is_asked_the_same(small, monkeypatch):
    """With a double of its engine; its rounds have no times of single tokens."""
    backend = ModuleType("twinattn.integrations.sglang")
    backend.NAME, backend.register = "fastattn", lambda: None
    made = ModuleType("sglang")
    made.Engine = Sglang
    for module in (backend, made):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(command, env, **_):
        assert command[1:3] == ["-m", "twinattn.bench.load_sglang"]
        found = load_sglang._serve(**json.loads(command[3]))
        Path(command[4]).write_text(json.dumps([dataclasses.asdict(one) for one in found]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(load.subprocess, "run", run)
    found = load_sglang.of_sglang("fastattn", TINY, [0.0, 0.6], rounds=1, kv_cache_dtype="fp8_e4m3")
    assert [(one.server, one.temperature, one.number) for one in found] == [
        ("SGLang, fastattn", temperature, 0) for temperature in (0.0, 0.6)
    ]
    assert [one.tokens for one in found] == [sum(Load.draw(number).max_tokens) for number in range(2)]
    assert {(one.first, one.between) for one in found} == {(None, None)}
    text = Console(width=150, record=True, file=io.StringIO())
    text.print(load.table(found))
    assert text.export_text().count("SGLang, fastattn") == 2
    monkeypatch.setattr(Sglang, "generate", lambda *_, **__: [dict(output_ids=[5])])
    with pytest.raises(load.LoadError, match="tokens, got 1"):
        load_sglang.of_sglang("fastattn", TINY, [0.0], rounds=1, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperatures=(0.0, -1.0)), "temperature: expected a finite number of at least 0"),
        (dict(temperatures=()), "temperatures: expected at least one"),
        (dict(nano_vllm=Path("nowhere")), "nano_vllm: expected a folder, got 'nowhere'"),
        (dict(results=Path()), "results: expected a file, got the folder '.'"),
        (dict(rings=(16,)), "rings: expected none, as qwen3-0.6b has no layers that keep a state, got [16]"),
        (dict(model="qwen3-next", rings=(0, -1)), "ring: expected a Python int of at least 0, got -1"),
        (dict(model="qwen3-next", nano_vllm=Path()), "nano_vllm: expected None, as it does not serve qwen3-next"),
        (
            dict(model="qwen3-next", vllm=["FASTATTN"]),
            "vllm: expected no backend, as qwen3-next is not",
        ),
        (
            dict(model="qwen3-next", sglang=["triton"]),
            "sglang: expected no backend, as qwen3-next is not",
        ),
        (dict(picture=Path("steps.abc")), "picture: expected"),
        (dict(model="qwen3"), "model: expected one of qwen3-0.6b, qwen3-8b, qwen3-next, got 'qwen3'"),
        (dict(graphs="all"), "graphs: expected one of full, default, got 'all'"),
        (dict(rounds=0), "rounds: expected a positive int, got 0"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype: expected one of auto, fp8_e4m3, int4, got 'fp8'"),
        (
            dict(kv_cache_dtype="fp8_e4m3", nano_vllm=Path()),
            "nano_vllm: expected None, as it does not serve a cache of fp8_e4m3",
        ),
        (
            dict(kv_cache_dtype="int4", vllm=["FASTATTN"]),
            "vllm: expected no backend, as it has no cache of int4 in this engine's format, got ['FASTATTN']",
        ),
    ],
    ids=[
        "temperature",
        "none",
        "source",
        "results",
        "rings",
        "ring",
        "states",
        "beside",
        "beside sglang",
        "picture",
        "model",
        "graphs",
        "rounds",
        "cache",
        "cache beside",
        "cache inside",
    ],
)
def test_bad_options_are_refused_before_anything_is_served(options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=re.escape(message)):
        load.run(Console(quiet=True), **options)


def test_a_failure_is_a_sentence_of_the_command(monkeypatch):
    def fail(*_, **__):
        raise load.LoadError("nano-vllm ended with exit code 1")

    monkeypatch.setattr(load, "run", fail)
    done = CliRunner().invoke(main, ["load"])
    assert done.exit_code == 1 and done.output == "nano-vllm ended with exit code 1\n"


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device: expected a CUDA device"):
        load.run(Console(quiet=True))


def test_a_run_writes_what_it_measured(small, tmp_path, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "make_model", lambda sizes, *_: make_model(sizes, torch.device("cpu"), torch.float32))
    monkeypatch.setattr(load, "machine", lambda device: {"name": "a GPU"})
    nano = Round("nano-vllm", 0.0, 0, 10, 1.0, (0.1, 0.2), (0.01, 0.02))
    monkeypatch.setattr(load, "of_nano_vllm", lambda folder, *_: [nano])
    inside, asked = dataclasses.replace(nano, server="vLLM, FASTATTN"), []
    monkeypatch.setattr(load_vllm, "of_vllm", lambda *_, **given: asked.append(given) or [inside])
    text = Console(width=150, record=True, file=io.StringIO())
    also = dataclasses.replace(nano, server="SGLang, triton", first=None, between=None)
    monkeypatch.setattr(load_sglang, "of_sglang", lambda *_, **__: [also])
    beside = dict(nano_vllm=tmp_path, vllm=["FASTATTN"], sglang=["triton"])
    load.run(text, temperatures=(0.0,), rounds=1, **beside, results=tmp_path / "new/load.json")
    of_fp8 = dict(kv_cache_dtype="fp8_e4m3", vllm=["FASTATTN"])
    load.run(text, temperatures=(0.0,), rounds=1, **of_fp8, results=tmp_path / "new/fp8.json")
    load.run(text, temperatures=(0.0,), rounds=1, kv_cache_dtype="int4", results=tmp_path / "new/int4.json")
    gc.unfreeze()
    assert [given["kv_cache_dtype"] for given in asked] == ["auto", "fp8_e4m3"]
    for file, kind in (("fp8", "fp8_e4m3"), ("int4", "int4")):
        assert json.loads((tmp_path / f"new/{file}.json").read_text())["kv_cache_dtype"] == kind
    found = json.loads((tmp_path / "new/load.json").read_text())
    assert found["machine"] == {"name": "a GPU"} and found["date"] and found["versions"]["python"]
    assert [one["server"] for one in found["rounds"]] == [
        "nano-vllm",
        "vLLM, FASTATTN",
        "SGLang, triton",
        "this engine",
    ]
    assert (found["model"], found["graphs"]) == ("qwen3-0.6b", "full") and found["warm_up_seconds"] > 0
    assert Round.read(found["rounds"][0]) == nano
    assert "with a profile" in text.export_text()


def test_a_model_with_states_is_served_once_for_each_ring(small, tmp_path, monkeypatch, device):
    """By the command, one engine after the other; the sizes are those of Qwen3-Next but for its experts."""
    configured = load.transformers.Qwen3NextConfig(**load.NEXT_SIZES)
    usual = load.transformers.Qwen3NextConfig().to_dict()
    changed = {name for name, value in configured.to_dict().items() if value != usual[name]}
    assert changed == {"num_experts", "max_position_embeddings"}
    heads = dict(linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
    small_sizes = TINY | heads | dict(num_hidden_layers=4, num_experts=0)
    monkeypatch.setitem(load.MODELS, "qwen3-next", small_sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(load, "make_model", lambda sizes, *_: make_model(sizes, torch.device("cpu"), torch.float32))
    monkeypatch.setattr(load, "machine", lambda device: {"name": "a GPU"})
    engines = []
    monkeypatch.setattr(
        load,
        "make_engine",
        lambda model, ring, **_: engines.append(make_engine(model, num_seqs=4, ring=ring)) or engines[-1],
    )
    given = ["--model", "qwen3-next", "--temperature", "0", "--results", str(tmp_path / "load.json")]
    done = CliRunner().invoke(main, ["load", *given])
    gc.unfreeze()
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "load.json").read_text())
    assert found["model"] == "qwen3-next"
    assert [one["server"] for one in found["rounds"]] == ["this engine, no ring"] * 2 + ["this engine, ring of 16"] * 2
    rings = [engine.scheduler.states.rings for engine in engines]
    assert rings[0] is None and rings[1].ring_size == 16
