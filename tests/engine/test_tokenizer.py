"""Text to tokens and back: the same text however the tokens come."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from fixtures.byte_tokenizers import EOS, write_byte_fallback, write_byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.tokenizer import Detokenizer, Tokenizer
from eyas.types import EyasError


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    cuts: Sequence[int],
    *,
    after: Sequence[int] = (),
) -> list[str]:
    """The pieces of a token list that comes in parts cut before the given positions."""
    detokenizer = Detokenizer(tokenizer, after=after)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    pairs = list(zip(bounds, bounds[1:], strict=False))
    return [
        detokenizer.add(token_ids[start:end], is_last=(start, end) == pairs[-1])
        for start, end in pairs
    ]


TEXTS = st.text(alphabet="the  a\n😀👩‍🚀漢字ไทยé\ufffd", max_size=24)
CUTS = st.lists(st.integers(1, 80), max_size=40)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_pieces_make_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    assert "".join(stream(tokenizer, tokenizer.encode(text), cuts)) == text


@settings(max_examples=200, deadline=None)
@given(
    text=TEXTS.filter(lambda text: text and "\ufffd" not in text),
    place=st.integers(1, 80),
    cuts=CUTS,
)
def test_an_answer_goes_on_with_its_prompt(
    tokenizer: Tokenizer, text: str, place: int, cuts: list[int]
) -> None:
    """Wherever the text is cut into prompt and answer, its first space included."""
    tokens = tokenizer.encode(text)
    prompt, answer = tokens[:place], tokens[place:]
    start = tokenizer.decode(prompt)
    whole = start + "".join(stream(tokenizer, answer, cuts, after=prompt))
    if text.startswith(start):
        # A lone space, which a decoder strips, leaves nothing to go on with.
        assert whole == text or not tokenizer.decode(prompt[-1:])
    else:  # the prompt ends in half a character: neither half is one
        assert answer and "\ufffd" in whole


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xFF, -1, -2, -3]), max_size=12),
    picks=st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xFF, -1, -2, -3]), max_size=20),
    cuts=CUTS,
)
def test_after_garbage_too_the_text_is_the_same_at_every_cut(
    tokenizer: Tokenizer, prompt: list[int], picks: list[int], cuts: list[int]
) -> None:
    words = tokenizer.encode(f"a the{EOS}")
    before, tokens = (
        [words[p] if p < 0 else byte_token(tokenizer, p) for p in part] for part in (prompt, picks)
    )
    whole = "".join(stream(tokenizer, tokens, [], after=before))
    assert "".join(stream(tokenizer, tokens, cuts, after=before)) == whole


@settings(max_examples=300, deadline=None)
@given(
    # Bytes that start, continue and spoil characters, words, and the special token.
    picks=st.lists(st.sampled_from([0xF0, 0x9F, 0x98, 0x80, 0xE6, 0xFF, -1, -2, -3]), max_size=50),
    cuts=CUTS,
)
def test_garbage_makes_the_same_text_at_every_cut(
    tokenizer: Tokenizer, picks: list[int], cuts: list[int]
) -> None:
    [end] = tokenizer.encode(EOS)[-1:]
    words = {-1: tokenizer.encode("a the")[-1], -2: tokenizer.encode("h")[-1], -3: end}
    token_ids = [words[p] if p < 0 else byte_token(tokenizer, p) for p in picks]
    one_by_one = stream(tokenizer, token_ids, range(len(token_ids)))
    assert "".join(stream(tokenizer, token_ids, cuts)) == "".join(one_by_one)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """The token of one byte, found by its place in the vocabularies of the fixtures."""
    inner = tokenizer._tokenizer
    name = f"<0x{byte:02X}>"
    found = inner.convert_tokens_to_ids(name)
    if found is not None:
        return int(found)
    return next(t for t in range(256) if inner._tokenizer.id_to_token(t) == latin(byte))


def latin(byte: int) -> str:
    """GPT-2's stand-in of a byte from 0x80 on (0x80 to 0xA0 and 0xAD are moved behind the rest)."""
    moved = [*range(0, 33), *range(127, 161), 173]
    return chr(256 + moved.index(byte)) if byte in moved else chr(byte)


@pytest.mark.parametrize("size", range(1, 6))
def test_no_piece_holds_half_a_character(byte_level: Tokenizer, size: int) -> None:
    text = "😀漢字 the 👩‍🚀"
    token_ids = byte_level.encode(text)
    pieces = stream(byte_level, token_ids, range(0, len(token_ids), size))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


def test_a_character_that_was_cut_off_is_one_replacement(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a😀😀")[:-1]
    pieces = stream(tokenizer, token_ids, range(len(token_ids)))
    # The byte-fallback decoder marks each of the three bytes.
    assert "".join(pieces).rstrip("\ufffd") == "a😀"
    assert "".join(pieces).count("\ufffd") in (1, 3)


def test_text_goes_out_with_the_token_that_ends_it(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    emoji = byte_level.encode("😀")
    assert len(emoji) == 3  # two bytes in one token
    assert [detokenizer.add([token]) for token in emoji] == ["", "", "😀"]
    assert detokenizer.add(byte_level.encode(" the")) == " the"


def test_a_long_run_of_wrong_bytes_does_not_pile_up(byte_level: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_level)
    wrong = byte_token(byte_level, 0x80)
    pieces = [detokenizer.add([wrong]) for _ in range(200)]
    assert "".join(pieces).count("\ufffd") > 180
    assert len(detokenizer._window) < 40
    assert (
        "".join(detokenizer.add([t]) for t in byte_level.encode("😀!")).replace("\ufffd", "")
        == "😀!"
    )


def test_a_space_after_a_special_token_stays(byte_fallback: Tokenizer) -> None:
    # Its decoder strips the first space of what it is given, so context must be real text.
    [end] = byte_fallback.encode(EOS)[-1:]
    the = byte_fallback.encode("a the")[-1]
    token_ids = [*byte_fallback.encode("a"), end, the, end, end, the]
    assert "".join(stream(byte_fallback, token_ids, range(6))) == "a the the"


def test_messages_are_rendered_for_an_answer(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the"}]
    token_ids = byte_level.render_chat(messages, {"mood": "!"})
    assert byte_level.decode(token_ids) == "user: the\nassistant!: "
    assert byte_level.render_chat(messages) == byte_level.encode("user: the\nassistant: ")


@pytest.mark.parametrize(
    "name", ["messages", "conversation", "chat_template", "tokenize", "tools", "return_tensors"]
)
def test_settings_cannot_reach_past_the_template(byte_level: Tokenizer, name: str) -> None:
    with pytest.raises(EyasError, match=f"may not set '{name}'"):
        byte_level.render_chat([{"role": "user", "content": "a"}], {name: "x"})


def test_what_the_template_refuses_is_a_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(EyasError, match="chat template refused the messages: no such talk"):
        byte_level.render_chat([{"role": "user", "content": "refuse me"}])


def test_what_breaks_the_template_is_a_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(EyasError, match="chat template refused"):
        byte_level.render_chat([{"role": "user", "content": "a"}], {"mood": 5})


def test_a_folder_without_tokenizer_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no tokenizer"):
        Tokenizer(tmp_path)


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(EyasError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])


def test_half_a_character_is_a_mistake(byte_level: Tokenizer) -> None:
    with pytest.raises(EyasError, match="half a character"):
        byte_level.encode("a\ud83d")
