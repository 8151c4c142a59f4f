"""What clients ask for: the JSON of a request, read and checked by field.

A field that would change the answer and is not computed here is refused by name, unless its value asks for nothing.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinattn.engine import SamplingParams
from twinattn.engine.engine_thread import Answer

SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "n")
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}  # change no answer
NEUTRAL: dict[str, tuple[Any, ...]] = {  # what the server does not compute, and the values that do not ask for it
    "best_of": (1,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0, 0.0)),
    **dict.fromkeys(("echo", "logprobs"), (False,)),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
KINDS: dict[type, str] = {str: "text", list: "list"}
# The fields of a message beside its role and its content, and what each is. A chat template may read them.
FIELDS: dict[str, type] = {
    **dict.fromkeys(("name", "tool_call_id", "reasoning_content", "reasoning"), str),
    "tool_calls": list,
}
DEFAULT_TOKENS = 16  # a completion without max_tokens, as in the API; a chat goes on as long as there is room


@dataclass(frozen=True)
class Ask:
    """What a client asks for, after all checks that need no engine.

    Attributes:
        answer: the request, which is not queued yet.
        is_chat: whether the response has messages.
        streams: whether it comes in pieces.
        usage: whether a stream ends with the numbers of tokens.
    """

    answer: Answer
    is_chat: bool
    streams: bool
    usage: bool


def read_ask(body: Any, tokenizer: Any, is_chat: bool) -> Ask:
    """Read the JSON of a request.

    Args:
        body: the JSON.
        tokenizer: the model's, for messages.
        is_chat: whether it has `messages` or a `prompt`.

    Raises:
        ValueError: naming the field that is missing, is wrong or asks for what the server does not compute.
    """
    if not isinstance(body, dict):
        raise ValueError(f"body: expected a JSON object, got {short(body)}")
    fields = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    fields.pop("model", None)  # checked by then
    if "max_completion_tokens" in fields:  # its newer name
        newer = fields.pop("max_completion_tokens")
        if fields.setdefault("max_tokens", newer) != newer:
            older = short(fields["max_tokens"])
            raise ValueError(f"max_tokens: expected that of max_completion_tokens, {short(newer)}, got {older}")
    source = "messages" if is_chat else "prompt"
    if source not in fields:
        raise ValueError(f"{source}: expected some, got none")
    given = fields.pop(source)
    tokens = partial(_chat_tokens, tokenizer, _messages(given)) if is_chat else partial(_tokens, tokenizer, given)
    options = {name: fields.pop(name) for name in SAMPLING if name in fields}
    takes_all = is_chat and "max_tokens" not in options
    defaults = dict(temperature=1.0, max_tokens=DEFAULT_TOKENS, seed=uuid.uuid4().int % 2**32)
    sampling = SamplingParams(**defaults | options)
    stop = fields.pop("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: expected a text, or a list of some, none of them empty, got {short(stop)}")
    streams = fields.pop("stream", False)
    if not isinstance(streams, bool):
        raise ValueError(f"stream: expected true or false, got {short(streams)}")
    stream_options = fields.pop("stream_options", {})
    known = {"include_usage", "include_obfuscation"}
    if (
        not isinstance(stream_options, dict)
        or not {*stream_options} <= known
        or not all(value is None or isinstance(value, bool) for value in stream_options.values())
    ):
        raise ValueError(
            f'stream_options: expected an object like {{"include_usage": true}}, got {short(stream_options)}'
        )
    for name, value in fields.items():
        if not any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL.get(name, ())):
            raise ValueError(f"{name}: expected none, as this server does not compute it, got {short(value)}")
    answer = Answer(tokens, sampling, tuple(stop), takes_all, continues=not is_chat)
    return Ask(answer, is_chat, streams, bool(stream_options.get("include_usage")))


def short(value: Any) -> str:
    """Return a value as JSON, cut where it is long, for a sentence."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else text[:100] + "..."


def _tokens(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the tokens of one prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    is_ids = isinstance(prompt, list) and all(isinstance(token, int) for token in prompt)
    if not isinstance(prompt, str) and not is_ids:
        raise ValueError(f"prompt: expected one text, or the token ids of one, got {short(prompt)}")
    return list(tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages as a chat template reads them; contents that are lists of texts become lines of one."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages: expected a list of at least one, got {short(messages)}")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """Return a message without fields that say nothing.

    Raises:
        ValueError: naming the field that is wrong, or that no template reads.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages: expected each to be an object with a role, got {short(message)}")
    fields = {name: value for name, value in message.items() if value is not None and value != []}
    for name, value in fields.items():
        kind = FIELDS.get(name)
        if kind is None and name not in ("role", "content"):
            raise ValueError(f"messages: expected no field {short(name)}, which no template reads, got {short(value)}")
        if kind is not None and not isinstance(value, kind):
            raise ValueError(f"messages: expected {name} to be a {KINDS[kind]}, got {short(value)}")
    for call in fields.get("tool_calls", ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"messages: expected tool_calls to have a function with a name, got {short(call)}")
    if "content" in fields or "tool_calls" not in fields:
        fields["content"] = _text(message.get("content"), message)
    return fields


def _text(content: Any, message: dict[str, Any]) -> str:
    """Return the text of a content, which may be a list of texts: they are lines of one."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(isinstance(part, dict) and _is_text(part) for part in parts):
        raise ValueError(f"messages: expected each content to be text, got {short(message)}")
    others = [
        name for part in parts for name, value in part.items() if name not in ("type", "text") and value is not None
    ]
    if others:
        raise ValueError(f"messages: expected no field {short(others[0])} beside a text, got {short(message)}")
    return "\n".join(part["text"] for part in parts)


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def _chat_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of a chat, up to where the model answers.

    Raises:
        ValueError: if there is no chat template, or it refuses the messages.
    """
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            "messages: expected none, as the model has no chat template, got some; /v1/completions takes text"
        )
    try:
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    except TemplateError as error:
        raise ValueError(f"messages: expected what the model's chat template takes, got an error: {error}") from error
