"""What one owner may take: bytes, jobs and requests."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from pytest_django import Settings

from jobs.limits import limits_of
from jobs.models import Asset, Job, OwnerLimits, StorageFull
from jobs.portraits import draw_again
from jobs.tests.helpers import explained, fresh, make_user, photo_bytes, queue_job
from jobs.tests.helpers_api import (
    API,
    client_of,
    error_of,
    finish,
    picture_bytes,
    post_portrait,
    token_of,
)
from jobs.tests.helpers_pages import form_values
from jobs.throttling import BUCKETS, Buckets

pytestmark = pytest.mark.django_db
SUBMIT = f"{API}/portraits"


# --- whose limits ---


def test_limits_are_those_of_the_settings(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT_PER_OWNER = 7

    limits = limits_of(make_user())

    assert (limits.queued_jobs, limits.streams) == (7, 20)
    assert (limits.requests_per_minute, limits.storage_bytes) == (600, 10 * 2**30)


def test_an_owners_own_row_goes_before_the_settings_where_it_says_something() -> None:
    ann = make_user()
    OwnerLimits.objects.create(owner=ann, queued_jobs=0, streams=3)

    limits = limits_of(ann)

    assert (limits.queued_jobs, limits.streams, limits.requests_per_minute) == (0, 3, 600)


def test_an_owner_may_be_allowed_more_jobs_than_others(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT_PER_OWNER = 1
    OwnerLimits.objects.create(owner=make_user("ann"), queued_jobs=2)
    ann, bob = client_of(make_user("ann")), client_of(make_user("bob"))

    assert [post_portrait(ann).status_code for _ in range(3)] == [201, 201, 429]
    assert [post_portrait(bob).status_code for _ in range(2)] == [201, 429]


# --- bytes ---


def stored_bytes(owner: User) -> int:
    return sum(asset.size for asset in Asset.objects.filter(owner=owner))


def test_who_has_stored_all_that_is_allowed_is_told_to_delete_something(settings: Settings) -> None:
    ann = client_of()
    first = post_portrait(ann).json()
    settings.GENFLOW_STORAGE_PER_OWNER_BYTES = stored_bytes(make_user())

    refused = post_portrait(ann)
    ann.delete(first["urls"]["self"])
    accepted = post_portrait(ann)

    assert (refused.status_code, error_of(refused)["code"]) == (422, "storage_full")
    assert "Delete" in error_of(refused)["message"]
    assert accepted.status_code == 201
    assert Job.objects.count() == Asset.objects.count() == 1


def test_the_form_tells_it_too(settings: Settings) -> None:
    settings.GENFLOW_STORAGE_PER_OWNER_BYTES = 1
    browser = Client()
    browser.force_login(make_user())

    answer = browser.post("/new/send/", form_values())

    assert answer.status_code == 422
    assert "Delete some jobs" in answer.content.decode()


def test_bytes_that_several_assets_share_count_once() -> None:
    job = queue_job()
    shared = job.inputs.get()
    for _ in range(3):
        Asset.objects.create(owner=job.owner, file=shared.file.name, size=shared.size)

    Asset.objects.check_room(job.owner_id, shared.size)
    with pytest.raises(StorageFull, match=f"this would be {shared.size:,}"):
        Asset.objects.check_room(job.owner_id, shared.size - 1)


def test_what_others_have_stored_does_not_count(settings: Settings) -> None:
    settings.GENFLOW_STORAGE_PER_OWNER_BYTES = len(photo_bytes()) * 10
    queue_job(
        make_user("bob"), photo=photo_bytes() + bytes(settings.GENFLOW_STORAGE_PER_OWNER_BYTES)
    )

    assert post_portrait(client_of()).status_code == 201


def test_pictures_of_a_job_under_way_are_stored_however_full_it_is(settings: Settings) -> None:
    job = queue_job()
    settings.GENFLOW_STORAGE_PER_OWNER_BYTES = 1

    finish(job, picture_bytes())

    assert fresh(job).status == "succeeded"
    with pytest.raises(StorageFull):
        draw_again(fresh(job))


@pytest.mark.django_db(transaction=True)
def test_the_bytes_of_an_owner_are_summed_up_in_an_index() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """INSERT INTO jobs_asset (id, owner_id, node_id, name, hash, size, content_type, file)
            SELECT gen_random_uuid(), CASE n %% 100 WHEN 0 THEN %s ELSE %s END,
                '', '', '', 1000, 'image/png', 'assets/' || n
            FROM generate_series(1, 100000) AS n""",
            [make_user("bob").pk, make_user().pk],
        )
        cursor.execute("VACUUM ANALYZE jobs_asset")  # or it would have to look at the rows

    with explained("jobs_asset") as plans:
        Asset.objects.check_room(make_user("bob").pk, 1_000_000)

    assert "Index Only Scan using asset_owner_size" in plans[0]


# --- requests ---


def test_sixty_submissions_at_once_pass_and_a_look_at_each_of_them() -> None:
    ann = client_of()
    jobs = [post_portrait(ann) for _ in range(60)]

    polls = [ann.get(job["Location"]) for job in jobs]

    assert {answer.status_code for answer in jobs} == {201}
    assert {answer.status_code for answer in polls} == {200}


def test_who_sends_too_fast_is_told_when_to_come_again(settings: Settings) -> None:
    settings.GENFLOW_REQUESTS_PER_MINUTE = 2
    ann, bob = client_of(make_user("ann")), client_of(make_user("bob"))

    statuses = [post_portrait(ann).status_code for _ in range(2)]
    refused = post_portrait(ann)

    assert statuses == [201, 201]
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limited")
    assert 1 <= int(refused["Retry-After"]) <= 30
    assert post_portrait(bob).status_code == 201
    assert ann.get(f"{API}/jobs").status_code == 200  # reads are counted apart


def test_who_polls_too_fast_can_still_submit(settings: Settings) -> None:
    settings.GENFLOW_REQUESTS_PER_MINUTE = 1
    ann = client_of()

    statuses = [ann.get(f"{API}/jobs").status_code for _ in range(11)]

    assert statuses == [200] * 10 + [429]
    assert post_portrait(ann).status_code == 201


def test_all_tokens_and_logins_of_an_owner_count_together(settings: Settings) -> None:
    settings.GENFLOW_REQUESTS_PER_MINUTE = 1
    browser = Client()
    browser.force_login(make_user())
    post_portrait(client_of())

    assert post_portrait(client_of()).status_code == 429
    assert browser.post(SUBMIT, {}).status_code == 429


def test_an_owners_limits_cost_no_query_of_their_own(
    django_assert_num_queries: Any, settings: Settings
) -> None:
    OwnerLimits.objects.create(owner=make_user(), requests_per_minute=5)
    ann = client_of()
    ann.get(f"{API}/jobs")

    with django_assert_num_queries(2):  # the token with all that belongs to it, and the jobs
        ann.get(f"{API}/jobs")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("per_minute", [1, 7, 60, 600, 6000])
def test_a_bucket_holds_a_minutes_worth_and_fills_at_that_rate(per_minute: int) -> None:
    clock = Clock()
    buckets = Buckets(clock)

    waits = [buckets.take("ann", per_minute) for _ in range(per_minute + 1)]
    assert waits == [0] * per_minute + [max(1, -(-60 // per_minute))]
    clock.now += 60 / per_minute
    assert [buckets.take("ann", per_minute) > 0 for _ in range(2)] == [False, True]
    clock.now += 3600
    assert [buckets.take("ann", per_minute) for _ in range(per_minute + 1)] == waits


def test_buckets_do_not_pile_up() -> None:
    buckets = Buckets()
    for n in range(BUCKETS + 1):
        buckets.take(n, 1)

    assert [buckets.wait(n, 1) > 0 for n in (0, 1, BUCKETS)] == [False, True, True]


# --- wrong tokens ---


def asking(token: str, address: str = "192.0.2.1") -> Any:
    return Client().get(
        f"{API}/jobs", headers={"Authorization": f"Bearer {token}"}, REMOTE_ADDR=address
    )


def test_an_address_that_sends_wrong_tokens_is_slowed_down_without_a_look_into_the_database(
    django_assert_num_queries: Any,
) -> None:
    statuses = [asking(f"gf_{n}").status_code for n in range(60)]

    with django_assert_num_queries(0):
        refused = asking("gf_more")

    assert set(statuses) == {401}
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limited")
    assert "wrong tokens" in error_of(refused)["message"]
    assert int(refused["Retry-After"]) >= 1
    assert asking("gf_more", "192.0.2.2").status_code == 401


def test_who_shares_that_address_with_a_token_in_use_goes_on() -> None:
    token = token_of(make_user())
    asking(token)
    for n in range(61):
        asking(f"gf_{n}")

    assert asking(token).status_code == 200
    assert asking(token_of(make_user("bob"))).status_code == 429


def test_a_token_in_use_that_is_revoked_is_as_wrong_as_any_other() -> None:
    token = token_of(make_user())
    asking(token)
    make_user().auth_token_set.all().delete()

    assert [asking(token).status_code for _ in range(61)] == [401] * 60 + [429]
