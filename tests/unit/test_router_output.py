"""Tokens to text as they come: nothing split, nothing lost, stop strings never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvrelay.core.types import SampledToken, TokenLogprob
from kvrelay.router.detokenizer import Detokenizer
from kvrelay.router.output import Output
from kvrelay.router.stop_strings import StopStrings

CORPUS = ["the quick brown fox jumps over the lazy dog, the end", "日本語のテキスト", "smile 🙂🙃 olé ¡señor!"]


def a_tokenizer() -> Tokenizer:
    """Byte-level BPE: every byte is a token, frequent strings are tokens, one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


TOKENIZER = a_tokenizer()


def id_of(token: str) -> int:
    found = TOKENIZER.token_to_id(token)
    assert found is not None, token
    return found


EOS = id_of("<eos>")
any_ids = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=80)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text).ids)


def by_bytes(text: str) -> list[int]:
    """Return ids of one byte each, so that characters are split over tokens."""
    table = dict(zip(_printable_of_bytes(), range(256), strict=True))
    back = {number: letter for letter, number in table.items()}
    return [id_of(back[byte]) for byte in text.encode()]


def _printable_of_bytes() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte value."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    return [letters[byte] for byte in range(256)]


# -- detokenizer


@given(any_ids)
@settings(max_examples=300, deadline=None)
def test_pieces_together_equal_decoding_all_at_once(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)

    text = "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    assert text == TOKENIZER.decode(ids)


@given(st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_piece_splits_a_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)

    pieces = list(map(detokenizer.push, by_bytes(text)))

    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    assert [detokenizer.push(one) for one in by_bytes("🙂")] == ["", "", "", "🙂"]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    assert [detokenizer.push(one) for one in by_bytes("é")[:1]] == [""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_a_long_run_without_a_complete_character_does_not_make_each_token_slower() -> None:
    lone = id_of(_printable_of_bytes()[0x80])  # a continuation byte
    detokenizer = Detokenizer(TOKENIZER)

    text = "".join(detokenizer.push(lone) for _ in range(500))

    assert len(detokenizer._window) < 50
    assert text + detokenizer.flush() == "\ufffd" * 500


# -- stop strings


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    filtered, out, rest = StopStrings(stops), "", text
    while rest and not filtered.hit:
        cut = data.draw(st.integers(1, len(rest)))
        out += filtered.push(rest[:cut])
        rest = rest[cut:]

    assert filtered.hit == any(stop in text for stop in stops)
    assert all(stop not in out for stop in stops)
    if filtered.hit:
        assert text.startswith(out)
        assert any(text[len(out) :].startswith(stop) for stop in stops)
    else:
        assert out + filtered.flush() == text


def test_text_that_may_become_a_stop_string_waits() -> None:
    stops = StopStrings(["</end>"])

    assert [stops.push(one) for one in ("a<", "/en", "x", "<", "/end>b")] == ["a", "", "</enx", "", ""]
    assert stops.hit


# -- output


def tokens(ids: list[int]) -> list[SampledToken]:
    return [SampledToken(one, TokenLogprob(one, -1.0)) for one in ids]


@given(any_ids, st.integers(1, 5), st.lists(st.sampled_from(["e", "th", "🙂", "ox "]), max_size=2))
@settings(max_examples=200, deadline=None)
def test_every_token_leaves_once_and_in_order(ids: list[int], step: int, stops: list[str]) -> None:
    output = Output(TOKENIZER, stop_strings=stops)
    sent: list[int] = []
    text = ""
    for at in range(0, len(ids), step):
        piece = output.take(tokens(ids[at : at + step]))
        sent += [one.token_id for one in piece.tokens]
        text += piece.text
        assert not piece.text or piece.tokens, "text leaves with tokens"
    piece = output.finish()
    sent += [one.token_id for one in piece.tokens]
    text += piece.text

    assert sent == output.token_ids == ids[: len(sent)]
    assert all(stop not in text for stop in stops)
    whole = TOKENIZER.decode(ids)
    if not output.stopped:
        assert (sent, text) == (ids, whole)
    else:
        assert whole.startswith(text)


def test_tokens_wait_for_the_character_that_they_are_part_of() -> None:
    output = Output(TOKENIZER)
    ids = by_bytes("a🙂b")

    pieces = [output.take(tokens([one])) for one in ids]

    assert [(len(piece.tokens), piece.text) for piece in pieces] == [
        (1, "a"), (0, ""), (0, ""), (0, ""), (4, "🙂"), (1, "b"),
    ]  # fmt: skip


def test_a_stop_string_over_several_tokens_is_not_shown_and_loses_no_token() -> None:
    output = Output(TOKENIZER, stop_strings=["lazy"])
    ids = ids_of("the ") + by_bytes("lazy dog")

    piece = output.take(tokens(ids))

    assert output.stopped
    assert piece.text == "the "
    assert [one.token_id for one in piece.tokens] == output.token_ids == ids[: len(ids_of("the ")) + 4]
    assert output.take(tokens([5])).tokens == ()


def test_a_stop_token_has_no_text() -> None:
    letter = by_bytes("x")[0]
    output = Output(TOKENIZER, stop_token_ids=[letter, EOS])

    first = output.take(tokens(by_bytes("a")))
    last = output.take(tokens([letter]))

    assert (first.text, last.text, output.finish().text) == ("a", "", "")
    assert [one.token_id for one in last.tokens] == [letter]


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_without_a_tokenizer_tokens_leave_at_once_and_without_text(ids: list[int]) -> None:
    piece = Output(None).take(tokens(ids))

    assert ([one.token_id for one in piece.tokens], piece.text) == (ids, "")
