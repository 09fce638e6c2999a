"""genflow's HTTP API as a caller sees it: what may pass is tried again, all else is a sentence for a person.

* ClientError     the message is for whoever runs the program
  + Trouble       may pass: no answer, half an answer, a busy or a broken server
  + Refused       the server would say the same again
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import urljoin, urlsplit
from uuid import UUID, uuid4

import requests
from urllib3 import Retry, encode_multipart_formdata
from urllib3.exceptions import InvalidHeader

Job = dict[str, Any]  # `Job` of the Comfy API v2, and a little more
T = TypeVar("T")
ENDED: Final = frozenset({"succeeded", "failed", "canceled", "expired"})
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS: Final = 10
# Longer than a server holds an answer.
READ_SECONDS: Final = 60
# So often progress is shown; an end comes at once.
HOLD_SECONDS: Final = 1
# Between two looks at a job, where the server does not hold its answers.
POLL_SECONDS: Final = 1
PAUSE_MAX_SECONDS: Final = 15


class ClientError(Exception):
    """Something that whoever runs the program should read."""


class Trouble(ClientError):
    """It may pass. `retry_after`: seconds that the server asked for."""

    def __init__(self, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Refused(ClientError):
    """The server will say the same again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The calls that a portrait takes.

    url: as requests spells it, without a slash at its end.
    patience: seconds that trouble may last before it is raised; `note` is told of it meanwhile.
    """

    def __init__(
        self, url: str, token: str, *, patience: float, note: Callable[[str], None]
    ) -> None:
        self.url = url
        self.patience = patience
        self.note = note
        self.hold_seconds = HOLD_SECONDS
        self._token = token
        self._session = requests.Session()
        self._session.auth = self._authorize
        # No proxy on the way to this machine.
        self._session.trust_env = urlsplit(url).hostname not in LOOPBACK

    def submit(self, photo: bytes, fields: Mapping[str, object]) -> Job:
        """Return the new job. It is one, however often it is sent: each try has one key and the same bytes."""
        form = {name: str(value) for name, value in fields.items()}
        body, content_type = encode_multipart_formdata(form | {"photo": ("photo", photo)})
        headers = {"Content-Type": content_type, "Idempotency-Key": str(uuid4())}
        url = f"{self.url}/api/v2/portraits"
        return self._patiently(lambda: self._job("POST", url, data=body, headers=headers))

    def find(self, job_id: UUID) -> Job:
        return self._look(f"{self.url}/api/v2/jobs/{job_id}")

    def watch(self, job: Job, show: Callable[[Job], None]) -> Job:
        """Show the job at each look, from this one to its end, and return it as it ended."""
        show(job)
        due = 0.0
        while job["status"] not in ENDED:
            time.sleep(max(0.0, due - time.monotonic()))
            due = time.monotonic() + POLL_SECONDS
            job = self._wait_for_change(job)
            show(job)
        return job

    def look_again(self, job: Job, **query: object) -> Job:
        return self._look(self._follow(job["urls"]["self"]), **query)

    def picture(self, output: Mapping[str, Any]) -> bytes:
        """Return an output's bytes, all of them."""
        return self._patiently(
            lambda: self._bytes(self._follow(output["url"]), output["size_bytes"])
        )

    def _wait_for_change(self, job: Job) -> Job:
        """Look again, at once when the job has changed; progress alone is no change that an answer waits for."""
        if self.hold_seconds:
            try:
                return self.look_again(job, wait=self.hold_seconds)
            except Refused as exc:
                if exc.status not in (400, 422):
                    raise
                self.hold_seconds = 0  # an older server, which does not know the word
        return self.look_again(job)

    def _look(self, url: str, **query: object) -> Job:
        return self._patiently(lambda: self._job("GET", url, params=query))

    def _bytes(self, url: str, size: int) -> bytes:
        content = self._answer("GET", url).content
        if len(content) != size:
            raise Trouble(f"{len(content)} of {size} bytes of a picture came")
        return content

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Return what `ask` returns, if it does before trouble has lasted for too long."""
        ends, tries, told = math.inf, 0, ""
        while True:
            try:
                return ask()
            except Trouble as exc:
                ends = min(ends, time.monotonic() + self.patience)
                backoff = min(2**tries, PAUSE_MAX_SECONDS) * random.uniform(0.5, 1)  # noqa: S311
                pause = max(exc.retry_after, backoff)
                if time.monotonic() + pause > ends:
                    raise
                if str(exc) != told:
                    told = str(exc)
                    self.note(f"{told}; trying again for {self.patience:.0f} s at most")
            time.sleep(pause)
            tries += 1

    def _job(self, method: str, url: str, **request: Any) -> Job:
        with suppress(ValueError):
            job = self._answer(method, url, **request).json()
            if isinstance(job, dict) and {"id", "status", "urls"} <= job.keys():
                return job
        raise Trouble(f"{self.url} does not answer as genflow does; is this its address?")

    def _answer(self, method: str, url: str, **request: Any) -> requests.Response:
        """Return the answer of a success. The one place where requests' errors become ours."""
        try:
            answer = self._session.request(
                method,
                url,
                timeout=(CONNECT_SECONDS, READ_SECONDS),
                allow_redirects=method == "GET",  # a POST that is sent on becomes a GET
                **request,
            )
        except (requests.exceptions.SSLError, requests.exceptions.InvalidURL) as exc:
            raise Refused(f"{self.url} cannot be trusted: {reason(exc)}", 0) from exc
        except requests.RequestException as exc:
            raise Trouble(f"{self.url} does not answer: {reason(exc)}") from exc
        status = answer.status_code
        if status in (409, 429) or status >= 500:
            raise Trouble(sentence_of(answer), retry_after(answer))
        if not answer.ok or answer.is_redirect:
            raise Refused(sentence_of(answer), status)
        return answer

    def _follow(self, link: str) -> str:
        """Return the address of a link in an answer: it may begin at the server's root."""
        return urljoin(self.url, link)

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Show the token to the server alone: pictures may lie elsewhere. It also goes before ~/.netrc."""
        if urlsplit(str(request.url))[:2] == urlsplit(self.url)[:2]:
            request.headers["Authorization"] = f"Bearer {self._token}"
        return request


def sentence_of(answer: requests.Response) -> str:
    """Return what the API's error says, field by field where it says more of them."""
    address = answer.url.partition("?")[0]  # the query can be a signature
    if answer.is_redirect:
        return f"{address} has moved to {answer.headers['Location']}: take that server's address"
    try:
        error = answer.json()["error"]
        fields = [
            f"{name}: {' '.join(map(str, sentences))}"
            for name, sentences in (error.get("details") or {}).items()
            if isinstance(sentences, list)
        ]
        return f"{' '.join(fields) or error['message']} ({error['code']})"
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{address} answers {answer.status_code} {answer.reason}"


def retry_after(answer: requests.Response) -> float:
    with suppress(InvalidHeader, ValueError, OverflowError):
        return Retry().parse_retry_after(answer.headers.get("Retry-After", "0"))
    return 0


def reason(exc: BaseException) -> str:
    """Return what lies at the bottom of an error, not its text: that has a link with its signature."""
    while cause := exc.__cause__ or exc.__context__:
        exc = cause
    return getattr(exc, "strerror", None) or type(exc).__name__
