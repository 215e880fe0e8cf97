"""No route without a listed purpose, and nothing loaded that a door does not need."""

import re
import subprocess
import sys

from starlette.routing import Route

from api.app import create_app
from tests.conftest import REPOSITORY


def test_the_routes_are_those_of_the_page_with_their_purpose(sqlite_settings):
    served = set()
    for route in create_app(sqlite_settings).routes:
        assert isinstance(route, Route), route
        served |= {(method, route.path) for method in route.methods}
    page = (REPOSITORY / "docs" / "http.md").read_text()
    rows = re.findall(r"^\| ([A-Z]+) \| (\S+) \| (.+) \|$", page, re.MULTILINE)
    assert served == {(method, path) for method, path, _ in rows}
    assert all(len(purpose) > 10 for _, _, purpose in rows)


def test_documentation_routes_are_off(sqlite_client):
    for path in ("/docs", "/redoc", "/openapi.json", "/"):
        assert sqlite_client.get(path).status_code == 404


def test_importing_the_api_loads_no_torch():
    code = (
        "import sys, api.app, api.main\n"
        "loaded = sorted({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules))\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)
