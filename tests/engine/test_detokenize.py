"""The text of an output, piece by piece, by several kinds of tokenizers: joined, it is that of all tokens at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from tests.helpers.engines import make_engine
from tests.helpers.tiny_models import byte_tokenizer, make_follower
from twinattn.engine import Prompt, Request, SamplingParams
from twinattn.engine.detokenize import new_text

LETTERS = "abcé 😀你\N{REPLACEMENT CHARACTER}\n"


def sentencepiece():
    """Make a tokenizer like Llama 2's: a space before the first word, which its decoder strips, and byte tokens."""
    pieces = ["<unk>", "<s>", *[f"<0x{i:02X}>" for i in range(256)], *"▁abc", "ab", "▁a", "▁ab", "▁▁"]
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab"), ("▁", "▁")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def words():
    """Make a tokenizer of whole words, which decodes to words with spaces between them."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["a", "b", "é", "<s>"])}, "b"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def word_pieces():
    """Make a tokenizer like BERT's: what goes on with a word begins with ##."""
    vocab = {word: i for i, word in enumerate(["a", "b", "##a", "##c", "[UNK]", "<s>"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = Whitespace(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


KINDS = {"bytes": byte_tokenizer, "SentencePiece": sentencepiece, "words": words, "word pieces": word_pieces}
TOKENIZERS = {kind: make() for kind, make in KINDS.items()}


def pieces_of(tokenizer, prompt, output, continues, step=1):
    """Return what an engine shows with each token, some of them in a step; the last one ends the output."""
    request = Request(list(prompt), len(prompt), SamplingParams(), continues=continues)
    for i, token in enumerate(output, 1):
        request.pieces.append(new_text(tokenizer, request, token, "length" if i == len(output) else None))
        request.accepted.append(token)
        if i % step == 0:  # they are recorded when the step ends
            request.tokens, request.accepted = request.tokens + request.accepted, []
    return request.pieces


@pytest.mark.parametrize("kind", KINDS)
@given(st.text(LETTERS, min_size=1, max_size=12), st.text(LETTERS, min_size=1, max_size=12), st.data())
def test_pieces_make_up_the_text_of_prompt_and_output_less_that_of_the_prompt(kind, before, after, data):
    """Special tokens stand anywhere between others, and end a prompt. An output that continues none stands alone."""
    tokenizer = TOKENIZERS[kind]
    (special,) = tokenizer.all_special_ids[:1]
    prompt = tokenizer(before).input_ids + [special] * data.draw(st.integers(0, 6))
    output = tokenizer(after).input_ids or [special]
    for place in data.draw(st.lists(st.integers(0, len(output)), max_size=3)):
        output.insert(place, special)
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=True)
    step = data.draw(st.integers(1, 5))
    assert "".join(pieces_of(tokenizer, prompt, output, True, step)) == whole[len(text) :]
    alone = tokenizer.decode(output, skip_special_tokens=True)
    assert "".join(pieces_of(tokenizer, prompt, output, False)) == alone


@pytest.mark.parametrize("kind", ["bytes", "SentencePiece"])
def test_no_piece_ends_in_half_a_character(kind):
    """But for the last one, after which nothing follows."""
    tokenizer = TOKENIZERS[kind]
    emoji = tokenizer("😀").input_ids[-4:]
    pieces = pieces_of(
        tokenizer, [*emoji, *emoji], [*emoji, emoji[0], *tokenizer("a").input_ids[-1:], *emoji[:2]], True
    )
    half = "\N{REPLACEMENT CHARACTER}"
    assert pieces[:4] == ["", "", "", "😀"]
    assert pieces[4] == pieces[6] == "" and pieces[5].startswith(half) and pieces[7].startswith(half)


def test_a_long_prompt_is_not_decoded_as_a_whole():
    """Its last tokens are, from the first whole character on, which need not be the first of them."""
    tokenizer, asked = TOKENIZERS["SentencePiece"], []

    class Watched:
        def decode(self, tokens, skip_special_tokens):
            asked.append(len(tokens))
            return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    prompt = tokenizer("你" * 1000).input_ids
    assert "".join(pieces_of(Watched(), prompt, tokenizer("你好 a").input_ids[1:], True)) == "你好 a"
    assert max(asked) < 20


def follows(tokenizer, after, ends=None):
    """Make an engine over a model in which each token is followed by the one that `after` says."""
    return make_engine(make_follower(after, eos_token_id=ends), tokenizer=tokenizer)


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_text_is_continued_and_tokens_are_answered():
    """The first word after a text keeps its space; a message, whose prompt is tokens, has none before it."""
    tokenizer = words()
    engine = follows(tokenizer, [1, 2, 0, 3])  # a b é a b ..
    sampling = SamplingParams(max_tokens=2, stop_token_ids=())
    prompts = ["a", [0], Prompt("a", continues=False), Prompt([0], continues=True)]
    assert [request.text for request in engine.generate(prompts, sampling)] == [" b é", "b é", "b é", " b é"]
    with pytest.raises(ValueError, match="continues: expected True or False, got 1"):
        engine.add(Prompt("a", continues=1))


@pytest.mark.parametrize("stops", [None, (2,)], ids=["the model's end", "a word that the request names"])
def test_the_token_that_stops_a_request_is_no_text(stops):
    engine = follows(words(), [1, 2, 0, 3], ends=2 if stops is None else None)
    (request,) = engine.generate([[0]], SamplingParams(max_tokens=9, stop_token_ids=stops))
    assert (request.output_ids, request.finish_reason, request.pieces) == ([1, 2], "stop", ["b", ""])


def test_half_a_character_before_the_end_is_shown():
    tokenizer = byte_tokenizer()
    after = [*range(256), 256]
    after[ord("a")], after[0xC3] = 0xC3, 256
    (request,) = follows(tokenizer, after).generate(["a"], SamplingParams(max_tokens=9))
    assert (request.finish_reason, request.pieces) == ("stop", ["", "\N{REPLACEMENT CHARACTER}"])


def test_the_ends_of_model_and_tokenizer_both_count():
    tokenizer = words()
    tokenizer.eos_token = "é"
    for start, expected in ((0, [1, 2]), (2, [0, 1, 2])):
        (request,) = follows(tokenizer, [1, 2, 0, 3], ends=3).generate([[start]], SamplingParams(max_tokens=9))
        assert (request.output_ids, request.finish_reason) == (expected, "stop")
    (request,) = follows(tokenizer, [1, 3, 0, 2], ends=3).generate([[0]], SamplingParams(max_tokens=9))
    assert (request.output_ids, request.finish_reason) == ([1, 3], "stop")
