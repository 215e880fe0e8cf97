"""compose.yaml without a Docker engine: valid, without secrets, and its commands do run.

Each command and health check of our own services is run as written, with the environment as
written; only the two servers' host names, the port and the data folder are this machine's.
"""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import yaml

from cli.addresses import free_port
from cli.client import Client
from tests.conftest import REPOSITORY
from tests.e2e.conftest import TOKENMILL, environment, wait_until

SECRETS = {"POSTGRES_PASSWORD": "p", "REDIS_PASSWORD": "r"}
OUR_SERVICES = {"migrate", "models", "api", "sweeper", "worker-gpu", "worker-cpu"}
# ${NAME}, ${NAME:-default}, ${NAME:?message}
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")


class Missing(Exception):
    """A variable that must be given was not."""


def interpolate(text, variables):
    def value(match):
        given = variables.get(match["name"], "")
        if given or match["kind"] is None:
            return given
        if match["kind"] == "?":
            raise Missing(match["rest"])
        return match["rest"]

    return VARIABLE.sub(value, text)


def compose(variables):
    """compose.yaml as Docker reads it: variables first, then YAML."""
    return yaml.safe_load(interpolate((REPOSITORY / "compose.yaml").read_text(), variables))


def test_it_is_valid_by_the_compose_specification(tmp_path):
    file = tmp_path / "compose.yaml"
    file.write_text(interpolate((REPOSITORY / "compose.yaml").read_text(), SECRETS))
    check = Path(sys.executable).with_name("check-jsonschema")
    done = subprocess.run(
        [check, "--builtin-schema", "vendor.compose-spec", file], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_every_process_of_the_service_has_one():
    services = compose(SECRETS)["services"]
    assert services.keys() == OUR_SERVICES | {"redis", "postgres"}
    assert services["worker-gpu"]["profiles"] == ["gpu"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-cpu"]["command"] == services["worker-gpu"]["command"]
    for name in services.keys() - {"migrate", "models"}:
        assert services[name]["healthcheck"]["test"], name


@pytest.mark.parametrize("secret", SECRETS)
def test_no_secret_has_a_default(secret):
    with pytest.raises(Missing, match=f"set {secret} in .env"):
        compose(SECRETS | {secret: ""})
    assert f"\n{secret}=\n" in (REPOSITORY / ".env.example").read_text()


def test_nothing_is_published_beyond_this_machine():
    for name, service in compose(SECRETS)["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)
        assert not service.get("privileged"), name


def test_redis_does_not_evict():
    command = compose(SECRETS)["services"]["redis"]["command"]
    assert "--maxmemory-policy noeviction" in command
    assert "--requirepass" in command


def test_what_is_kept_beside_the_models_has_a_place_in_the_volume():
    """Compiled kernels, for one, are kept below the home: in a read-only container that is not in
    the volume each start would compile them anew."""
    image = (REPOSITORY / "Dockerfile").read_text().rpartition("FROM ")[2]
    volume = re.search(r"^VOLUME (\S+)$", image, re.M)[1]
    kept = dict(re.findall(r"\b(HOME|HF_HOME|TRITON_CACHE_DIR|TOKENMILL_DATA_DIR)=(\S+)", image))
    assert len(kept) == 4
    for name, folder in kept.items():
        assert Path(folder).is_relative_to(volume), name
    for name in OUR_SERVICES:
        service = compose(SECRETS)["services"][name]
        assert service["read_only"], name
        assert f"data:{volume}" in service["volumes"], name


@pytest.fixture
def deployment(postgres_server, valkey_url, tmp_path, tiny_llama_dir):
    """The services of compose.yaml on this machine's servers; ends what is left running."""
    with psycopg.connect(postgres_server.url.replace("+psycopg", ""), autocommit=True) as server:
        server.execute("CREATE DATABASE compose")
    services = compose(
        {
            "POSTGRES_PASSWORD": postgres_server.password,
            "REDIS_PASSWORD": urlsplit(valkey_url).password,
            "TOKENMILL_MODELS": "tiny",
            "TOKENMILL_FETCH": "tiny",
        }
    )["services"]
    addresses = {
        "@postgres:5432/tokenmill": f"@127.0.0.1:{postgres_server.port}/compose",
        "@redis:6379/": f"@127.0.0.1:{urlsplit(valkey_url).port}/",
    }
    port = str(free_port())
    data = tmp_path / "data"
    (data / "models").mkdir(parents=True)
    (data / "models" / "tiny").symlink_to(tiny_llama_dir)

    def environ_of(name):
        environ = {}
        for key, value in services[name]["environment"].items():
            for there, here in addresses.items():
                value = value.replace(there, here)
            environ[key] = value
        assert environ["TOKENMILL_DATA_DIR"] == "/data"
        # what the container's own address space gives: its port 8000, its /data
        local = {"TOKENMILL_PORT": port, "TOKENMILL_DATA_DIR": str(data)}
        return environment(data, threads=1) | environ | local

    deployment = Deployment(services, environ_of, tmp_path)
    yield deployment
    deployment.end()
    with psycopg.connect(postgres_server.url.replace("+psycopg", ""), autocommit=True) as server:
        server.execute("DROP DATABASE compose WITH (FORCE)")


class Deployment:
    def __init__(self, services, environ_of, folder):
        self.services = services
        self.environ_of = environ_of
        self.folder = folder
        self.running = {}

    def command(self, words):
        assert words[0] == "tokenmill", words
        return [*TOKENMILL, *words[1:]]

    def run(self, name):
        """A service that ends by itself."""
        return subprocess.run(
            self.command(self.services[name]["command"]),
            env=self.environ_of(name),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def start(self, name):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                self.command(self.services[name]["command"]),
                env=self.environ_of(name),
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    def is_healthy(self, name):
        kind, *words = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if name in self.running:
            assert self.running[name].poll() is None, self.log(name)
        done = subprocess.run(
            self.command(words),
            env=self.environ_of(name),
            cwd=self.folder,
            capture_output=True,
            timeout=120,
        )
        return done.returncode == 0

    def end(self):
        for process in self.running.values():
            process.terminate()
        return {name: process.wait(60) for name, process in self.running.items()}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_services_run_and_their_health_checks_tell_health(deployment):
    for name in ("api", "sweeper", "worker-cpu"):  # nothing runs, the schema is not there
        assert not deployment.is_healthy(name)
    for name in ("migrate", "models", "migrate"):
        done = deployment.run(name)
        assert done.returncode == 0, done.stderr
    for name in ("api", "sweeper", "worker-cpu"):
        deployment.start(name)
    for name in ("api", "sweeper", "worker-cpu"):
        wait_until(lambda name=name: deployment.is_healthy(name), timeout_s=120)
    port = deployment.environ_of("api")["TOKENMILL_PORT"]
    made = subprocess.run(
        deployment.command(["tokenmill", "keys", "create", "--name", "test"]),
        env=deployment.environ_of("api"),
        cwd=deployment.folder,
        capture_output=True,
        text=True,
        check=True,
    )
    with Client(f"http://127.0.0.1:{port}", key=made.stdout.strip()) as client:
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 4, "ignore_eos": True}
        jobs = client.submit([{"url": "/v1/completions", "body": body}] * 8)
        ended = client.wait([job["id"] for job in jobs])
    assert {job["status"] for job in ended.values()} == {"succeeded"}
    deployment.running["worker-cpu"].kill()
    deployment.running.pop("worker-cpu").wait()
    # one host for all of them here: until the dead worker's lease lapses, it answers for the next
    wait_until(lambda: not deployment.is_healthy("worker-gpu"), timeout_s=120)
    deployment.start("worker-gpu")  # where there is no GPU, its command falls back to the CPU
    wait_until(lambda: deployment.is_healthy("worker-gpu"), timeout_s=120)
    assert deployment.end() == {"api": 0, "sweeper": 0, "worker-gpu": 0}
