"""Jobs in each state, made as the worker makes them, and what a browser would send."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from io import BytesIO
from typing import Any

from django.contrib.auth.models import Permission, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.urls import reverse
from PIL import Image

from jobs.models import Asset, Failure, Job
from jobs.status import JobStatus, Step
from jobs.tests.helpers import LEASE, TERMS, claim, fresh, photo_bytes, queue_job

PASSWORD = "a-quiet-secret"  # noqa: S105
OUT_OF_MEMORY = Failure(
    "out_of_memory",
    "The picture is too large for the graphics card. Ask for a smaller one.",
    detail="torch.OutOfMemoryError on 10.0.0.7",
)
NO_ANSWER = Failure("unknown", "The server that draws did not answer.", detail="reset by 10.0.0.7")


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def page_of(job: Job) -> str:
    return reverse("job-detail", args=[job.pk])


def picture_url(job: Job, asset: Asset) -> str:
    return reverse("job-picture", args=[job.pk, asset.pk])


def portrait_bytes(colour: str = "goldenrod") -> bytes:
    image = Image.radial_gradient("L").convert("RGB")
    image.paste(colour, (80, 80, 176, 176))
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def waiting_job(owner: User, **values: Any) -> Job:
    return queue_job(owner, **values)


def claimed_job(owner: User) -> Job:
    job = queue_job(owner, priority=1)  # ahead of those that only wait
    held = claim(terms=replace(TERMS, prompts_per_backend=100))
    assert held is not None
    assert held.pk == job.pk
    return held


def running_job(owner: User, at: Step = Step.WAIT, **progress: Any) -> Job:
    job = claimed_job(owner)
    for done in Step:
        if done == at:
            break
        Job.objects.checkpoint(job, done, {}, LEASE)
    if progress:
        Job.objects.show_progress(job, progress)
    return fresh(job)


def retrying_job(owner: User) -> Job:
    job = claimed_job(owner)
    Job.objects.retry(job, NO_ANSWER, timedelta(hours=1), redraw=True)
    return fresh(job)


def failed_job(owner: User, failure: Failure = OUT_OF_MEMORY) -> Job:
    job = claimed_job(owner)
    Job.objects.fail(job, failure)
    return fresh(job)


def finished_job(owner: User, pictures: int = 1, **values: Any) -> Job:
    job = running_job(owner, Step.DOWNLOAD)
    Job.objects.succeed(job, [picture_of(job, n, **values) for n in range(pictures)], {})
    return fresh(job)


def picture_of(job: Job, number: int = 0, **values: Any) -> Asset:
    kind = {"content_type": "image/png", "width": 256, "height": 256}
    return Asset.store(
        values.pop("content", portrait_bytes()),
        owner=job.owner,
        job=job,
        node_id="9",
        name=f"portrait_{number}.png",
        **kind | values,
    )


def lose_file(asset: Asset) -> None:
    assert asset.file.name is not None
    asset.file.storage.delete(asset.file.name)


def form_values(**changed: Any) -> dict[str, Any]:
    """What the browser sends for a new portrait."""
    photo = SimpleUploadedFile("me.jpg", photo_bytes(), "image/jpeg")
    return {"photo": photo, "prompt": "a quiet portrait"} | changed


def make_staff(name: str, *permissions: str) -> User:
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(content_type__app_label="jobs", codename__in=permissions)
    )
    return user


def status_of(job: Job) -> JobStatus:
    return JobStatus(fresh(job).status)
