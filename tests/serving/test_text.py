"""Text of a request as it grows: whole characters, and nothing from a stop on."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.runtime.serving.engine import Text, beginning
from tests.serving.tiny import tokenizer

WORDS = tokenizer()


def grown(tokens: list[int], stops: list[str], sizes: list[int]) -> tuple[list[str], Text]:
    text, parts, at = Text(WORDS, stops), [], 0
    for size in [*sizes, len(tokens)]:
        last = at + size >= len(tokens)
        parts.append(text.add(tokens[at : at + size], last=last))
        at += size
        if last or text.stopped:
            break
    return parts, text


@settings(deadline=None, max_examples=200)
@given(
    st.text(alphabet="thequickbrown é☃😀", max_size=30),
    st.lists(st.text(alphabet="theq é☃", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 5), max_size=30),
)
def test_it_is_the_text_up_to_the_first_stop(text: str, stops: list[str], sizes: list[int]) -> None:
    tokens = WORDS(text)["input_ids"]
    parts, made = grown(tokens, stops, sizes)
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    assert "".join(parts) == text[: min(ends, default=len(text))]
    assert made.stopped == bool(ends)


def test_half_a_character_waits_for_its_other_half() -> None:
    tokens = WORDS("a☃")["input_ids"]
    text = Text(WORDS, [])
    assert [text.add([token], last=False) for token in tokens] == ["a", "", "", "☃"]


def test_special_tokens_have_no_text() -> None:
    assert Text(WORDS, []).add([0, *WORDS("fox")["input_ids"], 1], last=True) == "fox"


def test_a_longer_stop_that_begins_earlier_is_waited_for() -> None:
    text = Text(WORDS, ["e", " e "])
    assert text.add(WORDS(" e")["input_ids"], last=False) == "" and not text.stopped
    assert text.add(WORDS(" ")["input_ids"], last=False) == "" and text.stopped


def test_what_may_become_a_stop_is_held_back() -> None:
    assert beginning("say sto", "stop") == 3
    assert beginning("say stop", "stop") == 0
    text = Text(WORDS, ["stop"])
    assert text.add(WORDS("sto")["input_ids"], last=False) == ""
    assert text.add(WORDS("ry")["input_ids"], last=False) == "story"
