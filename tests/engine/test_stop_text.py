"""Stop strings: text, tokens, log-probabilities and reason, wherever in a block they end.

The target says what the script says and the draft is perfect, so that blocks of nine tokens are
whole and every border is hit exactly.
"""

import dataclasses
import functools
import itertools
import string

import pytest
from fixtures.sampling_world import Answer, ask, same_logprobs
from fixtures.scripted_target import Pieces, scripted_engine
from fixtures.tiny_pair import VOCAB_SIZE, write_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas import LLM
from eyas.config import PLAIN, TreeShape
from eyas.engine.stop_text import AnswerText, StopTextMatcher
from eyas.types import FinishReason, SamplingParams

K = 8
BLOCK = K + 1
CHAIN, TREE = TreeShape(K, 1, K + 1), TreeShape(K, 2, 24)
EMOJI = "😀".encode()
PIECES = Pieces(
    ["", *string.ascii_lowercase, " ", "STOP", "ST", "OP", "S", "T", "O", "P", "xSTOPy", "!!"]
    + [EMOJI[i : i + 1] for i in range(4)]
)
END = 0  # the model's own end token, without a text
PROMPT = PIECES.encode("p", "q", "r")
LETTERS = PIECES.encode(*string.ascii_lowercase)  # an answer of 26 different tokens
GREEDY = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
# One token, two tokens and four, and one that is not all stop string.
SPELLINGS = [("STOP",), ("ST", "OP"), ("S", "T", "O", "P"), ("xSTOPy",), ("a", "ST", "OP")]
RUN_AHEAD = pytest.mark.parametrize("run_ahead", [0, 1])
SHAPE = pytest.mark.parametrize("tree", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])


def answer_text(answer: Answer, params: SamplingParams, *, stop_ids: tuple[int, ...] = ()) -> str:
    """As a client puts it together."""
    return AnswerText(PIECES, params.stop, stop_ids=stop_ids).add(answer.tokens, answer.finish)


