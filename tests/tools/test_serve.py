"""The server, asked by the official client of OpenAI, over a tiny model with random weights."""

import asyncio
import json
import logging
import re
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from itertools import combinations, pairwise
from types import SimpleNamespace

import openai
import pytest
import uvicorn
from typer.testing import CliRunner

from tests.helpers.engines import assert_nothing_is_held, make_engine
from tests.helpers.tiny_models import byte_tokenizer, make_follower, make_llama
from twinattn.cli import main
from twinattn.engine import NGram, SamplingParams
from twinattn.engine.engine_thread import Answer
from twinattn.engine.server.api import Api
from twinattn.engine.server.ask import read_ask
from twinattn.engine.storages import FourBitStorage

# 0 is a temperature, too, and bad input has its own errors.
pytestmark = pytest.mark.usefixtures("one_thread", "shapes_unchecked")
TEMPLATE = (
    "{% for message in messages %}{% if message.role.startswith('critic') %}"
    "{{ raise_exception('no critics' ~ message.role.replace('critic', '').replace(' ', ', ')) }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
CHAT = "system: Be kind.\nuser: Why?\nassistant: "
PROMPT = "Once upon a time"
DRAWN = dict(temperature=0.9, top_p=0.95, seed=4)


@pytest.fixture(scope="module")
def llama():
    return make_llama(vocab_size=128, eos_token_id=10)  # every token is a letter, so a text says which they were


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@contextmanager
def served(engine, **options):
    """Serve an engine at a free port, as `twinattn serve` does."""
    api = Api(engine, "tiny", **options)
    server = uvicorn.Server(uvicorn.Config(api.app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    try:
        asked = dict(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        with openai.OpenAI(**asked) as client:
            yield SimpleNamespace(api=api, url=url, client=client, asked=asked, engine=engine)
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive() and not api.thread.is_alive
    assert_nothing_is_held(engine)


@pytest.fixture(scope="module")
def server(llama, tokenizer):
    with served(make_engine(llama, "fastattn", tokenizer=tokenizer, num_blocks=600)) as server:
        yield server


@pytest.fixture(scope="module")
def alone(llama, tokenizer):
    """An engine of its own."""
    return make_engine(llama, "fastattn", tokenizer=tokenizer, num_blocks=600, max_num_batched_tokens=256)


def until(holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this should have happened by now"
        time.sleep(0.005)


def metrics(server):
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def text_of(answer, is_chat):
    return answer.choices[0].message.content if is_chat else answer.choices[0].text


# The answers are the engine's.


@pytest.mark.parametrize("sampling", [dict(temperature=0), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_an_answer_is_the_engines_whole_or_in_pieces(server, alone, is_chat, sampling):
    (expected,) = alone.generate([CHAT if is_chat else PROMPT], SamplingParams(max_tokens=30, **sampling))
    assert len(set(expected.text)) > 5
    create = server.client.chat.completions.create if is_chat else server.client.completions.create
    ask = dict(model="tiny", max_tokens=30, **sampling) | (dict(messages=MESSAGES) if is_chat else dict(prompt=PROMPT))
    whole = create(**ask)
    *chunks, last, numbers = create(**ask, stream=True, stream_options={"include_usage": True})
    pieces = [(chunk.choices[0].delta.content if is_chat else chunk.choices[0].text) or "" for chunk in chunks]
    assert text_of(whole, is_chat) == "".join(pieces) == expected.text
    assert len([piece for piece in pieces if piece]) == len(expected.output_ids), "each when it is there"
    assert whole.choices[0].finish_reason == last.choices[0].finish_reason == expected.finish_reason
    assert {chunk.choices[0].finish_reason for chunk in chunks} == {None} and not numbers.choices
    count = len(expected.output_ids)
    for usage in (whole.usage, numbers.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_len, count)
        assert usage.total_tokens == expected.prompt_len + count
    assert {chunk.id for chunk in chunks} == {last.id} != {whole.id}


def test_what_is_not_given_is_as_in_the_api(llama, tokenizer, alone):
    """Sixteen tokens of a completion, drawn each time; a chat goes on as far as there is room."""
    ask = dict(model="tiny", prompt=[*PROMPT.encode()], extra_body={"stop": None, "n": 1, "user": "me", "echo": False})
    chat = dict(model="tiny", messages=MESSAGES, **DRAWN)
    with served(make_engine(llama, tokenizer=tokenizer, num_blocks=20)) as server:
        first, second = (server.client.completions.create(**ask, top_p=1) for _ in range(2))
        assert {first.usage.completion_tokens, second.usage.completion_tokens} <= set(range(1, 17))
        assert first.choices[0].text != second.choices[0].text
        answer = server.client.chat.completions.create(**chat)
        short = server.client.chat.completions.create(**chat, max_completion_tokens=3)
    (expected,) = alone.generate([CHAT], SamplingParams(max_tokens=80 - len(CHAT) + 1, **DRAWN))
    assert expected.finish_reason == answer.choices[0].finish_reason == "length"
    assert text_of(answer, True) == expected.text
    assert text_of(short, True) == expected.text[:3]


def test_two_hundred_streams_at_once_are_answered_as_if_alone(llama, tokenizer, alone, caplog):
    """In a pool that is too small for the 24 that may run, so that some are preempted; with shared prefixes."""
    engine = make_engine(llama, "fastattn", tokenizer=tokenizer, num_blocks=44, max_num_seqs=24)
    prompts = [f"{'All of them begin so. ' * (i % 3)}But this is number {i}." for i in range(200)]
    samplings = [SamplingParams(max_tokens=2 + i % 7, temperature=0.3 * (i % 4), top_p=0.9, seed=i) for i in range(200)]
    expected = alone.generate(prompts, samplings)
    assert len({request.text for request in expected}) > 150

    async def stream(client, prompt, sampling):
        text, reasons = "", set()
        names = ("max_tokens", "temperature", "top_p", "seed")
        options = {name: getattr(sampling, name) for name in names}
        async for chunk in await client.completions.create(model="tiny", prompt=prompt, stream=True, **options):
            text += chunk.choices[0].text
            reasons.add(chunk.choices[0].finish_reason)
        return text, reasons - {None}

    async def all_at_once(asked):
        async with openai.AsyncOpenAI(**asked) as client:
            return await asyncio.gather(*(stream(client, *pair) for pair in zip(prompts, samplings, strict=True)))

    with caplog.at_level(logging.INFO, "twinattn"), served(engine, log_steps=True) as server:
        answers = asyncio.run(all_at_once(server.asked))
        found = metrics(server)
    assert answers == [(request.text, {request.finish_reason}) for request in expected]
    count, counters = sum(len(request.output_ids) for request in expected), engine.counters
    assert counters.preemptions > 0 and counters.cached_blocks > 0
    assert {name: found[f"fastattn_{name}"] for name in ("steps_total", "preemptions_total")} == {
        "steps_total": counters.steps,
        "preemptions_total": counters.preemptions,
    }
    assert found["fastattn_prefix_cache_hit_tokens_total"] == 4 * counters.cached_blocks
    assert found["fastattn_time_to_first_token_seconds_count"] == 200
    assert found["fastattn_inter_token_latency_seconds_count"] == count - 200
    assert found["fastattn_e2e_request_latency_seconds_count"] == 200
    assert 0 < found["fastattn_inter_token_latency_seconds_sum"] / (count - 200) < 5
    assert (found["fastattn_kv_blocks"], found["fastattn_kv_blocks_used"]) == (44, 0)
    assert sum(value for name, value in found.items() if name.startswith("fastattn_requests_total")) == 200
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert len(lines) == counters.steps
    assert sum(int(re.search(r"(\d+) preemptions", line)[1]) for line in lines) == counters.preemptions


def test_a_template_reads_what_a_message_has():
    """And a list of texts is their lines."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}{{ m.reasoning_content }}{{ m.tool_call_id }}"
        "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments }}]{% endfor %};"
        "{% endfor %}"
    )
    call = dict(id="c1", type="function", function=dict(name="add", arguments='{"a": 2}'))
    texts = [{"type": "text", "text": "add"}, {"text": "2 and 3"}]
    messages = [
        dict(role="user", name="ann", content=texts, tool_calls=None),
        dict(role="assistant", content=None, reasoning_content="so I call", tool_calls=[call], annotations=[]),
        dict(role="tool", content="5", tool_call_id="c1"),
    ]
    tokens = read_ask(dict(messages=messages), tokenizer, True).answer.tokens()
    assert bytes(tokens).decode() == 'user ann: add\n2 and 3;assistant : so I call[add {"a": 2}];tool : 5c1;'


def test_a_completion_goes_on_with_its_prompt_and_a_chat_does_not(tokenizer):
    for prompt in ("Hi", [72, 105]):
        assert read_ask(dict(prompt=prompt), tokenizer, False).answer.continues
    assert not read_ask(dict(messages=MESSAGES), tokenizer, True).answer.continues


# Stop texts.


@pytest.mark.parametrize("drafts", [None, NGram(max_drafts=4)], ids=["token by token", "with drafts"])
def test_usage_ends_with_the_token_that_completes_a_stop_text(tokenizer, drafts):
    """A step with drafts may have brought more."""
    model = make_follower([*range(1, 128), 0])
    with served(make_engine(model, "fastattn", tokenizer=tokenizer, speculation=drafts)) as server:
        ask = dict(model="tiny", prompt="abcdefgh" * 2, max_tokens=8, temperature=0, stop="k")
        answer = server.client.completions.create(**ask)
        *_, last = server.client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        ended = dict(ask, prompt="abcdefghijkl" * 2 + "abcdefgh")
        drafted = server.client.completions.create(**ended)
    assert (text_of(answer, False), answer.usage.completion_tokens, last.usage.completion_tokens) == ("ij", 3, 3)
    assert (text_of(drafted, False), drafted.usage.completion_tokens) == ("ij", 3)
    assert bool(drafts) == (server.engine.counters.accepted_tokens > 2)


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcabd!", ("abd",), "abc"),
        ("aaab", ("aab",), "a"),
        ("abcd", ("bcx", "cd"), "ab"),
        ("xyab", ("abc",), "xyab"),
        ("abab", ("b", "abab"), "a"),  # what is complete first
        ("xaab", ("ab", "aab"), "x"),
    ],
)
def test_a_stop_text_ends_an_answer_however_it_is_cut_into_pieces(text, stop, shown):
    for count in range(len(text)):
        for cuts in combinations(range(1, len(text)), count):
            answer, pieces = Answer(list, SamplingParams(), stop), []
            for start, end in pairwise((0, *cuts, len(text))):
                piece, stops = answer.cut(text[start:end])
                pieces.append(piece)
                assert shown.startswith("".join(pieces)), "nothing is shown that would have to be taken back"
                if stops:
                    break
            assert ("".join(pieces) + answer.held.get(0, ""), stops) == (shown, shown != text)


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_ends_the_request(server, alone, streams):
    (whole,) = alone.generate([PROMPT], SamplingParams(max_tokens=40, **DRAWN))
    stop = whole.text[20:23]
    end = whole.text.index(stop) + 3
    steps = server.engine.counters.steps
    ask = dict(model="tiny", prompt=PROMPT, max_tokens=40, stop=["nowhere", stop], **DRAWN)
    if streams:
        chunks = list(server.client.completions.create(**ask, stream=True))
        text, reason = "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = server.client.completions.create(**ask)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert answer.usage.completion_tokens == end
    assert (text, reason) == (whole.text[: end - 3], "stop")
    until(lambda: not server.engine.running)
    assert server.engine.counters.steps - steps == end, "no step is made for tokens that will not be read"


def test_what_might_have_been_a_stop_text_is_not_lost(server, alone):
    (whole,) = alone.generate([PROMPT], SamplingParams(max_tokens=9, **DRAWN))
    stop = f"{whole.text[-2:]} and more"
    answer = server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, stop=stop, **DRAWN)
    assert (text_of(answer, False), answer.choices[0].finish_reason) == (whole.text, "length")


# What goes wrong.


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_frees_its_blocks(llama, tokenizer, alone, streams):
    """And requests served beside it go on."""
    engine = make_engine(llama, "fastattn", tokenizer=tokenizer, num_blocks=600)
    long = dict(model="tiny", prompt=PROMPT, max_tokens=1900, temperature=0)
    (expected,) = alone.generate(["Another one"], SamplingParams(max_tokens=30, **DRAWN))
    with served(engine) as server:
        other = server.client.completions.create(
            model="tiny", prompt="Another one", max_tokens=30, **DRAWN, stream=True
        )
        if streams:
            stream = server.client.completions.create(**long, stream=True)
            next(iter(stream))
            assert engine.running and len(engine.pool.free) < 600
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                server.client.with_options(timeout=0.3).completions.create(**long)
        assert "".join(chunk.choices[0].text for chunk in other) == expected.text
        until(lambda: not engine.running)
        assert len(engine.pool.free) == 600 and engine.counters.steps < 1000
        until(lambda: metrics(server).get('fastattn_requests_total{finish_reason="abort"}') == 1)


# Several samples.


@pytest.mark.covers("G228")
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_samples_are_choices_whole_or_in_pieces(server, alone, is_chat):
    """The prompt is counted once; a stop text ends the sample that it is in."""
    prompt, sampling = CHAT if is_chat else PROMPT, SamplingParams(max_tokens=20, n=3, **DRAWN)
    (whole,) = alone.generate([prompt], sampling)
    stop = whole.samples[0].text[10:13]
    expected = [sample.text.partition(stop)[0] for sample in whole.samples]
    assert len(expected[0]) < 20 and len(set(expected)) == 3
    counts = [
        len(sample.output_ids) if text == sample.text else len(text) + 3
        for sample, text in zip(whole.samples, expected, strict=True)
    ]
    create = server.client.chat.completions.create if is_chat else server.client.completions.create
    ask = dict(model="tiny", max_tokens=20, n=3, stop=stop, **DRAWN)
    ask |= dict(messages=MESSAGES) if is_chat else dict(prompt=PROMPT)
    answer = create(**ask)
    *chunks, numbers = create(**ask, stream=True, stream_options={"include_usage": True})
    texts, reasons = ["", "", ""], [None] * 3
    for choice in (chunk.choices[0] for chunk in chunks):
        assert reasons[choice.index] is None, "nothing comes after the last chunk of a sample"
        texts[choice.index] += (choice.delta.content if is_chat else choice.text) or ""
        reasons[choice.index] = choice.finish_reason
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content if is_chat else choice.text for choice in answer.choices] == texts == expected
    assert [choice.finish_reason for choice in answer.choices] == reasons and reasons[0] == "stop"
    for usage in (answer.usage, numbers.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (whole.prompt_len, sum(counts))
    until(lambda: not server.engine.running)
    assert len(server.engine.pool.free) == 600


def test_a_client_that_hangs_up_ends_all_samples(llama, tokenizer):
    engine = make_engine(llama, "fastattn", tokenizer=tokenizer, num_blocks=600)
    with served(engine) as server:
        ask = dict(model="tiny", prompt=PROMPT, max_tokens=1900, n=3, **DRAWN, stream=True)
        stream = server.client.completions.create(**ask)
        next(iter(stream))
        assert len(engine.running) == 3
        stream.close()
        until(lambda: not engine.running)
        assert len(engine.pool.free) == 600 and engine.counters.steps < 1000
        until(lambda: metrics(server).get('fastattn_requests_total{finish_reason="abort"}') == 3)


def test_a_step_that_fails_ends_all_samples(llama, tokenizer, monkeypatch):
    engine = make_engine(llama, tokenizer=tokenizer)
    with served(engine) as server:
        monkeypatch.setattr(engine.scheduler, "schedule", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
            server.client.completions.create(model="tiny", prompt=PROMPT, n=2)
        monkeypatch.undo()
        assert len(server.client.completions.create(model="tiny", prompt=PROMPT, n=2).choices) == 2


BAD = {
    "no prompt": (dict(prompt=None), r"prompt: expected some, got none"),
    "an empty prompt": (dict(prompt=[]), r"prompt: expected at least one token"),
    "two prompts": (dict(prompt=["a", "b"]), r'prompt: expected one text, or .*, got \["a", "b"\]'),
    "an unknown token": (dict(prompt=[5, 128]), r"prompt: expected token ids in 0..127, got 5..128"),
    "half a character": (dict(prompt="\ud800"), r"prompt: "),
    "a long prompt": (dict(prompt="a" * 3000), r"prompt: expected to fit in the pool of 600 blocks"),
    "no tokens": (dict(max_tokens=0), r"max_tokens: expected an int of at least 1, got 0"),
    "a temperature": (dict(temperature=-1), r"temperature: expected 0 \(greedy\) or more"),
    "top_p": (dict(top_p=1.5), r"top_p: expected a probability"),
    "a seed": (dict(seed="x"), r"seed: expected an int, got 'x'"),
    "an empty stop": (dict(stop=["a", ""]), r"stop: expected a text, or a list"),
    "a stop that is no text": (dict(stop={"a": 1}), r"stop: expected a text"),
    "no samples": (dict(n=0), r"n: expected an int of at least 1, got 0"),
    "greedy samples": (dict(n=2, temperature=0), r"n: expected 1 with temperature=0, as greedy samples are all equal"),
    "many samples": (dict(n=65), r"n: expected at most max_num_seqs=64 samples, which run at once, got 65"),
    "the best of some": (dict(n=2, best_of=4), r"best_of: expected none, as this server does not compute it, got 4"),
    "logprobs": (dict(logprobs=0), r"logprobs: expected none"),
    "a penalty": (dict(presence_penalty=0.5), r"presence_penalty: expected none"),
    "a field of others": (dict(top_k=5), r"top_k: expected none, .* got 5"),
    "stream": (dict(stream="yes"), r"stream: expected true or false"),
    "stream_options": (dict(stream_options={"x": 1}), r"stream_options: expected an object"),
    "no messages": (dict(messages=[]), r"messages: expected a list of at least one, got \[\]"),
    "a message": (dict(messages=["Hi"]), r'messages: expected each to be an object with a role, got "Hi"'),
    "a picture": (
        dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        r"messages: expected each content to be text",
    ),
    "a field of a message": (
        dict(messages=[{"role": "user", "content": "Hi", "mood": "merry"}]),
        r'messages: expected no field "mood", which no template reads, got "merry"',
    ),
    "a name": (dict(messages=[{"role": "user", "content": "Hi", "name": 3}]), r"messages: expected name to be a text"),
    "a call": (
        dict(messages=[{"role": "assistant", "tool_calls": [{"id": "c1"}]}]),
        r'messages: expected tool_calls to have a function with a name, got {"id": "c1"}',
    ),
    "no content": (dict(messages=[{"role": "user"}]), r"messages: expected each content to be text"),
    "a field of a part": (
        dict(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}]),
        r'messages: expected no field "cache_control" beside a text',
    ),
    "two limits": (
        dict(messages=MESSAGES, max_tokens=5, max_completion_tokens=3),
        r"max_tokens: expected that of max_completion_tokens, 3, got 5",
    ),
    "include_usage": (dict(stream_options={"include_usage": "no"}), r"stream_options: expected an object"),
    "half a character in a field": (b'{"model": "tiny", "prompt": "x", "\\ud83d": 1}', r"\\ud83d: expected none"),
    "half a character in an error": (
        dict(messages=[{"role": "critic \ud83d", "content": "No."}]),
        r"messages: expected what .*: no critics, \\ud83d",
    ),
    "what the template refuses": (
        dict(messages=[{"role": "critic", "content": "No."}]),
        r"messages: expected what the model's chat template takes, got an error: no critics",
    ),
    "a list": ([1], r"body: expected a JSON object, got \[1\]"),
    "no JSON": (b"{", r"body: expected JSON"),
    "brackets": (b"[" * 100_000, r"body: expected JSON"),
    "no text": (b"\xff", r"body: expected JSON"),
}


def post(server, path, body):
    """Send what no client would; return the status and the JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data)) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_bad_input_gets_400_and_a_sentence(server, changes, message):
    body = changes
    is_chat = isinstance(changes, dict) and "messages" in changes
    if isinstance(changes, dict):
        body = dict(model="tiny") | ({} if is_chat else dict(prompt=PROMPT)) | changes
    for streams in (False, True):
        if isinstance(body, dict) and streams:
            body = dict(stream=True) | body
        status, answer = post(server, "/v1/chat/completions" if is_chat else "/v1/completions", body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error"
        assert re.match(message, answer["error"]["message"])
    assert_nothing_is_held(server.engine)


def test_a_model_without_a_chat_template_has_no_chats(llama):
    with served(make_engine(llama, tokenizer=byte_tokenizer())) as server:
        with pytest.raises(openai.BadRequestError, match="the model has no chat template"):
            server.client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert text_of(server.client.completions.create(model="tiny", prompt=PROMPT, seed=1), False)


def test_a_full_queue_gets_429(llama, tokenizer, monkeypatch):
    engine = make_engine(llama, tokenizer=tokenizer, max_num_seqs=1)
    gate, step = threading.Semaphore(1), engine.step

    def slow():
        assert gate.acquire(timeout=30)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    ask = dict(model="tiny", prompt=PROMPT, max_tokens=3, temperature=0)
    with served(engine, max_waiting=2) as server:
        first = server.client.completions.create(**ask, stream=True)
        next(iter(first))  # it runs, and the engine waits for the gate in its second step
        texts = []
        others = [
            threading.Thread(target=lambda: texts.append(text_of(server.client.completions.create(**ask), False)))
            for _ in range(2)
        ]
        for i, other in enumerate(others):
            other.start()
            until(lambda count=i + 1: server.api.thread.num_waiting == count)
        with pytest.raises(openai.RateLimitError, match="2 requests wait, and no more may"):
            server.client.completions.create(**ask)
        gate.release(100)
        for other in others:
            other.join(30)
        assert len(set(texts)) == 1 and len(texts) == 2
        assert text_of(server.client.completions.create(**ask), False) == texts[0], "there is room again"
        list(first)


def test_a_request_that_fails_fails_alone(llama, tokenizer, alone):
    """Whole, it is a 500; in a stream that has begun, an event. The others get their answers."""

    def refuse(module, arguments):
        if (arguments[0] == ord("^")).any():
            raise RuntimeError("no such row")

    (expected,) = alone.generate([PROMPT], SamplingParams(max_tokens=40, **DRAWN))
    engine = make_engine(llama, "fastattn", tokenizer=tokenizer)
    hook = llama.get_input_embeddings().register_forward_pre_hook(refuse)
    try:
        with served(engine) as server:
            bad = dict(model="tiny", prompt="What is ^?", max_tokens=5)
            good = server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, **DRAWN, stream=True)
            with pytest.raises(openai.InternalServerError, match="RuntimeError: no such row"):
                server.client.completions.create(**bad)
            with pytest.raises(openai.APIError, match="RuntimeError: no such row"):
                list(server.client.completions.create(**bad, stream=True))
            assert "".join(chunk.choices[0].text for chunk in good) == expected.text
            assert metrics(server)['fastattn_requests_total{finish_reason="error"}'] == 2
    finally:
        hook.remove()


def test_after_a_step_that_fails_the_server_goes_on(llama, tokenizer, alone, monkeypatch):
    engine = make_engine(llama, tokenizer=tokenizer)
    schedule = engine.scheduler.schedule

    def broken():
        monkeypatch.setattr(engine.scheduler, "schedule", schedule)
        raise RuntimeError("no plan")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    (expected,) = alone.generate([PROMPT], SamplingParams(max_tokens=5))
    ask = dict(model="tiny", prompt=PROMPT, max_tokens=5, temperature=0)
    with served(engine) as server:
        with pytest.raises(openai.InternalServerError, match="RuntimeError: no plan"):
            server.client.completions.create(**ask)
        assert_nothing_is_held(engine)
        assert text_of(server.client.completions.create(**ask), False) == expected.text


def test_a_server_that_ends_aborts_its_streams(llama, tokenizer):
    engine = make_engine(llama, tokenizer=tokenizer, num_blocks=600)
    with served(engine) as server:
        stream = server.client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1900, temperature=0, stream=True
        )
        next(iter(stream))
    assert engine.counters.steps < 1900  # and `served` has checked that nothing is held


# What else there is.


def test_models_health_and_what_is_not_there(server):
    (model,) = server.client.models.list()
    assert (model.id, model.object, server.client.models.retrieve("tiny").id) == ("tiny", "model", "tiny")
    with pytest.raises(openai.NotFoundError, match="model: expected 'tiny', got \"other\""):
        server.client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.NotFoundError, match="model: expected 'tiny'"):
        server.client.models.retrieve("some/other")
    with urllib.request.urlopen(f"{server.url}/health") as response:
        assert json.load(response) == {"status": "ok"}
    assert post(server, "/v1/embeddings", {})[0] == 404
    assert post(server, "/v1/models", {})[0] == 405


def test_a_thread_that_has_died_is_seen(llama, tokenizer, monkeypatch):
    """By a request that was under way, by one that had just come, and by later ones."""
    engine, gate, errors = make_engine(llama, tokenizer=tokenizer), threading.Event(), []

    def step():
        gate.wait(30)
        sys.exit("gone")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(engine, "step", step)
    with served(engine) as server:

        def ask():
            with pytest.raises(openai.InternalServerError) as error:
                server.client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
            errors.append(str(error.value))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        for thread in asking:
            thread.start()
        until(lambda: server.api.thread.num_waiting == 2)
        gate.set()
        for thread in asking:
            thread.join(30)
        until(lambda: not server.api.thread.is_alive)
        ask()
        assert len(errors) == 3 and all("the engine has stopped" in error for error in errors)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/health")


def test_an_engine_without_a_tokenizer_is_refused(llama):
    with pytest.raises(ValueError, match="engine: expected one with a tokenizer"):
        Api(make_engine(llama), "tiny")
    with pytest.raises(ValueError, match="max_waiting: expected an int of at least 1, got 0"):
        Api(make_engine(llama, tokenizer=byte_tokenizer()), "tiny", max_waiting=0)


def test_the_command_serves_a_folder(llama, tokenizer, tmp_path, monkeypatch):
    folder = tmp_path / "small"
    llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    runs = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **options: runs.append((app, options)))
    given = ["--port", "0", "--num-blocks", "7", "--twin", "refattn", "--kv-cache-dtype", "int4"]
    done = CliRunner().invoke(main, ["serve", str(folder), *given])
    assert done.exit_code == 0, done.output
    ((app, options),) = runs
    assert (options["host"], options["port"]) == ("127.0.0.1", 0)
    (endpoint,) = [route.endpoint for route in app.routes if route.path == "/health"]
    api = endpoint.__self__
    engine = api.thread.engine
    assert (api.name, len(engine.pool.users), engine.twin.package.__name__) == ("small", 7, "refattn")
    assert all(isinstance(layer.storage, FourBitStorage) for layer in engine.layers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "model: expected a folder with a model of transformers, got 'nowhere'"),
        (["--twin", "other"], "twin: expected fastattn or refattn, got 'other'"),
        (["--device", "other"], "device: expected one of cpu"),
        (
            ["--kv-cache-dtype", "fp4"],
            "kv_cache_dtype: expected auto, fp8_e4m3, fp8_e5m2, int8, int4, nvfp4, fp8_ds_mla, got 'fp4'",
        ),
    ],
)
def test_the_command_says_what_is_wrong(arguments, message):
    done = CliRunner().invoke(main, ["serve", *arguments])
    assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize(
    ("kind", "message"), [("fp8_ds_mla", "keeps no pages in the packed"), ("nvfp4", "on a CPU alone")]
)
def test_the_command_says_which_cache_a_model_or_a_device_does_not_have(
    llama, tokenizer, tmp_path, monkeypatch, kind, message
):
    llama.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    given = ["serve", str(tmp_path), "--kv-cache-dtype", kind]
    if kind == "nvfp4":
        monkeypatch.setattr("twinattn.engine.server.check_device", lambda device: None)
        given += ["--device", "cuda"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 2 and done.output.startswith("kv_cache_dtype: ") and message in done.output


def test_answers_over_four_bits_are_the_engines(llama, tokenizer):
    sampling = SamplingParams(max_tokens=9)
    options = dict(tokenizer=tokenizer, kv_cache_dtype="int4")
    (request,) = make_engine(llama, "fastattn", **options).generate([PROMPT], sampling)
    with served(make_engine(llama, "fastattn", **options)) as server:
        answer = server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, temperature=0)
    assert answer.choices[0].text == request.text


def test_the_command_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("twinattn.engine.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    monkeypatch.delattr("twinattn.engine.server", raising=False)
    done = CliRunner().invoke(main, ["serve"])
    assert done.exit_code == 2 and "pip install -e '.[serve]'" in done.output
