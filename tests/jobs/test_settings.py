"""Settings: read once, checked, each with its line of documentation."""

from dataclasses import fields

import pytest

from jobs.settings import ModelEntry, Settings, SettingsError, unknown_variables, variable


def test_an_empty_environment_gives_the_defaults():
    settings = Settings.from_env({"TOKENMILL_PORT": "", "PATH": "/bin"})
    assert settings == Settings()
    assert (settings.lease_s, settings.beat_s, settings.runway) == (30.0, 5.0, 64)


def test_paths_follow_the_data_folder():
    settings = Settings.from_env(
        {"TOKENMILL_DATA_DIR": "/srv/mill", "TOKENMILL_MODELS": " a=/w/a.gguf, b/c , d=org/hub "}
    )
    assert settings.database_url == "sqlite:////srv/mill/tokenmill.db"
    assert settings.models == (
        ModelEntry(name="a", path="/w/a.gguf"),
        ModelEntry(name="b/c", path="/srv/mill/models/b/c"),
        ModelEntry(name="d", path="org/hub"),
    )
    assert settings.model("b/c") == settings.models[1]
    assert settings.model("none") is None
    for given, path in (("small", "/srv/mill/models/small"), ("org/hub", "org/hub")):
        settings = Settings.from_env(
            {"TOKENMILL_DATA_DIR": "/srv/mill", "TOKENMILL_DRAFT_MODEL": given}
        )
        assert settings.draft_model == path


def test_values_are_read_by_their_type():
    settings = Settings.from_env({
        "TOKENMILL_PREFIX_CACHING": "off",
        "TOKENMILL_KV_CACHE_BYTES": "2 GiB",
        "TOKENMILL_MAX_BODY_BYTES": "123456",
        "TOKENMILL_NUM_BLOCKS": "77",
        "TOKENMILL_SWEEP_S": "1.5",
        "DATABASE_URL": "postgresql://u:p@h/d",
        "REDIS_URL": "unix:///run/valkey.sock?db=3",
    })  # fmt: skip
    assert settings.prefix_caching is False
    assert (settings.kv_cache_bytes, settings.max_body_bytes) == (2 << 30, 123456)
    assert (settings.num_blocks, settings.sweep_s) == (77, 1.5)
    assert settings.redis_url == "unix:///run/valkey.sock?db=3"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TOKENMILL_LEASE_S", "soon", "not a number of seconds: 'soon'"),
        ("TOKENMILL_LEASE_S", "nan", "must be in [1, 3600], got nan"),
        ("TOKENMILL_BEAT_S", "11", "at most a third of TOKENMILL_LEASE_S (30), got 11"),
        (
            "TOKENMILL_BODY_MEMORY_BYTES",
            "1m",
            "at least TOKENMILL_MAX_BODY_BYTES (4194304), got 1048576",
        ),
        ("TOKENMILL_PORT", "65536", "must be in [0, 65535]"),
        ("TOKENMILL_PORT", "80.5", "not a number: '80.5'"),
        ("TOKENMILL_KV_CACHE_BYTES", "lots", "not a number of bytes: 'lots'"),
        ("TOKENMILL_PREFIX_CACHING", "maybe", "must be true or false, got 'maybe'"),
        ("TOKENMILL_DTYPE", "fp8", "must be one of auto, float32"),
        ("TOKENMILL_DEVICE", "tpu", "must be auto, cpu, cuda or cuda:N"),
        ("TOKENMILL_MODELS", "a,a", "must list different models"),
        ("TOKENMILL_MODELS", "../up=/x", "names must be"),
        ("DATABASE_URL", "mysql://u:secret@h/d", "must start with sqlite:/// or postgresql://"),
        ("DATABASE_URL", "postgresql://u:secret@[::1/d", "has a host or port that cannot be read"),
        ("DATABASE_URL", "postgresql://u:secret@h:port/d", "has a host or port"),
        ("DATABASE_URL", "postgresql://u:secret@h:65536/d", "has a host or port"),
        ("REDIS_URL", "http://h", "must start with redis://"),
        ("REDIS_URL", "redis://:secret@[::1/0", "has a host or port that cannot be read"),
        ("REDIS_URL", "redis://:secret@h:port/0", "has a host or port"),
        ("REDIS_URL", "redis://:secret@h:65536/0", "has a host or port"),
        ("REDIS_URL", "redis://:secret@h:6379/jobs", "must end with the number of a database"),
    ],
)
def test_a_bad_value_names_its_variable(name, value, words):
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: value})
    assert caught.value.variable == name
    assert str(caught.value).startswith(name)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("DATABASE_URL", "postgresql://u:p#/?s@h/d"),
        ("DATABASE_URL", "postgresql://u@[::1]:5432/d"),
        ("DATABASE_URL", "postgresql:///d?host=/run/postgresql"),
        ("REDIS_URL", "redis://:p@ss@h:1/15"),
        ("REDIS_URL", "rediss://u:p@[::1]:6379?ssl_cert_reqs=none"),
        ("REDIS_URL", "redis://h/"),
    ],
)
def test_unusual_addresses_are_taken_as_they_are(name, url):
    assert getattr(Settings.from_env({name: url}), name.lower()) == url


def test_a_password_is_not_shown_when_settings_are():
    settings = Settings(database_url="postgresql://u:secret@h/d", redis_url="redis://:secret@h")
    assert "secret" not in repr(settings)


def test_drafts_by_a_model_need_its_name():
    with pytest.raises(SettingsError, match="TOKENMILL_DRAFT_MODEL must name a checkpoint"):
        Settings.from_env({"TOKENMILL_SPECULATION": "draft"})


def test_misspelt_variables_are_told_not_refused():
    environ = {"TOKENMILL_LEASE": "5", "TOKENMILL_LEASE_S": "6", "HOME": "/"}
    assert unknown_variables(environ) == ["TOKENMILL_LEASE"]
    settings = Settings.from_env(environ)
    assert (settings.lease_s, settings.beat_s) == (6, 1)


def test_every_setting_is_documented_and_every_number_has_bounds():
    for field in fields(Settings):
        assert field.metadata["doc"].endswith("."), field.name
        if field.type in (int, float, int | None):
            assert field.metadata["low"] < field.metadata["high"], field.name
        assert variable(field.name).isupper()
        if field.name.endswith("_s"):
            assert field.metadata["unit"] == "seconds"
        if field.name.endswith("_bytes"):
            assert field.metadata["unit"] == "bytes"
