from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.db import connection
from django.http import HttpResponse
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django import Settings

from jobs.admin import first_id_after
from jobs.limits import limits_of
from jobs.models import ApiToken, Asset, Backend, Blob, Failure, Job, new_id
from jobs.status import JobStatus
from jobs.tests.helpers import claim, diary, fresh, let_lease_expire, make_backend, make_user
from jobs.tests.helpers_pages import (
    failed_job,
    finished_job,
    lose_file,
    make_staff,
    portrait_bytes,
    retrying_job,
    running_job,
    status_of,
    waiting_job,
)

pytestmark = pytest.mark.django_db
JOBS = "/admin/jobs/job/"
LISTS = [JOBS, "/admin/jobs/asset/", "/admin/jobs/backend/", "/admin/jobs/apitoken/"]
LOOK = ("view_job", "view_asset", "view_backend", "view_apitoken")


@pytest.fixture
def ann() -> User:
    return make_user("ann")


@pytest.fixture
def as_operator() -> Client:
    return logged_in(make_staff("olga", *LOOK, "change_job", "delete_job", "change_backend"))


def logged_in(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def page_of(job: Job) -> str:
    return reverse("admin:jobs_job_change", args=[job.pk])


def file_of(asset: Asset) -> str:
    return reverse("admin:jobs_asset_file", args=[asset.pk])


def act(client: Client, action: str, jobs: Sequence[Job]) -> HttpResponse:
    chosen = {"action": action, "_selected_action": [str(job.pk) for job in jobs]}
    return client.post(JOBS, chosen)  # type: ignore[return-value]


def told(answer: HttpResponse) -> list[str]:
    request: Any = answer.wsgi_request  # type: ignore[attr-defined]
    return [str(message) for message in get_messages(request)]


# --- who may do what ---


def test_who_is_not_staff_is_sent_to_the_login(ann: User) -> None:
    job = finished_job(ann)
    urls = [*LISTS, page_of(job), file_of(job.outputs.get())]

    for client in (Client(), logged_in(ann)):
        assert {client.get(url).status_code for url in urls} == {302}


def test_staff_without_permission_sees_nothing(ann: User) -> None:
    job = finished_job(ann)
    client = logged_in(make_staff("sam"))
    urls = [*LISTS, page_of(job), file_of(job.outputs.get())]

    assert {client.get(url).status_code for url in urls} == {403}


def test_staff_that_may_look_can_do_no_more(ann: User) -> None:
    job = waiting_job(ann)
    client = logged_in(make_staff("sam", *LOOK))

    assert {client.get(url).status_code for url in [*LISTS, page_of(job)]} == {200}
    act(client, "cancel", [job])
    act(client, "delete_selected", [job])
    assert client.post(page_of(job), {"status": "failed"}).status_code == 403
    assert client.post(f"{page_of(job)[:-7]}delete/", {"post": "yes"}).status_code == 403
    assert status_of(job) == JobStatus.QUEUED


def test_photos_and_pictures_need_a_permission_of_their_own(ann: User) -> None:
    job = finished_job(ann)
    client = logged_in(make_staff("sam", "view_job"))

    page = client.get(page_of(job)).content.decode()

    assert "Pictures" not in page
    assert file_of(job.outputs.get()) not in page
    assert client.get(file_of(job.outputs.get())).status_code == 403
    assert client.get(file_of(job.inputs.get()) + "?size=small").status_code == 403


def test_nothing_can_be_added_or_edited(ann: User) -> None:
    job = finished_job(ann)
    root = logged_in(User.objects.create_superuser("root"))
    asset_page = reverse("admin:jobs_asset_change", args=[job.outputs.get().pk])

    assert {root.get(f"{url}add/").status_code for url in LISTS} == {403}
    assert root.post(page_of(job), {"status": "failed"}).status_code == 403
    assert root.post(asset_page, {"name": "x"}).status_code == 403
    assert root.get("/admin/jobs/blob/").status_code == 404


# --- the pages ---


def test_a_jobs_page_shows_all_of_it(as_operator: Client, ann: User) -> None:
    job = finished_job(ann)

    page = as_operator.get(page_of(job)).content.decode()

    assert "a quiet portrait" in page
    assert "step_finished" in page
    assert "IPAdapterFaceID" in page
    assert f'src="{file_of(job.outputs.get())}?size=small"' in page
    assert f'src="{file_of(job.inputs.get())}?size=small"' in page


def test_an_operator_reads_the_detail_of_an_error(as_operator: Client, ann: User) -> None:
    page = as_operator.get(page_of(failed_job(ann))).content.decode()

    assert "torch.OutOfMemoryError on 10.0.0.7" in page
    assert "The picture is too large for the graphics card." in page


def test_pictures_are_served_whole_and_small(as_operator: Client, ann: User) -> None:
    url = file_of(finished_job(ann).outputs.get())

    assert as_operator.get(url).getvalue() == portrait_bytes()
    assert as_operator.get(f"{url}?size=small")["Content-Type"] == "image/jpeg"


def test_odd_rows_break_no_page(as_operator: Client, ann: User) -> None:
    huge = failed_job(ann, Failure("unknown", "x" * 2_000_000, detail="<b>" * 700_000))
    hostile = waiting_job(ann)
    bare = running_job(ann)
    Job.objects.filter(pk=hostile.pk).update(params={"prompt": "<img src=x onerror=alert(1)>"})
    Job.objects.filter(pk=bare.pk).update(params=[], error="text", progress=[1], metadata={})
    Backend.objects.update(reason="y" * 2000)

    pages = [
        as_operator.get(url).content.decode()
        for url in (*LISTS, *(page_of(job) for job in (huge, hostile, bare)))
    ]

    assert max(map(len, pages)) < 150_000
    assert not any("<img src=x" in page or "<b><b>" in page for page in pages)
    assert "&lt;img src=x" in pages[0]
    assert "characters more" in pages[4]


def test_a_file_that_is_gone_is_shown_as_gone(as_operator: Client, ann: User) -> None:
    job = finished_job(ann)
    lose_file(job.outputs.get())
    lose_file(job.inputs.get())

    assert as_operator.get(page_of(job)).content.decode().count("The file is gone") == 2
    assert as_operator.get(file_of(job.outputs.get())).status_code == 404
    assert as_operator.get(file_of(job.outputs.get()) + "?size=small").status_code == 404


def test_a_file_that_is_no_picture_is_a_link(as_operator: Client, ann: User) -> None:
    job = finished_job(ann, content=b"<script>", content_type="text/html")

    page = as_operator.get(page_of(job)).content.decode()

    assert f'<a href="{file_of(job.outputs.get())}">portrait_0.png</a>' in page
    assert as_operator.get(file_of(job.outputs.get()))["Content-Security-Policy"] == "sandbox"


def test_a_deleted_job_is_marked_until_it_is_gone(as_operator: Client, ann: User) -> None:
    job = running_job(ann)
    Job.objects.delete_for_owner(job.pk)

    assert "canceling, deleted" in as_operator.get(JOBS).content.decode()


def test_the_list_does_not_load_or_count_everything(as_operator: Client, ann: User) -> None:
    for _ in range(3):
        failed_job(ann)

    with CaptureQueriesContext(
        connection,
    ) as queries:
        as_operator.get(JOBS)

    of_jobs = [query["sql"] for query in queries if 'FROM "jobs_job"' in query["sql"]]
    assert len(of_jobs) == 2
    assert "LIMIT 5000" in of_jobs[0]
    assert "error_detail" not in of_jobs[1]
    assert '"graph"' not in of_jobs[1]


# --- search and filters ---


def found(client: Client, **query: str) -> set[Any]:
    return {job.pk for job in client.get(JOBS, query).context["cl"].result_list}


def test_jobs_are_found_by_id_owner_and_worker(as_operator: Client, ann: User) -> None:
    mine, other = waiting_job(ann), running_job(make_user("bob"))

    assert found(as_operator, q=str(mine.pk)) == {mine.pk}
    assert found(as_operator, q=f" {mine.pk.hex} ") == {mine.pk}
    assert found(as_operator, q="BOB") == {other.pk}
    assert found(as_operator, q=other.worker_id) == {other.pk}
    assert found(as_operator, q=str(new_id())) == set()


def test_a_search_by_id_uses_the_primary_key(as_operator: Client, ann: User) -> None:
    job = waiting_job(ann)

    with CaptureQueriesContext(connection) as queries:
        as_operator.get(JOBS, {"q": str(job.pk)})

    assert not any("LIKE" in query["sql"] for query in queries)


def test_jobs_are_filtered_by_what_an_operator_asks(as_operator: Client, ann: User) -> None:
    waiting, failed, running = waiting_job(ann), failed_job(ann), running_job(ann)
    backend = make_backend()

    assert found(as_operator, status__exact="failed") == {failed.pk}
    assert found(as_operator, step__exact="wait") == {running.pk}
    assert found(as_operator, backend__id__exact=str(backend.pk)) == {failed.pk, running.pk}
    assert found(as_operator, created="1") == {waiting.pk, failed.pk, running.pk}
    assert found(as_operator, created="nonsense") == {waiting.pk, failed.pk, running.pk}


@pytest.mark.parametrize(
    "query", ["created_at__year=99999", "worker_id__regex=(", "owner__password__startswith=a"]
)
def test_no_other_filters_are_taken_from_the_address(as_operator: Client, query: str) -> None:
    assert as_operator.get(f"{JOBS}?{query}").status_code == 400


def test_the_filter_by_age_goes_by_the_id(ann: User) -> None:
    job = waiting_job(ann)

    assert first_id_after(timedelta(minutes=1)) < job.pk < first_id_after(timedelta(minutes=-1))


# --- actions ---


def test_cancel_ends_what_can_be_ended_and_counts(as_operator: Client, ann: User) -> None:
    waiting, running, finished = waiting_job(ann), running_job(ann), finished_job(ann)

    answer = act(as_operator, "cancel", [waiting, running, finished])

    assert [status_of(job) for job in (waiting, running, finished)] == [
        JobStatus.CANCELED,
        JobStatus.CANCELING,
        JobStatus.SUCCEEDED,
    ]
    assert told(answer) == [
        "2 jobs canceled, or about to be.",
        "1 job left alone: already ended or canceling.",
    ]
    assert waiting.events.get(kind="cancel_asked").facts == {"by": "operator olga"}


def test_an_action_on_what_is_no_id_is_a_bad_request(as_operator: Client) -> None:
    answer = as_operator.post(JOBS, {"action": "cancel", "_selected_action": "nonsense"})

    assert answer.status_code == 400


def test_retry_hurries_the_waiting_redraws_the_ended_and_leaves_the_rest(
    as_operator: Client, ann: User
) -> None:
    retrying, failed, running, waiting = (
        retrying_job(ann),
        failed_job(ann),
        running_job(ann),
        waiting_job(ann),
    )

    answer = act(as_operator, "retry", [retrying, failed, running, waiting])

    again = Job.objects.latest("pk")
    assert fresh(retrying).run_after < retrying.run_after
    assert status_of(failed) == JobStatus.FAILED
    assert again.params["seed"] == failed.params["seed"]
    assert again.status == JobStatus.QUEUED
    assert status_of(running) == JobStatus.RUNNING
    assert diary(waiting) == ["submitted"]
    assert told(answer) == [
        "1 job waited for a retry and may run now.",
        "1 job ended and queued anew.",
        "2 jobs left alone.",
    ]
    logged = set(LogEntry.objects.values_list("object_id", flat=True))
    assert logged == {str(retrying.pk), str(failed.pk)}


def test_retry_says_when_there_is_no_room(
    as_operator: Client, ann: User, settings: Settings
) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 0
    job = failed_job(ann)

    answer = act(as_operator, "retry", [job])

    assert "The queue is full" in told(answer)[0]
    assert Job.objects.count() == 1


def test_retry_brings_no_deleted_job_back(as_operator: Client, ann: User) -> None:
    job = running_job(ann)
    Job.objects.delete_for_owner(job.pk)

    assert told(act(as_operator, "retry", [job])) == ["1 job left alone."]


def test_an_action_stops_at_its_limit_and_says_so(
    as_operator: Client, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.admin.ACTION_LIMIT", 1)
    jobs = [waiting_job(ann) for _ in range(2)]

    answer = act(as_operator, "cancel", jobs)

    assert {status_of(job) for job in jobs} == {JobStatus.CANCELED, JobStatus.QUEUED}
    assert "Only the first 1 were looked at" in told(answer)[1]


def test_delete_lets_a_running_job_end_first(as_operator: Client, ann: User) -> None:
    running, finished = running_job(ann), finished_job(ann)
    chosen = {"action": "delete_selected", "post": "yes"}

    asked = act(as_operator, "delete_selected", [running, finished])
    as_operator.post(JOBS, chosen | {"_selected_action": [str(running.pk), str(finished.pk)]})

    assert "Are you sure" in asked.content.decode()
    assert not Job.objects.filter(pk=finished.pk).exists()
    assert status_of(running) == JobStatus.CANCELING
    assert fresh(running).deleted_at is not None


def test_no_more_are_deleted_than_it_says(
    as_operator: Client, ann: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.admin.ACTION_LIMIT", 2)
    ids = [str(waiting_job(ann).pk) for _ in range(3)]
    chosen = {"action": "delete_selected", "_selected_action": ids}

    asked = as_operator.post(JOBS, chosen)
    answer: Any = as_operator.post(JOBS, chosen | {"post": "yes"})

    assert asked.content.decode().count('name="_selected_action"') == 2
    assert told(answer)[-1] == "Successfully deleted 2 jobs."
    assert Job.objects.count() == 1


def test_one_job_can_be_deleted_from_its_page(as_operator: Client, ann: User) -> None:
    job = finished_job(ann)
    url = reverse("admin:jobs_job_delete", args=[job.pk])

    assert as_operator.get(url).status_code == 200
    as_operator.post(url, {"post": "yes"})

    assert not Job.objects.exists()
    assert not Asset.objects.exists()


def test_a_user_can_be_deleted_with_all_jobs(ann: User) -> None:
    finished_job(ann)
    waiting_job(ann)
    boss = User.objects.create_superuser("boss")

    logged_in(boss).post(f"/admin/auth/user/{ann.pk}/delete/", {"post": "yes"})

    assert list(User.objects.all()) == [boss]
    assert not Asset.objects.exists()
    assert not Blob.objects.exists()


# --- backends and tokens ---


def test_backends_show_what_is_on_them_and_not_their_address(
    as_operator: Client, ann: User
) -> None:
    make_backend("http://user:secret@10.0.0.8:8188")
    for _ in range(2):
        running_job(ann)
    finished_job(ann)

    answer = as_operator.get("/admin/jobs/backend/")

    assert [backend.prompts for backend in answer.context["cl"].result_list] == [2]
    assert "secret" not in answer.content.decode()


def test_an_operator_changes_a_backend_and_nothing_of_the_workers(as_operator: Client) -> None:
    backend = make_backend()
    url = reverse("admin:jobs_backend_change", args=[backend.pk])
    as_operator.get(url)
    backend.seen("0.26.0")

    as_operator.post(
        url, {"name": "big", "status": "disabled", "prompt_limit": "4", "version": "x"}
    )

    backend.refresh_from_db()
    assert (backend.name, backend.status, backend.prompt_limit) == ("big", "disabled", 4)
    assert backend.version == "0.26.0"
    assert backend.last_seen_at is not None


def test_an_operator_cannot_send_a_backend_to_rest(as_operator: Client) -> None:
    backend = make_backend()
    url = reverse("admin:jobs_backend_change", args=[backend.pk])

    answer = as_operator.post(url, {"name": "big", "status": "resting", "prompt_limit": ""})

    assert "not one of the available choices" in answer.content.decode()


def test_a_resting_backend_may_be_renamed_or_put_up(as_operator: Client) -> None:
    backend = make_backend()
    backend.rest("connection refused", timedelta(minutes=1))
    url = reverse("admin:jobs_backend_change", args=[backend.pk])

    as_operator.post(url, {"name": "big", "status": "resting", "prompt_limit": ""})
    backend.refresh_from_db()
    assert (backend.name, backend.reason) == ("big", "connection refused")

    as_operator.post(url, {"name": "big", "status": "up", "prompt_limit": ""})
    backend.refresh_from_db()
    assert (backend.status, backend.reason, backend.failures) == ("up", "", 0)


def test_tokens_are_listed_and_deleted_but_never_shown(ann: User) -> None:
    token, secret = ApiToken.objects.create(user=ann, name="laptop")
    root = logged_in(User.objects.create_superuser("root"))

    page = root.get("/admin/jobs/apitoken/").content.decode()
    root.post(reverse("admin:jobs_apitoken_delete", args=[token.pk]), {"post": "yes"})

    assert "laptop" in page
    assert "manage.py api_token" in page
    assert secret[:12] not in page
    assert not ApiToken.objects.exists()


# --- the front page ---


def front_page(client: Client) -> str:
    return client.get("/admin/").content.decode()


def test_the_front_page_tells_how_things_stand(as_operator: Client, ann: User) -> None:
    waiting_job(ann)
    retrying_job(ann)
    held = running_job(ann)
    failed_job(ann)
    finished_job(ann)

    page = front_page(as_operator)

    assert "<dt>waiting</dt><dd>1</dd>" in page
    assert "<dt>waiting for a retry</dt><dd>1</dd>" in page
    assert "<dt>with a worker</dt><dd>1</dd>" in page
    assert held.worker_id in page
    assert "out_of_memory" in page
    assert make_backend().name in page


def test_the_front_page_shows_who_has_fallen_silent(as_operator: Client, ann: User) -> None:
    let_lease_expire(running_job(ann))

    assert "silent" in front_page(as_operator)


def test_the_front_page_shows_no_more_than_one_may_see(ann: User) -> None:
    running_job(ann)

    assert "gf-console" not in front_page(logged_in(make_staff("sam")))
    page = front_page(logged_in(make_staff("tom", "view_job")))
    assert "gf-queue" in page
    assert "gf-backends" not in page


def test_the_front_page_takes_the_same_few_queries_however_much_there_is(
    as_operator: Client, ann: User
) -> None:
    front_page(as_operator)
    with CaptureQueriesContext(connection) as few:
        front_page(as_operator)
    for _ in range(5):
        failed_job(ann)
        running_job(ann)
    with CaptureQueriesContext(connection) as many:
        front_page(as_operator)

    assert len(many) == len(few) < 20


# --- what an operator does, and its trace ---


def test_a_waiting_job_is_sent_back_to_the_upload(as_operator: Client, ann: User) -> None:
    job = running_job(ann)
    Job.objects.hand_back(job, "worker_stopped")

    act(as_operator, "rewind_to_upload", [job])

    job = fresh(job)
    assert (job.step, job.backend, job.drawing, job.spoiled_drawings) == ("upload", None, 1, 1)
    assert not job.checkpoints.exists()
    assert diary(job)[-1] == "operator"


def test_a_waiting_job_goes_back_one_step_and_keeps_its_backend(
    as_operator: Client, ann: User
) -> None:
    job = running_job(ann)
    Job.objects.hand_back(job, "worker_stopped")

    act(as_operator, "rewind_to_submit", [job])

    job = fresh(job)
    assert (job.step, job.backend_id is None, job.drawing) == ("submit", False, 0)
    assert [line.step for line in job.checkpoints.all()] == ["upload"]


def test_a_job_is_not_sent_forward_nor_out_of_a_workers_hands(
    as_operator: Client, ann: User
) -> None:
    held, waiting = running_job(ann), waiting_job(ann)

    act(as_operator, "rewind_to_wait", [held, waiting])

    assert (fresh(held).step, fresh(waiting).step) == ("wait", "upload")


def test_a_raised_job_is_next(as_operator: Client, ann: User) -> None:
    first, second = waiting_job(ann), waiting_job(ann)

    act(as_operator, "raise_priority", [second])

    held = claim()
    assert held is not None
    assert held.pk == second.pk != first.pk


def test_the_priority_has_a_top(as_operator: Client, ann: User) -> None:
    job = waiting_job(ann, priority=95)

    for _ in range(2):
        act(as_operator, "raise_priority", [job])

    assert fresh(job).priority == 100


@pytest.mark.parametrize(
    ("action", "status"), [("drain", "disabled"), ("rest", "resting"), ("use_again", "up")]
)
def test_an_operator_says_whether_a_backend_is_used(
    as_operator: Client, action: str, status: str
) -> None:
    backend = make_backend()
    chosen = {"action": action, "_selected_action": [str(backend.pk)]}

    as_operator.post("/admin/jobs/backend/", chosen)

    backend.refresh_from_db()
    assert backend.status == status
    assert LogEntry.objects.get().object_id == str(backend.pk)


def test_a_backend_that_rests_already_is_not_logged_as_if_it_were_new(as_operator: Client) -> None:
    backend = make_backend()
    backend.rest("refused")

    as_operator.post(
        "/admin/jobs/backend/", {"action": "rest", "_selected_action": [str(backend.pk)]}
    )

    backend.refresh_from_db()
    assert backend.reason == "refused"
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("action", ["cancel", "retry", "rewind_to_upload", "raise_priority"])
def test_each_action_is_in_the_log_and_needs_the_permission(
    as_operator: Client, ann: User, action: str
) -> None:
    job = retrying_job(ann)

    act(logged_in(make_staff("sam", *LOOK)), action, [job])
    assert not LogEntry.objects.exists()
    act(as_operator, action, [job])

    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_id) == ("olga", str(job.pk))


def revoke(client: Client, token: ApiToken) -> HttpResponse:
    chosen = {"action": "delete_selected", "_selected_action": [token.pk], "post": "yes"}
    return client.post("/admin/jobs/apitoken/", chosen)  # type: ignore[return-value]


def test_a_token_is_revoked_by_who_may_and_the_history_tells_who_did(ann: User) -> None:
    token = ApiToken.objects.create(user=ann, name="laptop")[0]
    olga = make_staff("olga", "view_apitoken", "delete_apitoken")

    page = logged_in(olga).get("/admin/jobs/apitoken/").content.decode()
    revoke(logged_in(make_staff("otto", "view_apitoken")), token)
    assert ApiToken.objects.exists()
    revoke(logged_in(olga), token)

    assert "Revoke" in page
    assert not ApiToken.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_repr, entry.is_deletion()) == (olga, "laptop of ann", True)


def test_an_owners_limits_are_set_on_the_users_page(ann: User) -> None:
    page = f"/admin/auth/user/{ann.pk}/change/"
    boss = logged_in(User.objects.create_superuser("boss"))
    form = boss.get(page).context["adminform"].form.initial
    values = {name: form[name] for name in ("username", "is_active")} | {
        "date_joined_0": "2026-01-01",
        "date_joined_1": "00:00:00",
        "limits-TOTAL_FORMS": 1,
        "limits-INITIAL_FORMS": 0,
        "limits-0-owner": ann.pk,
        "limits-0-queued_jobs": 7,
    }

    answer = boss.post(page, values)

    assert answer.status_code == 302
    assert limits_of(User.objects.get(pk=ann.pk)).queued_jobs == 7
    assert "limits" in boss.get(page).content.decode()
    assert boss.get("/admin/auth/user/add/").status_code == 200
