"""The text of a growing sequence: whole characters, no part of a stop string, linear cost."""

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.detokenizer import _BYTE_OF, Detokenizer, text_offsets, token_bytes
from engine.tokenizer import Tokenizer
from tests.engine.tokenizers_on_disk import KINDS, write

TEXTS = [
    "plain words, two  spaces\n\nand lines",
    "😀 emoji 👨‍👩‍👧‍👦 families 👍🏽 flags 🇩🇪🇫🇷",
    "日本語のテキスト 中文 한국어",
    "ภาษาไทย สวัสดี",
    " leading space, café, naïve é",
]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return Tokenizer.load(write(folder, KINDS[request.param]()))


def parts_of(tokenizer, ids, *, stop=(), chunk=1):
    """Everything the detokenizer hands out, and the detokenizer."""
    detokenizer = Detokenizer(tokenizer, stop=stop)
    parts = [detokenizer.add(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    parts.append(detokenizer.flush())
    assert detokenizer.text == "".join(parts)
    return parts, detokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_no_partial_holds_half_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    parts, _ = parts_of(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    if "\N{REPLACEMENT CHARACTER}" not in tokenizer.decode(ids):
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
def test_a_real_models_text_comes_in_whole_characters(smollm2_dir, text):
    tokenizer = Tokenizer.load(smollm2_dir)
    ids = tokenizer.encode(text)
    parts, _ = parts_of(tokenizer, ids)
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_characters_are_shown_as_soon_as_they_are_whole(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, KINDS["byte_level"]()))
    parts, _ = parts_of(tokenizer, tokenizer.encode("a é😀b"))
    assert "".join(parts) == "a é😀b"
    assert parts[0] == "a"
    assert [part for part in parts if part] == ["a", " ", "é", "😀", "b"]


@settings(max_examples=400, deadline=None)
@given(data=st.data(), chunk=st.integers(1, 5))
def test_any_ids_end_as_the_text_of_all_at_once(tokenizer, data, chunk):
    """Ids a sampler may draw: broken bytes, special and unknown ids among them."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    parts, _ = parts_of(tokenizer, ids, chunk=chunk)
    assert "".join(parts) == tokenizer.decode(ids)


# token strings that make byte runs, broken characters and merges likely
PIECES = ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x41>", "▁", "▁t", "he", "<s>", "日", "�"]


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), chunk=st.integers(1, 3))
@example(pieces=["▁", "▁t", "<s>", "▁t", "<s>", "▁"], chunk=1)
@example(pieces=["he", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "he"], chunk=1)
def test_byte_tokens_end_as_the_text_of_all_at_once(fallback, pieces, chunk):
    ids = [fallback._rust.token_to_id(piece) for piece in pieces]
    parts, _ = parts_of(fallback, ids, chunk=chunk)
    assert "".join(parts) == fallback.decode(ids)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_special_tokens_have_text_when_they_are_to_be_shown(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_token_spells_its_bytes_and_stands_where_its_text_begins(tokenizer):
    text = "the né in the 日本 <s>!"
    ids = tokenizer.encode(text)
    offsets = text_offsets(tokenizer, ids, skip_special_tokens=False)
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    spelled = b"".join(token_bytes(tokenizer, token_id) for token_id in ids)
    assert spelled.decode().strip() == shown.strip()
    assert offsets == sorted(offsets)
    assert len(set(offsets)) > 5
    for token_id, offset in zip(ids, offsets, strict=True):
        with contextlib.suppress(UnicodeDecodeError):  # a part of a character
            own = token_bytes(tokenizer, token_id).decode()
            assert shown[offset:].startswith(own if offset else own.lstrip())


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    return Tokenizer.load(write(tmp_path_factory.mktemp("fallback"), KINDS["byte_fallback"]()))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """Every byte is a token, so a test decides how a text is cut into tokens."""
    return Tokenizer.load(write(tmp_path_factory.mktemp("letters"), KINDS["byte_level"]()))


def byte_ids(tokenizer, text):
    """One id a byte of the text."""
    names = {byte: name for name, byte in _BYTE_OF.items()}
    return [tokenizer._rust.token_to_id(names[byte]) for byte in text.encode()]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "by"),
    [
        ("hello END more", ("END",), "hello ", "END"),
        ("hello EN", ("END",), "hello EN", None),
        ("ENENEND", ("END",), "ENEN", "END"),
        ("aab", ("ab",), "a", "ab"),
        ("aaab", ("aab",), "a", "aab"),
        ("xabcd", ("bc", "abcx"), "xa", "bc"),
        ("x日本語y", ("本語",), "x日", "本語"),
        ("x👨‍👩‍👧y", ("👩",), "x👨‍", "👩"),
        ("END", ("END",), "", "END"),
        ("one\n\ntwo", ("\n\n",), "one", "\n\n"),
        ("one\ntwo", ("\n\n",), "one\ntwo", None),
        ("a stop, b", ("stop", "sto", "top"), "a ", "sto"),
    ],
)
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_text_is_cut_before_the_earliest_stop_string(letters, text, stop, shown, by, chunk):
    parts, detokenizer = parts_of(letters, byte_ids(letters, text), stop=stop, chunk=chunk)
    assert "".join(parts) == shown
    assert (detokenizer.stopped_by in stop) if by else detokenizer.stopped_by is None
    if chunk == 1:
        assert detokenizer.stopped_by == by


@settings(max_examples=500, deadline=None)
@given(
    text=st.text(alphabet="abé👩\u200d", max_size=30),
    stop=st.lists(st.text(alphabet="abé👩\u200d", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=20),
)
def test_stop_strings_agree_with_a_search_of_the_whole_text(letters, text, stop, cuts):
    """After each step: stopped iff the known text holds a stop string, cut at the first of them."""
    ids = byte_ids(letters, text)
    detokenizer = Detokenizer(letters, stop=tuple(stop))
    at, shown = 0, ""
    for cut in cuts * (len(ids) + 1):
        if at >= len(ids) or detokenizer.stopped_by is not None:
            break
        at += cut
        shown += detokenizer.add(ids[at - cut : at])
        known = text.encode()[:at].decode(errors="ignore")
        found = [known.find(s) for s in stop if s in known]
        if found:
            assert detokenizer.stopped_by is not None
            assert shown == known[: min(found)]
        else:
            assert detokenizer.stopped_by is None
            ends = [k for s in stop for k in range(1, len(s)) if known.endswith(s[:k])]
            assert shown == known[: len(known) - max(ends, default=0)]
    if detokenizer.stopped_by is None:
        assert shown + detokenizer.flush() == text
    else:
        assert detokenizer.add(ids) + detokenizer.flush() == ""
        assert detokenizer.text == shown


def test_a_stop_string_below_min_tokens_is_text(letters):
    detokenizer = Detokenizer(letters, stop=("ab",))
    ids = byte_ids(letters, "xabyab")
    assert detokenizer.add(ids[:3], may_stop=False) == "xab"
    assert detokenizer.add(ids[3:]) == "y"
    assert detokenizer.stopped_by == "ab"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", min_size=1, max_size=10),
    stop=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True),
    num_passed=st.integers(0, 6),
)
@example(text="aab", stop=["a", "aaa"], num_passed=2)
def test_a_stop_string_whole_below_min_tokens_never_counts(letters, text, stop, num_passed):
    """Also where it was held back as the beginning of another."""
    detokenizer = Detokenizer(letters, stop=tuple(stop))
    for place, token_id in enumerate(byte_ids(letters, text)):
        detokenizer.add([token_id], may_stop=place >= num_passed)
    detokenizer.flush()
    ends = [
        (end, end - len(each))
        for end in range(num_passed + 1, len(text) + 1)
        for each in stop
        if text[:end].endswith(each)
    ]
    assert (detokenizer.stopped_by is not None) == bool(ends)
    assert detokenizer.text == (text[: min(ends)[1]] if ends else text)


def test_a_stop_string_passed_over_is_shown_at_once(letters):
    detokenizer = Detokenizer(letters, stop=("ab", "a longer one"))
    ids = byte_ids(letters, "xab!")
    assert detokenizer.add(ids[:3], may_stop=False) == "xab"
    assert detokenizer.add(ids[3:]) == "!"
    assert detokenizer.stopped_by is None


def test_special_ids_have_no_text(letters):
    ids = byte_ids(letters, "ab")
    parts, _ = parts_of(letters, [0, ids[0], 1, ids[1], 2])
    assert "".join(parts) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_cost_is_linear(tmp_path, kind, monkeypatch):
    """No id is decoded more than three times, in byte runs without end either."""
    tokenizer = Tokenizer.load(write(tmp_path, KINDS[kind]()))
    looked_at = 0

    def counted_decode(ids, **options):
        nonlocal looked_at
        looked_at += len(ids)
        return Tokenizer.decode(tokenizer, ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted_decode)
    ids = tokenizer.encode("the " * 300 + "😀" * 300 + " the 日" * 300)
    parts_of(tokenizer, ids, stop=("never", "the the 日!"))
    assert looked_at <= 3 * len(ids)
