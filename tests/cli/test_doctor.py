"""The doctor finds each of the things that it is there to find, on real servers."""

import json
import shutil
import socket

import pytest
import redis
from click.testing import CliRunner

from cli.addresses import free_port
from cli.doctor import CHECKS
from cli.main import tokenmill
from cli.servers import Valkey


@pytest.fixture
def examine(tmp_path, tiny_llama_dir, monkeypatch):
    """Runs the doctor in a good environment with changes; returns status and findings by topic."""
    environ = {
        "TOKENMILL_DATA_DIR": str(tmp_path / "data"),
        "TOKENMILL_MODELS": f"tiny={tiny_llama_dir}",
        "TOKENMILL_PORT": str(free_port()),
        "DATABASE_URL": "",
        "REDIS_URL": "",
    }

    def run(*arguments, **changes):
        result = CliRunner().invoke(
            tokenmill, ["doctor", "--json", *arguments], env=environ | changes
        )
        findings = {}
        for finding in json.loads(result.stdout):
            findings.setdefault(finding["topic"], []).append(finding)
        return result.exit_code, findings

    return run


def failures(findings):
    return {
        topic for topic, found in findings.items() if any(f["verdict"] == "failed" for f in found)
    }


def test_a_fresh_machine_with_a_model_is_healthy(examine):
    status, findings = examine()
    assert status == 0
    assert findings.keys() == {"settings", "data", "models", "redis", "database", "port"}
    assert {f["verdict"] for found in findings.values() for f in found} == {"ok"}


def test_a_deployment_with_servers_is_healthy(examine, valkey_url, database_url):
    status, findings = examine(REDIS_URL=valkey_url, DATABASE_URL=database_url)
    assert status == 0, findings
    assert "noeviction" in findings["redis"][0]["message"]
    assert "schema up to date" in findings["database"][0]["message"]
    password = valkey_url.split("@")[0].rpartition(":")[2]
    assert password not in json.dumps(findings)


def test_a_setting_out_of_bounds_is_named(examine):
    status, findings = examine(TOKENMILL_RUNWAY="0")
    assert (status, failures(findings)) == (1, {"settings"})
    assert "TOKENMILL_RUNWAY" in findings["settings"][0]["message"]


def test_a_misspelt_setting_is_a_warning(examine):
    status, findings = examine(TOKENMILL_LEASES="30")
    assert status == 0
    assert findings["settings"][0]["verdict"] == "warning"
    assert "TOKENMILL_LEASES" in findings["settings"][0]["message"]


def test_a_redis_that_evicts_is_unsafe(examine, tmp_path):
    with Valkey(tmp_path / "evicting", persist=False) as server:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        status, findings = examine(REDIS_URL=server.url)
    assert (status, failures(findings)) == (1, {"redis"})
    assert "allkeys-lru" in findings["redis"][0]["message"]
    assert "noeviction" in findings["redis"][0]["remedy"]


def test_an_unreachable_redis_and_a_wrong_password_are_found(examine, valkey_url):
    for url in (f"redis://127.0.0.1:{free_port()}/0", valkey_url.replace("@", "wrong@")):
        status, findings = examine(REDIS_URL=url)
        assert (status, failures(findings)) == (1, {"redis"})


def test_an_unreachable_database_is_found_without_its_password(examine):
    url = f"postgresql://me:canary@127.0.0.1:{free_port()}/jobs"
    status, findings = examine(DATABASE_URL=url)
    assert (status, failures(findings)) == (1, {"database"})
    assert "canary" not in json.dumps(findings)


def test_a_database_without_the_schema_is_found(examine, tmp_path):
    empty = tmp_path / "empty.db"
    empty.touch()
    status, findings = examine(DATABASE_URL=f"sqlite:///{empty}")
    assert (status, failures(findings)) == (1, {"database"})
    assert findings["database"][0]["remedy"] == "tokenmill migrate"


def test_a_missing_model_is_found_with_the_command_that_gets_it(examine):
    status, findings = examine(TOKENMILL_MODELS="smollm2-135m-instruct,other=/nowhere")
    assert (status, failures(findings)) == (1, {"models"})
    remedies = [finding["remedy"] for finding in findings["models"]]
    assert remedies[0].startswith("tokenmill models fetch smollm2-135m-instruct")
    assert remedies[1].endswith("--name other")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template must be a text"),
        ("chat_template.jinja", "{{ 'a'|wordwrap(1) }}", "'wordwrap'"),
        ("config.json", "[" * 200_000, "nested too deep"),
    ],
)
def test_a_model_that_cannot_be_read_is_found_with_the_file(
    examine, tmp_path, tiny_llama_dir, name, content, said
):
    folder = shutil.copytree(tiny_llama_dir, tmp_path / "model")
    (folder / name).write_text(content)
    status, findings = examine(TOKENMILL_MODELS=f"broken={folder}")
    assert (status, failures(findings)) == (1, {"models"})
    assert said in findings["models"][0]["message"]


def test_a_port_in_use_and_an_open_host_are_warnings(examine):
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        open_host = {"TOKENMILL_HOST": "0.0.0.0", "TOKENMILL_PORT": port}
        status, findings = examine(TOKENMILL_AUTH="keys", **open_host)
    assert status == 0
    assert [finding["verdict"] for finding in findings["port"]] == ["warning", "warning"]
    status, findings = examine(**open_host)
    assert (status, failures(findings)) == (1, {"settings"})
    assert "TOKENMILL_AUTH" in findings["settings"][0]["message"]


def test_workers_are_looked_for_only_when_asked(examine, database_url):
    for topic in ("workers", "this-host"):
        status, findings = examine("--only", topic, DATABASE_URL=database_url)
        assert (status, findings.keys()) == (1, {topic})


def test_an_unknown_topic_is_wrong_usage():
    result = CliRunner().invoke(tokenmill, ["doctor", "--only", "weather"])
    assert result.exit_code == 2
    assert "--only must be one of: settings" in result.output


def test_the_help_names_every_topic():
    told = "".join(CliRunner().invoke(tokenmill, ["doctor", "--help"]).output.split())
    assert f"({','.join(CHECKS)})" in told