@functools.cache
def said(
    answer: tuple[int, ...],
    tree: TreeShape,
    run_ahead: int = 0,
    stop: tuple[str, ...] = ("STOP",),
    min_tokens: int = 0,
    max_tokens: int = 24,
    ignore_eos: bool = False,
) -> Answer:
    """What comes of a script under these options; END is the model's end token."""
    engine = scripted_engine(PROMPT, answer, PIECES, tree, eos=[END], run_ahead=run_ahead)
    params = dataclasses.replace(
        GREEDY, stop=stop, min_tokens=min_tokens, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    (result,) = ask(engine, [PROMPT], [params])
    return result


def check_block(result: Answer, tree: TreeShape) -> None:
    """Rounds are whole but the last; logprobs are as many as tokens."""
    assert [t.token_id for t in result.logprobs] == result.tokens
    block = tree.depth + 1
    whole, rest = divmod(len(result.tokens) - 1, block)
    assert result.rounds == [block] * whole + [rest] * (rest > 0)


@RUN_AHEAD
@SHAPE
@pytest.mark.parametrize("spelling", SPELLINGS, ids="|".join)
def test_a_stop_string_at_every_offset(
    spelling: tuple[str, ...], tree: TreeShape, run_ahead: int
) -> None:
    """From the prefill's own token over two blocks (sglang PR#23802: only a tail was looked at)."""
    for offset in range(2 * BLOCK + 1 - len(spelling)):
        script = [*LETTERS[:offset], *PIECES.encode(*spelling), *LETTERS[offset:]]
        result = said(tuple(script), tree, run_ahead)
        assert result.tokens == script[: offset + len(spelling)]
        assert result.finish is FinishReason.STOP
        check_block(result, tree)
        before = "".join(spelling).partition("STOP")[0]
        params = dataclasses.replace(GREEDY, stop=("STOP",))
        assert answer_text(result, params) == string.ascii_lowercase[:offset] + before
        plain = said(tuple(script), PLAIN)
        assert (plain.tokens, plain.finish) == (result.tokens, result.finish)
        same_logprobs(result.logprobs, plain.logprobs)


@RUN_AHEAD
@SHAPE
def test_stop_string_and_max_tokens_in_one_block(tree: TreeShape, run_ahead: int) -> None:
    """Whichever comes first; the limit on the very token that completes the string is a stop."""
    for offset, limit in itertools.product(range(BLOCK), range(1, BLOCK + 2)):
        script = [*LETTERS[:offset], *PIECES.encode("ST", "OP"), *LETTERS]
        result = said(tuple(script), tree, run_ahead, max_tokens=limit)
        stops = offset + 2 <= limit
        assert result.tokens == script[: min(offset + 2, limit)]
        assert result.finish is (FinishReason.STOP if stops else FinishReason.LENGTH)
        check_block(result, tree)
        # A string that is not complete is text.
        text = PIECES.decode(result.tokens)
        want = text.removesuffix("STOP") if stops else text
        assert answer_text(result, dataclasses.replace(GREEDY, stop=("STOP",))) == want


@RUN_AHEAD
@SHAPE
@pytest.mark.parametrize("gap", [0, 1, 3])
@pytest.mark.parametrize("first", ["string", "end"])
def test_stop_string_and_end_token_in_one_block(
    first: str, gap: int, tree: TreeShape, run_ahead: int
) -> None:
    """sglang PR#28802: the string stayed in the text when the end token came in the same step."""
    for offset in range(BLOCK - gap):
        pair = [PIECES.encode("STOP"), [END]]
        one, other = pair if first == "string" else pair[::-1]
        script = [*LETTERS[:offset], *one, *LETTERS[offset : offset + gap], *other, *LETTERS]
        result = said(tuple(script), tree, run_ahead)
        assert result.tokens == script[: offset + 1]
        assert result.finish is FinishReason.STOP
        check_block(result, tree)
        params = dataclasses.replace(GREEDY, stop=("STOP",))
        text = answer_text(result, params, stop_ids=(END,))
        assert text == string.ascii_lowercase[:offset]
        if first == "end":  # and without it the string would have been found
            result = said(tuple(script), tree, run_ahead, ignore_eos=True)
            assert result.tokens == script[: offset + gap + 2]


@RUN_AHEAD
@SHAPE
def test_min_tokens_holds_for_stop_strings(tree: TreeShape, run_ahead: int) -> None:
    """What is complete within min_tokens does not stop; what ends later does, wherever it began."""
    script = (*LETTERS[:3], *PIECES.encode("ST", "OP"), *LETTERS[3:8], *PIECES.encode("ST", "OP"))
    ends = {True: 5, False: 12}  # the first string's end, and the second's
    for min_tokens in range(12):
        result = said((*script, *LETTERS), tree, run_ahead, min_tokens=min_tokens)
        assert len(result.tokens) == ends[min_tokens < 5]
        assert result.finish is FinishReason.STOP
        check_block(result, tree)
        want = "abc" if min_tokens < 5 else "abcSTOPdefgh"
        assert answer_text(result, dataclasses.replace(GREEDY, stop=("STOP",))) == want


@RUN_AHEAD
def test_a_short_string_before_min_tokens_is_not_found_again_later(run_ahead: int) -> None:
    """It is still within the tail that is kept for a longer one."""
    script = (*PIECES.encode("!!"), *LETTERS[:6])
    result = said(
        (*script, *LETTERS), CHAIN, run_ahead, stop=("!!", "a very long one"), min_tokens=2
    )
    assert len(result.tokens) == 24 and result.finish is FinishReason.LENGTH


def test_characters_of_several_tokens() -> None:
    """The emoji's last byte completes it; three of its bytes complete nothing."""
    emoji = PIECES.encode(*(EMOJI[i : i + 1] for i in range(4)))
    for offset in range(BLOCK):
        script = [*LETTERS[:offset], *emoji, *LETTERS[offset:]]
        result = said(tuple(script), CHAIN, 1, stop=("😀",))
        assert result.tokens == script[: offset + 4]
        text = answer_text(result, dataclasses.replace(GREEDY, stop=("😀",)))
        assert text == string.ascii_lowercase[:offset]
        cut = said(tuple(script), CHAIN, 1, stop=("😀",), max_tokens=offset + 3)
        assert cut.finish is FinishReason.LENGTH
        assert answer_text(cut, GREEDY) == string.ascii_lowercase[:offset] + "\ufffd"


def test_the_earliest_of_several_strings_counts() -> None:
    script = (*LETTERS[:2], *PIECES.encode("xSTOPy"), *LETTERS[2:])
    for stop, text in (
        (("OP", "ST"), "abx"),
        (("y", "TOP"), "abxS"),
        (("nowhere", "c"), "abxSTOPy"),
    ):
        result = said(script, CHAIN, 1, stop=stop)
        assert answer_text(result, dataclasses.replace(GREEDY, stop=stop)) == text


@RUN_AHEAD
def test_neighbours_go_on(run_ahead: int) -> None:
    """A string that is found late ends its own request alone; its rounds in flight tell nothing."""
    script = [*LETTERS[:7], *PIECES.encode("ST", "OP"), *LETTERS[7:]]
    engine = scripted_engine(PROMPT, script, PIECES, CHAIN, run_ahead=run_ahead)
    params = [GREEDY, dataclasses.replace(GREEDY, stop=("STOP",)), GREEDY]
    results = ask(engine, [PROMPT] * 3, params)
    assert results[0].tokens == results[2].tokens == script[:24]
    assert results[1].tokens == script[:9]


def test_a_stop_string_survives_preemption() -> None:
    """Half of it before, half after."""
    for cut in range(1, 8):
        script = [*LETTERS[:3], *PIECES.encode("S", "T", "O", "P"), *LETTERS[3:]]
        engine = scripted_engine(PROMPT, script, PIECES)
        engine.add("a", PROMPT, dataclasses.replace(GREEDY, stop=("STOP",)))
        tokens: list[int] = []
        while engine.has_work:
            if len(tokens) == cut:
                slot = engine.scheduler.admitted[-1].slot
                assert slot is not None
                engine.scheduler.preempt()
                engine.worker.release(slot)
            for output in engine.step():
                tokens += output.new_token_ids
        assert tokens == script[:7]


FEW = Pieces(["", "a", "b", "ab", "ba", "aab", EMOJI[:2], EMOJI[2:]])
STOPS = st.lists(st.text("ab", min_size=1, max_size=4) | st.just("😀b"), min_size=1, max_size=3)
TOKENS = st.lists(st.integers(0, FEW.vocab_size - 1), max_size=14)
CUTS = st.lists(st.integers(1, 13), max_size=6, unique=True).map(sorted)


def first_stop(tokens: list[int], stop: list[str], min_tokens: int) -> tuple[int, int] | None:
    """(tokens kept, characters of text), by decoding every beginning of the tokens."""

    def settled(count: int) -> str:
        text = FEW.decode(tokens[:count])
        return text.rstrip("\ufffd") if text.endswith("\ufffd") else text

    for count in range(min_tokens + 1, len(tokens) + 1):
        text, before = settled(count), len(settled(count - 1))
        ends = [
            place
            for s in stop
            for place in range(len(text))
            if text.startswith(s, place) and place + len(s) > before
        ]
        if ends:
            return count, min(ends)
    return None


@settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(tokens=TOKENS, stop=STOPS, cuts=CUTS, min_tokens=st.integers(0, 6))
def test_matcher_and_text_against_decoding_every_beginning(
    tokens: list[int], stop: list[str], cuts: list[int], min_tokens: int
) -> None:
    """However the tokens come; a stream shows nothing that the whole does not, and never a stop."""
    # A half character that its other half does not follow is text of its own kind: not here.
    tokens = [t for i, t in enumerate(tokens) if t != 7 or (i and tokens[i - 1] == 6)]
    tokens = [t for i, t in enumerate(tokens) if t != 6 or tokens[i + 1 : i + 2] == [7]]
    tokens = [t for i, t in enumerate(tokens) if t != 7 or (i and tokens[i - 1] == 6)]
    expected = first_stop(tokens, stop, min_tokens)
    matcher = StopTextMatcher(FEW, stop, min_tokens=min_tokens)
    stream = AnswerText(FEW, stop, stop_ids=())
    bounds = [0, *[c for c in cuts if c < len(tokens)], len(tokens)]
    shown, num_tokens, finish = "", 0, None
    for start, end in itertools.pairwise(bounds):
        kept = matcher.num_kept(tokens[start:end])
        block = tokens[start : end if kept is None else start + kept]
        num_tokens += len(block)
        if kept is not None:
            finish = FinishReason.STOP
        elif end == len(tokens):
            finish = FinishReason.LENGTH
        shown += stream.add(block, finish)
        if kept is not None:
            break
    if expected is None:
        assert finish is not FinishReason.STOP and shown == FEW.decode(tokens)
    else:
        assert finish is FinishReason.STOP
        assert num_tokens == expected[0]
        assert shown == FEW.decode(tokens)[: expected[1]]
    whole = AnswerText(FEW, stop, stop_ids=()).add(tokens[:num_tokens], finish)
    assert whole == shown


def test_a_stop_token_with_a_text_is_not_shown() -> None:
    """Unless the stop string that it completes began before it: then neither is that."""

    def text(pieces: tuple[str, ...], stop: tuple[str, ...] = ()) -> str:
        tokens = PIECES.encode(*pieces)
        return AnswerText(PIECES, stop, stop_ids=tokens[-1:]).add(tokens, FinishReason.STOP)

    assert text(("a", "b", "STOP")) == "ab"
    assert text(("a", "ST", "OP"), stop=("STOP",)) == "a"
    assert text(("a", "ST", "b"), stop=("STOP",)) == "aST"


# Tokens 0 to 93 are the printable ASCII characters.
PRINTABLE = SamplingParams(
    temperature=1, seed=5, max_tokens=40, logit_bias=dict.fromkeys(range(94, VOCAB_SIZE), -100)
)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    target, draft = write_pair(tmp_path_factory.mktemp("pair"))
    return LLM(str(target), draft=str(draft), max_model_len=128, page_size=4)


def test_of_an_llm(llm: LLM) -> None:
    """Answers of a random model: whatever three characters come first stop it there, in one piece
    and in a stream alike; min_tokens puts it off."""
    params = dataclasses.replace(PRINTABLE, logprobs=0)
    (whole,) = llm.generate("the cat", params)
    stop = whole.text[9:12]
    place = whole.text.index(stop)
    stopping = dataclasses.replace(params, stop=(stop, "~ never ~"))
    (result,) = llm.generate("the cat", stopping)
    assert result.text == whole.text[:place]
    assert result.finish_reason is FinishReason.STOP
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(result.logprobs) == len(result.token_ids) < len(whole.token_ids)
    assert llm.tokenizer.decode(result.token_ids).endswith(stop)
    assert "".join(piece for piece, _ in llm.stream("the cat", stopping)) == result.text
    later = dataclasses.replace(stopping, min_tokens=len(result.token_ids))
    (result,) = llm.generate("the cat", later)
    assert result.text.startswith(whole.text[: place + 3])
    assert "".join(piece for piece, _ in llm.stream("the cat", later)) == result.text


def test_a_stop_token_of_an_llm(llm: LLM) -> None:
    (whole,) = llm.generate("the cat", PRINTABLE)
    stopping = dataclasses.replace(PRINTABLE, stop_token_ids=(whole.token_ids[6],))
    (result,) = llm.generate("the cat", stopping)
    first = whole.token_ids.index(whole.token_ids[6])
    assert result.token_ids == whole.token_ids[: first + 1]
    assert result.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert "".join(piece for piece, _ in llm.stream("the cat", stopping)) == result.text
