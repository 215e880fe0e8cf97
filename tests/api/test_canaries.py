"""Logs of a run that does everything a client can, at `debug`: nothing secret stands in them."""

from urllib.parse import urlsplit

from jobs import keys
from tests.api.conftest import chat, completion
from tests.api.test_guard import door  # noqa: F401  a server that asks for keys


def test_no_log_holds_what_is_secret(door, sqlite_settings, caplog):  # noqa: F811
    prompt, secret_name = "canary in a coal mine", "canary of a name"
    with caplog.at_level("DEBUG"):
        operator = door.key(scopes=list(keys.Scope))
        post, get = door.client.post, door.client.get
        made = post("/admin/v1/keys", json={"name": secret_name}, headers=operator).json()["key"]
        caller = {"authorization": f"Bearer {made}"}
        wrong = (completion(prompt=prompt, n=-1), {"x": prompt})
        for job in (completion(prompt=prompt), chat(), *wrong):
            post("/v1/jobs", json=job, headers=caller)
        post("/v1/jobs", content=prompt.encode(), headers=caller)
        get("/v1/jobs", headers={"authorization": f"Bearer {made}x"})
        hook = {"name": "x", "url": "https://shop.example/", "event_types": ["batch.failed"]}
        hook = post("/v1/webhook_endpoints", json=hook, headers=caller).json()
        post(f"/v1/webhook_endpoints/{hook['id']}/test", headers=caller)
        metrics = get("/metrics", headers=operator).text
    password = urlsplit(sqlite_settings.redis_url).password
    assert caplog.text
    for canary in (prompt, made, made.split("_", 2)[2], hook["signing_secret"], password):
        assert canary not in caplog.text
        assert canary not in metrics
