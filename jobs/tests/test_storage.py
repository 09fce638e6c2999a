from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.storage import default_storage

from jobs.models import Blob, BlobChunk
from jobs.storage import CHUNK_BYTES
from jobs.tests.processes import database_url

pytestmark = pytest.mark.django_db


def test_bytes_come_back_as_they_were_whatever_their_size() -> None:
    for size in (0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 1):
        content = os.urandom(size)

        name = default_storage.save("assets/x", ContentFile(content))

        assert default_storage.open(name).read() == content
        assert default_storage.size(name) == size


def test_a_file_is_read_from_wherever_one_likes() -> None:
    content = os.urandom(2 * CHUNK_BYTES + 9)
    name = default_storage.save("assets/x", ContentFile(content))

    with default_storage.open(name) as file:
        for first, size in [
            (CHUNK_BYTES - 2, 4),
            (0, 3),
            (2 * CHUNK_BYTES, 99),
            (5 * CHUNK_BYTES, 1),
        ]:
            file.seek(first)
            assert file.read(size) == content[first : first + size]
        assert file.seek(-4, os.SEEK_END) == file.tell() == len(content) - 4
        assert file.read() == content[-4:]
        with pytest.raises(ValueError, match="nothing at -1"):
            file.seek(-1)


def test_a_file_that_is_deleted_while_it_is_read_is_no_shorter_one() -> None:
    name = default_storage.save("assets/x", ContentFile(bytes(3 * CHUNK_BYTES)))
    file = default_storage.open(name)
    file.read(CHUNK_BYTES)

    default_storage.delete(name)

    with pytest.raises(FileNotFoundError):
        file.read(CHUNK_BYTES)


def test_a_deleted_file_leaves_no_chunk() -> None:
    name = default_storage.save("assets/x", ContentFile(b"abc"))

    default_storage.delete(name)

    assert not default_storage.exists(name)
    assert not BlobChunk.objects.exists()
    with pytest.raises(FileNotFoundError):
        default_storage.open(name)


def test_a_second_file_of_the_same_name_does_not_replace_the_first() -> None:
    first = default_storage.save("assets/x", ContentFile(b"1"))
    second = default_storage.save("assets/x", ContentFile(b"2"))

    assert first != second
    assert Blob.objects.count() == 2


READ = """
import django; django.setup()
from django.core.files.storage import default_storage
import sys; sys.stdout.buffer.write(default_storage.open(sys.argv[1]).read())
"""


@pytest.mark.django_db(transaction=True)
def test_two_machines_share_bytes_by_the_database_alone(tmp_path: Path) -> None:
    name = default_storage.save("assets/shared", ContentFile(b"from afar"))

    elsewhere = subprocess.run(  # noqa: S603 (our own interpreter)
        [sys.executable, "-c", READ, name],
        cwd=tmp_path,
        env={
            "DJANGO_SETTINGS_MODULE": "genflow_project.settings",
            "PYTHONPATH": str(settings.BASE_DIR),
            "DATABASE_URL": database_url(),
            "SECRET_KEY": "another",
            "ALLOWED_HOSTS": "elsewhere",
        },
        capture_output=True,
        check=True,
    )

    assert elsewhere.stdout == b"from afar"
