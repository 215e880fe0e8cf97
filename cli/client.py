"""A small synchronous client of the jobs API, for the commands of this package.

ClientError
├── Unreachable      nobody answers there
└── Refused          the service said no: `status`, `param`; of several jobs `index` and `reason`
"""

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

LONGEST_WAIT_S = 60  # of one long-poll: the service allows no more
AWAY_PAUSE_S = 1.0  # before a service that is away is asked again
ENDED = frozenset({"succeeded", "failed", "cancelled", "expired"})
AWAY = frozenset({429, 502, 503, 504})  # the service's, or a proxy's word for "ask again later"

Job = dict[str, Any]  # a job object as the service shows it


class ClientError(Exception):
    """A call did not work. The message can be shown as it is."""


class Unreachable(ClientError):
    """No connection, or no answer in time."""


class Refused(ClientError):
    """An error object of the service."""

    def __init__(self, message: str, *, status: int, param: str | None) -> None:
        super().__init__(f"{status} {message}" + (f" ({param})" if param else ""))
        self.status = status
        self.param = param
        # of one of the jobs that were sent together: which, and what is wrong, without its index
        self.index: int | None = None
        self.reason = message
        if place := re.fullmatch(r"\[(\d+)\]\.?(.*)", param or "", re.DOTALL):
            self.index = int(place[1])
            self.reason = message.removeprefix(f"job {self.index}: ").removeprefix(f"{param}: ")
            self.reason += f" ({place[2]})" if place[2] else ""


class Client:
    """Talks to the service at `url` ("http://127.0.0.1:8000"). Every method raises ClientError."""

    def __init__(self, url: str, *, key: str = "") -> None:
        self.url = url.rstrip("/")
        try:
            # trust_env off: a proxy from the environment has no business with a local service
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(90.0, connect=5.0),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ClientError(f"{url!r} is not the address of a service: {error}") from None

    def submit(self, jobs: Sequence[Mapping[str, Any]], *, key: str | None = None) -> list[Job]:
        """Accept all or none of `jobs`; repeated with the same `key` it finds the same jobs."""
        headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
        # not httpx's own: it raises on NaN and on half a surrogate pair, which the service names
        content = json.dumps(list(jobs)).encode()
        return self._list("POST", "/v1/jobs", content=content, headers=headers)

    def job(self, job_id: str, *, wait_s: float = 0) -> Job:
        """The job now, or when it ends within `wait_s` (at most 60) seconds."""
        return self._call("GET", _path(job_id), params={"wait": wait_s})

    def cancel(self, job_id: str) -> Job:
        return self._call("POST", f"{_path(job_id)}/cancel")

    def newest(self, limit: int, *, status: str | None = None) -> list[Job]:
        """The newest jobs, newest first."""
        params: dict[str, Any] = {"limit": limit} | ({"status": status} if status else {})
        return self._list("GET", "/v1/jobs", params=params)

    def models(self) -> list[str]:
        return [str(model.get("id")) for model in self._list("GET", "/v1/models")]

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether the service can do jobs, and what it says of its parts."""
        answer = self._send("GET", "/health/ready")
        return answer.status_code == 200, self._object(answer)

    def wait(
        self, job_ids: Collection[str], *, on_end: Callable[[Job], None] = lambda job: None
    ) -> dict[str, Job]:
        """Block until all have ended. A service that is away for a while is waited for."""
        ended: dict[str, Job] = {}
        for job_id in job_ids:
            while job_id not in ended:
                try:
                    job = self.job(job_id, wait_s=LONGEST_WAIT_S)
                except (Unreachable, Refused) as error:
                    if isinstance(error, Refused) and error.status not in AWAY:
                        raise
                    time.sleep(AWAY_PAUSE_S)
                    continue
                if job["status"] in ENDED:
                    ended[job_id] = job
                    on_end(job)
        return ended

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        answer = self._send(method, path, **options)
        if answer.is_success:
            return self._object(answer)
        try:
            error = answer.json()["error"]
            message, param = str(error["message"]), error["param"]
        except (ValueError, KeyError, TypeError):
            message, param = answer.text[:200], None
        raise Refused(message, status=answer.status_code, param=param)

    def _list(self, method: str, path: str, **options: Any) -> list[dict[str, Any]]:
        listed = self._call(method, path, **options).get("data")
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise self._stranger()
        return listed

    def _object(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise self._stranger()
        return value

    def _stranger(self) -> ClientError:
        return ClientError(f"{self.url} does not answer as a Tokenmill service does")

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise Unreachable(
                f"no answer from {self.url}: {error} (is it running? `tokenmill up`)"
            ) from None


def _path(job_id: str) -> str:
    # surrogateescape: what a command line holds that is not UTF-8 goes out as it came
    return f"/v1/jobs/{quote(job_id, safe='', errors='surrogateescape')}"
