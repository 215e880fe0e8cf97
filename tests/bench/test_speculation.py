"""The benchmark of speculation compares texts, and counts what drafts bring."""

import json

import pytest

import bench.copying
import bench.speculation
from bench.copying import copying
from bench.speculation import main
from engine.tokenizer import Tokenizer

COUNTS = {
    "steps", "tokens", "drafts", "confirmed", "acceptance", "tokens_per_step", "same_tokens",
}  # fmt: skip


@pytest.fixture
def workload(tmp_path):
    """W1 of a few short prompts."""
    file = tmp_path / "workload.json"
    requests = [{"prompt": [5 + i, *range(40, 52)], "max_tokens": 40} for i in range(4)]
    file.write_text(json.dumps({"W1": {"requests": requests}}))
    return file


@pytest.fixture
def short_copies(monkeypatch):
    """The tiny model has a token for nearly each letter: texts of a line."""
    monkeypatch.setattr(bench.copying, "TEXTS", (("The mill stands.", "mill", "barn"),))
    monkeypatch.setattr(bench.copying, "MAX_TOKENS", 24)


def run(capsys, *arguments):
    main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


@pytest.mark.usefixtures("short_copies")
def test_counts_of_each_kind_of_drafts_are_told_for_both_workloads(
    tiny_llama_dir, workload, capsys
):
    result, said = run(
        capsys, "--model", tiny_llama_dir, "--draft-model", tiny_llama_dir,
        "--workload", workload, "--threads", 1, "--json",
    )  # fmt: skip
    for name, num_requests in (("W1", 4), ("copying", 3)):
        kinds = result[name]
        assert kinds["requests"] == kinds["off"]["same_tokens"] == num_requests
        assert kinds["ngram"]["same_tokens"] == num_requests
        assert set(kinds["off"]) == set(kinds["ngram"]) == COUNTS
        assert kinds["off"]["tokens"] == kinds["ngram"]["tokens"]
        assert kinds["off"]["tokens_per_step"] == 1
        assert kinds["off"]["drafts"] == 0
        assert kinds["draft"]["same_tokens"] == num_requests
        assert kinds["draft"]["acceptance"] == 1  # by the model itself
    drafts = result["W1"]["ngram"]  # random weights repeat themselves
    assert drafts["acceptance"] == pytest.approx(drafts["confirmed"] / drafts["drafts"], abs=1e-3)
    assert drafts["tokens_per_step"] > 1.2
    drawing = drafts["tokens"] - drafts["confirmed"]
    assert drafts["tokens_per_step"] == pytest.approx(drafts["tokens"] / drawing, abs=1e-3)
    assert "tokens a step" in said


@pytest.mark.usefixtures("short_copies")
def test_texts_that_differ_are_said_and_fail_the_run(tiny_llama_dir, workload, capsys, monkeypatch):
    generated, calls = bench.speculation._generated, []

    def faulty(*arguments, **options):
        tokens, counts = generated(*arguments, **options)
        calls.append(tokens)
        if len(calls) == 4:  # copying, with drafts
            tokens[1][0] += 1
        return tokens, counts

    monkeypatch.setattr(bench.speculation, "_generated", faulty)
    with pytest.raises(SystemExit, match="1 texts are not those without drafts"):
        run(capsys, "--model", tiny_llama_dir, "--workload", workload, "--timed", "--threads", 1)
    assert "2 of 3 same" in capsys.readouterr().err


def test_each_text_to_copy_stands_in_its_prompt_with_the_word_to_change(tiny_llama_dir):
    tokenizer = Tokenizer.load(tiny_llama_dir)
    requests = copying(tokenizer)["requests"]
    assert len(requests) == len(bench.copying.TASKS) * len(bench.copying.TEXTS)
    for text, word, other in bench.copying.TEXTS:
        assert text.count(word) >= 2
        assert other not in text
    assert len({tuple(request["prompt"]) for request in requests}) == len(requests)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no model in .*: tokenmill models fetch nowhere"):
        main(["--model", str(tmp_path / "nowhere")])
