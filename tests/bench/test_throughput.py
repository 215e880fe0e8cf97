"""The benchmark prints what it measured in the form that all measured engines share."""

import json
import os

import pytest

import bench.measure
from bench.measure import REFERENCE, Measured, Pieces, agreement, descendants, measure, salted
from bench.throughput import _compared, main

PEER_KEYS = {"wall_s", "walls", "out_tps", "total_tps", "peak_rss_mb"}


@pytest.fixture
def workload(tmp_path, monkeypatch):
    """Workloads for a vocabulary of a few hundred tokens."""
    monkeypatch.setattr(bench.measure, "FIRST_SALT", 200)
    prompts = [[3 + i, *range(10, 30)] for i in range(6)]
    file = tmp_path / "workload.json"
    requests = [{"prompt": prompt, "max_tokens": 5 + i} for i, prompt in enumerate(prompts)]
    works = {
        "W1": {"requests": requests},
        "W2": {"requests": requests[:1]},
        "W5": {"requests": requests[:1], "n": 4, "temperature": 1.0},
    }
    file.write_text(json.dumps(works))
    return file


def run(capsys, *arguments):
    main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_the_engines_figures_have_the_peers_form(tiny_llama_dir, workload, capsys):
    result, said = run(
        capsys, "--workload", workload, "--model", tiny_llama_dir, "--only", "W1,W2,W5",
        "--repeat", 2, "--json",
    )  # fmt: skip
    assert result["peer"] == "tokenmill"
    assert {"version", "precision"} <= set(result)
    assert set(result["W1"]) == set(result["W5"]) == PEER_KEYS
    assert set(result["W2"]) == PEER_KEYS | {"ttft_ms", "decode_tps"}
    assert len(result["W1"]["walls"]) == 2
    for name, num_prompt, num_output in (("W1", 126, 45), ("W5", 21, 20)):
        figures = result[name]
        for name_of, num_tokens in (
            ("out_tps", num_output),
            ("total_tps", num_prompt + num_output),
        ):
            wall_s = num_tokens / figures[name_of]
            # of figures rounded to 1 ms and 0.1 tokens/s
            assert figures["wall_s"] == pytest.approx(wall_s, rel=0.002, abs=0.0006)
        assert figures["peak_rss_mb"] > 50
    for word in ("output tokens/s", "steps", "mean batch", "KV use"):
        assert word in said


def test_an_unknown_workload_is_named(tiny_llama_dir, workload):
    with pytest.raises(SystemExit, match="no workload 'W9'; it has W1, W2, W5"):
        main(["--workload", str(workload), "--model", str(tiny_llama_dir), "--only", "W9"])


def test_a_missing_model_is_named(tmp_path, workload):
    with pytest.raises(SystemExit, match=r"no model in .*: tokenmill models fetch nowhere"):
        main(["--workload", str(workload), "--model", str(tmp_path / "nowhere")])


def test_rounds_share_no_prefix_and_keep_what_a_round_shares():
    requests = [{"prompt": [1, 2, 3], "max_tokens": 1}, {"prompt": [1, 2, 4], "max_tokens": 1}]
    rounds = [salted(requests, i) for i in range(3)]
    assert rounds[0] == requests
    firsts = [{r["prompt"][0] for r in requests} for requests in rounds]
    assert all(len(first) == 1 for first in firsts)
    assert len(set.union(*firsts)) == 3
    assert [r["prompt"][1:] for r in rounds[2]] == [[2, 3], [2, 4]]


def test_agreement_stops_at_the_first_difference():
    reference = json.loads(REFERENCE.read_text())
    requests = [{"prompt": prompt} for prompt in reference["prompts"]]
    outputs = [list(ids) for ids in reference["outputs"]]
    assert agreement(requests, outputs) == 1.0
    outputs[0][0] += 1
    assert agreement(requests, outputs) == 0.938
    assert agreement(requests[1:], outputs) is None


def test_systems_take_turns_and_wrong_lengths_are_counted():
    turns = []

    def system(name, num_tokens):
        def run(requests, n, temperature):
            turns.append(name)
            pieces = [[5] * num_tokens] * (len(requests) * n)
            return Pieces(
                wall_s=0.5, token_ids=pieces, num_tokens=[num_tokens] * len(pieces), texts=[]
            )

        return run

    work = {"requests": [{"prompt": [1, 2], "max_tokens": 4}] * 3, "n": 2}
    systems = {"right": system("right", 4), "short": system("short", 3)}
    measured = measure("W4", work, systems, lambda name: [], 3)
    assert turns == ["right", "short"] * 3
    assert measured["right"].output_tps == 48
    assert "wrong_lengths" not in measured["right"].as_peer()
    assert measured["short"].as_peer()["wrong_lengths"] == 18


@pytest.mark.parametrize(
    ("engine_s", "service_s", "said"),
    [
        ([10.0], [6.6], "51.5% above the engine's; one round each does not tell what it costs"),
        ([10.0], [20.0], "50.0% below the engine's; one round each does not tell"),
        ([10, 11, 12], [10.5, 11.5, 12.5], "4.3% below the engine's, within the spread"),
        ([10, 12, 14], [9, 11, 13], "9.1% above the engine's, within the spread of 3"),
        ([10, 10.1, 10.2], [12, 12.1, 12.2], "it costs 16.5% of the engine's throughput"),
        ([10, 10.1, 10.2], [8, 8.1, 8.2], "24.7% above the engine's, as it cannot be"),
    ],
)
def test_a_difference_is_called_a_cost_only_where_it_is_beyond_the_spread(
    engine_s, service_s, said
):
    measured = {
        name: Measured(num_prompt_tokens=1, num_output_tokens=100, walls_s=walls)
        for name, walls in (("engine", engine_s), ("service", service_s))
    }
    assert _compared(measured).startswith(said)


@pytest.mark.slow
def test_the_services_cost_is_measured_against_the_engine(tiny_llama_dir, workload, capsys):
    before = set(descendants(os.getpid()))  # servers that tests share
    result, said = run(
        capsys, "--workload", workload, "--model", tiny_llama_dir, "--only", "W1,W2,W5",
        "--repeat", 2, "--through", "service", "--json",
    )  # fmt: skip
    assert set(result["W1"]) == set(result["engine"]["W5"]) == PEER_KEYS
    assert set(result["W2"]) == PEER_KEYS | {"ttft_ms", "decode_tps"}
    for name, cost in result["service_cost"].items():
        service, engine = result[name], result["engine"][name]
        assert len(service["walls"]) == len(engine["walls"]) == 2
        assert cost == pytest.approx(1 - engine["wall_s"] / service["wall_s"], abs=0.02)
    assert "6 of 6 texts equal the engine's" in said
    assert set(descendants(os.getpid())) <= before
