"""The text of an output, token by token: each piece is what its tokens add to the text before them.

A tokenizer decodes sequences, not tokens: many drop the space before the first word, and a character may take several
tokens. So a piece is the difference of two texts, those of a window with and without the new tokens:

    tokens      ▁Hello ▁world ▁a ga in ,
    window      [     |      )               "Hello" -> "Hello world"    the piece is " world"
                       [     |  )            "world" -> "world a"        " a"

The window begins with the tokens of the piece before, and at first with the last tokens of a prompt that the output
continues. It moves on when a piece has text: not in the middle of a character, and not for a special token, which has
none.

Source: the incremental detokenization of vLLM and of Hugging Face's text-generation-inference.
"""

from collections.abc import Sequence
from typing import Any

from twinattn.engine.request import Request

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of some of a character's bytes
FEWEST, MOST = 4, 20  # tokens of a prompt in the first window, unless it is the whole prompt


def new_text(tokenizer: Any, request: Request, token: int, reason: str | None) -> str:
    """Return the text that comes with the next token of a request, and move its window.

    Args:
        tokenizer: the tokenizer.
        request: the request, without the token.
        token: the token; one that stops the request is no text.
        reason: why it is the last one, so that an incomplete character is shown as U+FFFD; None if it is not.
    """
    start, end = request.decoded or _first_window(tokenizer, request)
    accepted = request.accepted[max(0, start - len(request.tokens)) :]  # the window may begin among them
    window = [*request.tokens[start:], *accepted, *[token] * (reason != "stop")]
    text = _text_after(tokenizer, window, end - start, is_last=reason is not None)
    request.decoded = (end, start + len(window)) if text else (start, end)
    return text


def _first_window(tokenizer: Any, request: Request) -> tuple[int, int]:
    """Return where the window begins and ends before the first token.

    It has the last tokens of a prompt that the output continues: as few as have a text, of whole characters.
    """
    end = request.prompt_len
    if not request.continues:
        return end, end
    for start in range(end - FEWEST, max(-1, end - MOST), -1):
        text = _decode(tokenizer, request.tokens[start:end])
        if text and not text.startswith(INCOMPLETE):
            return start, end
    return 0, end


def _text_after(tokenizer: Any, window: Sequence[int], count: int, *, is_last: bool) -> str:
    """Return the text that is added to that of the first tokens of a window; "" if a character is incomplete."""
    before, text = _decode(tokenizer, window[:count]), _decode(tokenizer, window)
    if text.endswith(INCOMPLETE) and not is_last:
        return ""
    if not text.startswith(before):  # as where tokens are bytes, and a wrong one spoils those before it
        return _decode(tokenizer, window[count:])
    return text[len(before) :]


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
