from __future__ import annotations

import pytest

from comfy.address import Address


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
