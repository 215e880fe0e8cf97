import pytest
from click.testing import CliRunner

from cli.main import tokenmill


@pytest.fixture
def run(sqlite_url):
    """Runs a command against the database: its result, whose exit status is `status`."""

    def run(*words, status=0):
        result = CliRunner().invoke(tokenmill, words, env={"DATABASE_URL": sqlite_url})
        assert result.exit_code == status, result.output
        return result

    return run
