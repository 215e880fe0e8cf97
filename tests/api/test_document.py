"""The OpenAPI document says of every route what it takes and what it answers, and no more."""

import dataclasses
import re

import pytest
from jsonschema import Draft202012Validator

from api.app import create_app
from api.document import OPERATIONS, PATH, document, served
from jobs import openai_responses
from jobs import openai_tables as tables
from tests.api.conftest import MODEL, chat, completion, error_of, serving, submit


@pytest.fixture
def described(sqlite_settings) -> dict:
    app = create_app(dataclasses.replace(sqlite_settings, openapi=True))
    return document(app.routes, [MODEL], asks_for_keys=True)


@pytest.fixture
def conforms(described):
    def check(name: str, value: object) -> bool:
        schema = {"$ref": f"#/components/schemas/{name}", "components": described["components"]}
        return Draft202012Validator(schema).is_valid(value)

    return check


def test_every_route_is_described_and_no_other(described, sqlite_settings):
    app = create_app(dataclasses.replace(sqlite_settings, openapi=True))
    routes = {(method, path) for method, path, _ in served(app.routes)}
    assert routes == set(OPERATIONS)
    paths = described["paths"].items()
    assert routes == {(method.upper(), path) for path, each in paths for method in each}
    names = [each["operationId"] for _, path in paths for each in path.values()]
    assert len(set(names)) == len(names)


def test_its_schemas_are_schemas_and_none_is_missing(described):
    schemas = described["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    named = re.findall(r"'#/components/schemas/(\w+)'", str(described))
    assert set(named) == set(schemas)


def test_it_is_served_only_where_the_deployment_asks_for_it(sqlite_settings, sqlite_client):
    assert error_of(sqlite_client.get(PATH))["code"] == "unknown_path"
    with serving(dataclasses.replace(sqlite_settings, openapi=True)) as client:
        reply = client.get(PATH)
        assert reply.json()["openapi"] == "3.1.0"
        assert client.get("/docs").status_code == 404


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ChatBody", {*tables.CHAT_FIELDS, *tables.CHAT_NEUTRAL, *tables.CHAT_REFUSED}),
        ("CompletionBody", {*tables.COMPLETIONS_FIELDS, *tables.COMPLETIONS_NEUTRAL}),
        ("ResponseBody", {*openai_responses.SAME, *openai_responses.READ_HERE}),
    ],
)
def test_every_field_that_is_read_is_described(described, name, known):
    fields = set(described["components"]["schemas"][name]["properties"])
    assert known <= fields
    if name != "ResponseBody":
        assert fields >= {*tables.OPTIONS, *tables.HARMLESS, *tables.BOTH_WORK}


CHANGES = [
    ("ChatBody", {}, True),
    ("ChatBody", {"temperature": 2}, True),
    ("ChatBody", {"temperature": None, "audio": None}, True),
    ("ChatBody", {"temperature": 2.1}, False),
    ("ChatBody", {"top_p": 0}, False),
    ("ChatBody", {"seed": -1}, False),
    ("ChatBody", {"num_beam_groups": 16}, True),
    ("ChatBody", {"num_beam_groups": 17}, False),
    ("ChatBody", {"audio": {}}, False),
    ("ChatBody", {"model": "nobody"}, False),
    ("ChatBody", {"messages": [{"role": "tool", "content": "x"}]}, False),
    ("ChatBody", {"messages": [{"role": "assistant"}]}, False),
    ("ChatBody", {"messages": [{"role": "assistant", "content": "x"}]}, True),
    ("ChatBody", {"messages": [{"role": "user", "content": "x", "refusal": None}]}, True),
    ("ChatBody", {"surprise": None}, False),
    ("ChatBody", {"tokenmill": {"priority": 11}}, False),
    ("CompletionBody", {"prompt": [1, 2]}, True),
    ("CompletionBody", {"prompt": ["a", []]}, False),
    ("CompletionBody", {"suffix": "x"}, False),
]


def test_a_body_fits_its_schema_where_it_is_accepted(conforms, sqlite_client):
    for name, change, fits in CHANGES:
        job = chat() if name == "ChatBody" else completion()
        body = job["body"] | change
        assert conforms(name, body) == fits, change
        if "num_beam_groups" in change and fits:  # what else that takes, no schema says
            body |= {"num_beams": 16, "diversity_penalty": 0.5}
        if "tokenmill" not in change:
            reply = sqlite_client.post("/v1/jobs", json=job | {"body": body})
            assert reply.status_code == (202 if fits else 400), reply.text
            assert conforms("NewJobs", job | {"body": body}) == fits, change


def test_a_job_has_one_prompt_and_a_call_several(conforms):
    several = completion(prompt=["a", [1, 2]])
    assert conforms("CompletionBody", several["body"])
    assert not conforms("NewJobs", several)


def test_replies_have_their_schemas(conforms, sqlite_client, hands):
    job = submit(sqlite_client, chat())
    assert conforms("JobOrJobs", job)
    assert not conforms("JobOrJobs", job | {"surprise": 1})
    hands.finish(hands.claim(job["id"]))
    assert conforms("Job", sqlite_client.get(f"/v1/jobs/{job['id']}").json())
    assert conforms("JobPage", sqlite_client.get("/v1/jobs").json())
    assert conforms("Error", sqlite_client.get("/v1/jobs/job_1").json())
    for path, name in (
        ("/health/live", "Live"),
        ("/health/ready", "Ready"),
        ("/v1/models", "Models"),
        ("/admin/v1/tenants", "Tenants"),
        ("/v1/webhook_endpoints", "Endpoints"),
    ):
        assert conforms(name, sqlite_client.get(path).json()), path
