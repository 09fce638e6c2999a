"""The address of a ComfyUI server, with the password kept apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Address:
    """Where a server is. `url` has no credentials and no trailing slash; `repr` never shows them."""

    url: str
    credentials: tuple[str, str] | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, base_url: str) -> Self:
        """Read `http(s)://[user:password@]host[:port][/path]`, or raise ValueError (without the value)."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("a ComfyUI address must look like http(s)://host[:port][/path]")
        host = parts.netloc.rpartition("@")[2]
        url = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        if parts.username is None:
            return cls(url)
        return cls(url, (unquote(parts.username), unquote(parts.password or "")))

    @property
    def websocket_url(self) -> str:
        """The same place for a WebSocket: ws(s) instead of http(s)."""
        return "ws" + self.url.removeprefix("http")


def canonical(base_url: str) -> str:
    """Return the one spelling of an address, its credentials left as they are: it names a backend."""
    parts = urlsplit(base_url)
    userinfo, at, host = parts.netloc.rpartition("@")
    default_port = {"http": ":80", "https": ":443"}[parts.scheme]
    return f"{parts.scheme}://{userinfo}{at}{host.lower().removesuffix(default_port)}{parts.path.rstrip('/')}"
