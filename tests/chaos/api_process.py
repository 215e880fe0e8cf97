"""`python -m tests.chaos.api_process`: the API as `tokenmill api` runs it, by a name of its own."""

from api.main import run
from jobs.settings import Settings

if __name__ == "__main__":
    run(Settings.from_env())
