"""What the unmodified `openai` client finds at a base URL.

    CONFORMANCE_BASE_URL=http://host:8000/v1 CONFORMANCE_API_KEY=… pytest tests/conformance

points the checks at any server; CONFORMANCE_MODEL says which of its models to ask, else the first.
Without a URL they run against `tokenmill up` with a tiny model, on SQLite and on PostgreSQL.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import psycopg
import pytest

import migrations

URL = os.environ.get("CONFORMANCE_BASE_URL")
DATABASES = ["given"] if URL else ["sqlite", pytest.param("postgres", marks=pytest.mark.long)]
TIMEOUT_S = 120.0
THOUGHTS = re.compile(
    r"\{%- if message\.reasoning_content.*?\{%- endif %\}|\{%- if enable_thinking.*?\{%- endif %\}",
    re.S,
)


@pytest.fixture(scope="session")
def talking_llama_dir(tiny_llama_dir, tmp_path_factory) -> Path:
    """The tiny model with a format for tools, and room for their prompts."""
    from tests.engine.chat_models import TAGGED

    folder = tmp_path_factory.mktemp("models") / "talking-llama"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    template = THOUGHTS.sub("", TAGGED)  # a random model would think for ever
    assert "think" not in template
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session", params=DATABASES)
def base_url(request, tmp_path_factory) -> Iterator[str]:
    if request.param == "given":
        yield str(URL)
        return
    from tests.e2e.conftest import start_up

    folder = tmp_path_factory.mktemp("conformance")
    environ = {"TOKENMILL_WEBHOOK_PRIVATE_ADDRESSES": "true"}  # the receiver is this process
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        with psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{folder.name}"')
        environ["DATABASE_URL"] = f"{server.url.rpartition('/')[0]}/{folder.name}"
        migrations.upgrade(environ["DATABASE_URL"])
    model_dir = request.getfixturevalue("talking_llama_dir")
    up = start_up(folder, model_dir, environ=environ)
    try:
        yield f"{up.url}/v1"
    finally:
        up.end()


@pytest.fixture(scope="session")
def client(base_url) -> Iterator[openai.OpenAI]:
    key = os.environ.get("CONFORMANCE_API_KEY", "none")
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


@pytest.fixture(scope="session")
def model(client) -> str:
    return os.environ.get("CONFORMANCE_MODEL") or client.models.list().data[0].id


@pytest.fixture
def chat(client, model):
    """`client.chat.completions.create` with a short question."""

    def create(content="What is a queue?", **values):
        usual = {"model": model, "messages": [{"role": "user", "content": content}]}
        limit = {} if "max_completion_tokens" in values else {"max_tokens": 8}
        return client.chat.completions.create(**usual | limit | values)

    return create


@pytest.fixture
def complete(client, model):
    def create(prompt="Once upon a time", **values):
        return client.completions.create(
            **{"model": model, "prompt": prompt, "max_tokens": 8} | values
        )

    return create


@pytest.fixture
def respond(client, model):
    def create(input="What is a queue?", **values):
        usual = {"model": model, "input": input, "max_output_tokens": 8}
        return client.responses.create(**usual | values)

    return create


WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["Oslo", "Bergen"]}, "cold": {"type": "boolean"}},
    "required": ["place", "cold"],
    "additionalProperties": False,
}
