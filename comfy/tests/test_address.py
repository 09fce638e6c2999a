from __future__ import annotations

import pytest

from comfy.address import Address, canonical


def test_an_address_keeps_its_path_and_gives_up_its_password() -> None:
    address = Address.parse("https://me:p%40ss@gpu.example:8443/comfy/")

    assert address.url == "https://gpu.example:8443/comfy"
    assert address.websocket_url == "wss://gpu.example:8443/comfy"
    assert address.credentials == ("me", "p@ss")
    assert "p@ss" not in repr(address)


@pytest.mark.parametrize("url", ["", "gpu:8188", "ftp://gpu", "http://", "http://user:secret@"])
def test_what_is_no_address_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="must look like") as caught:
        Address.parse(url)

    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["http://me:P%40@gpu/Comfy", "HTTP://me:P%40@GPU/Comfy/", "http://me:P%40@gpu:80/Comfy//"],
)
def test_an_address_has_one_spelling(url: str) -> None:
    assert canonical(url) == "http://me:P%40@gpu/Comfy"


def test_another_port_is_another_address() -> None:
    assert canonical("https://[::1]:80/") == "https://[::1]:80"
