from __future__ import annotations

import pytest
from PIL import Image

from fake_comfy import FakeComfy
from jobs.models import Asset, Backend, Blob, Job
from jobs.status import JobStatus
from jobs.tests.helpers import (
    diary,
    fresh,
    make_worker,
    queue_job,
    run_until_done,
    start,
    wait_until,
)
from jobs.worker import Worker

pytestmark = pytest.mark.django_db(transaction=True)


def runs(fake: FakeComfy, job: Job) -> tuple[int, int]:
    """Return how often the job's prompt was submitted and executed."""
    counts = fake.stats()["prompts"].get(str(job.pk), {"submitted": 0, "executed": 0})
    return counts["submitted"], counts["executed"]


def test_a_photo_and_a_prompt_become_a_portrait(fake: FakeComfy) -> None:
    job = queue_job()

    assert make_worker(fake.url).run_once()

    row = fresh(job)
    assert row.status == JobStatus.SUCCEEDED
    picture = row.outputs.get()
    assert (picture.width, picture.height, picture.content_type) == (64, 64, "image/png")
    assert runs(fake, job) == (1, 1)
    assert diary(job) == ["submitted", "claimed", *["step_finished"] * 4, "succeeded"]


def test_the_stored_picture_carries_neither_the_graph_nor_the_prompt(fake: FakeComfy) -> None:
    job = queue_job()

    make_worker(fake.url).run_once()

    with fresh(job).outputs.get().file.open() as file:
        content = file.read()
        assert b"quiet portrait" not in content
        assert Image.open(file).size == (64, 64)


def test_every_picture_of_a_batch_comes(fake: FakeComfy) -> None:
    job = queue_job(count=3)

    make_worker(fake.url).run_once()

    names = list(fresh(job).outputs.values_list("name", flat=True))
    assert names == ["portrait_00001.png", "portrait_00002.png", "portrait_00003.png"]


def test_the_prompt_carries_the_job_in_its_ids_and_its_prefix_and_never_a_number(
    fake: FakeComfy,
) -> None:
    job = queue_job()

    make_worker(fake.url).run_once()

    sent = next(r for r in fake.requests if (r.method, r.path) == ("POST", "/prompt")).json
    assert sent["prompt_id"] == sent["client_id"] == str(job.pk)
    assert "number" not in sent
    assert sent["prompt"]["9"]["inputs"]["filename_prefix"] == f"genflow/{job.pk}"
    assert sent["prompt"]["12"]["inputs"]["image"] == f"genflow/{job.pk}-0.jpeg"


def test_progress_is_shown_while_it_runs(fake: FakeComfy) -> None:
    fake.seconds = 2
    job = queue_job()
    seen: list[float] = []

    def watch() -> bool:
        progress = fresh(job).progress
        seen.append(progress["value"] if progress else 0.0)
        return bool(progress and progress["step"])

    thread = start(make_worker(fake.url).run_once)
    wait_until(watch)
    thread.join()

    assert fresh(job).status == JobStatus.SUCCEEDED
    assert seen == sorted(seen)


# --- the outcome of a submit is unknown: it is looked for before it is sent again ---


def test_a_prompt_whose_answer_got_lost_is_found_and_not_sent_again(fake: FakeComfy) -> None:
    fake.fault("drop_after_accept")
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


def test_a_prompt_whose_answer_hangs_is_found_and_not_sent_again(fake: FakeComfy) -> None:
    fake.fault("hang_prompt", seconds=30)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url, lease=2.5))

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


def test_a_finished_run_of_an_earlier_holder_is_taken_as_it_is(fake: FakeComfy) -> None:
    job = queue_job()
    stopped = make_worker(fake.url)
    stop_after_submit(stopped, fake, job)

    row = run_until_done(job, make_worker(fake.url))

    assert row.status == JobStatus.SUCCEEDED
    assert runs(fake, job) == (1, 1)


def stop_after_submit(worker: Worker, fake: FakeComfy, job: Job) -> None:
    """Let a worker take the job until ComfyUI has it, and stop politely; wait for the run to end."""
    fake.seconds = 0.5
    thread = start(worker.run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))
    worker.stop()
    thread.join()
    wait_until(lambda: fake.stats()["prompts"][str(job.pk)]["finished"] == 1)


def test_a_polite_stop_hands_the_job_back_without_charge(fake: FakeComfy) -> None:
    job = queue_job()

    stop_after_submit(make_worker(fake.url), fake, job)

    row = fresh(job)
    assert (row.status, row.step, row.attempt, row.lost_workers) == ("queued", "wait", 1, 0)
    assert diary(job)[-1] == "handed_back"


# --- ComfyUI restarts ---


def test_a_picture_finished_before_comfyui_restarted_is_taken_and_not_drawn_again(
    fake: FakeComfy,
) -> None:
    job = queue_job(count=2)
    stop_after_submit(make_worker(fake.url), fake, job)
    fake.restart()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.outputs.count(), row.resubmits) == ("succeeded", 2, 0)
    assert runs(fake, job) == (1, 1)


def test_a_prompt_lost_in_a_restart_is_sent_again_under_its_id(fake: FakeComfy) -> None:
    fake.seconds = 1
    job = queue_job()
    thread = start(make_worker(fake.url).run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))

    fake.restart()
    thread.join()

    row = fresh(job)
    assert (row.status, row.outputs.count(), row.attempt) == ("succeeded", 1, 1)
    assert (row.resubmits, row.drawing) == (1, 1)
    assert "resubmitted" in diary(job)


def test_a_prompt_that_gets_lost_every_time_fails_in_words(fake: FakeComfy) -> None:
    fake.fault("forget_queue", times=None)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url, max_resubmits=2))

    assert row.error is not None
    assert (row.status, row.error["code"], row.resubmits) == ("failed", "prompt_lost", 2)


def test_a_comfyui_that_is_down_costs_the_job_nothing(fake: FakeComfy) -> None:
    fake.fault("refuse", times=None)
    job = queue_job()
    worker = make_worker(fake.url)

    worker.run_once()

    row = fresh(job)
    assert (row.status, row.attempt, row.lost_workers) == ("queued", 1, 0)
    assert Backend.objects.get().status == Backend.Status.RESTING
    assert not worker.run_once()

    fake.clear_faults()
    worker.housekeeper.probe_all()
    assert run_until_done(job, worker).status == JobStatus.SUCCEEDED


# --- errors ---


def test_two_server_errors_and_then_success_is_the_third_attempt(fake: FakeComfy) -> None:
    fake.fault("http_500", times=2, path="/upload/image")
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("succeeded", 3)
    assert row.error is None


def test_a_failed_run_is_drawn_again_under_a_new_prefix(fake: FakeComfy) -> None:
    fake.fault("runtime_error")
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt, row.drawing) == ("succeeded", 2, 1)
    assert runs(fake, job)[0] == 2


@pytest.mark.parametrize(
    ("fault", "code"),
    [("oom", "out_of_memory"), ("no_face", "no_face"), ("missing_model", "model_missing")],
)
def test_an_error_that_will_not_go_away_fails_at_once(
    fake: FakeComfy, fault: str, code: str
) -> None:
    fake.fault(fault, times=None)
    job = queue_job()

    make_worker(fake.url).run_once()

    row = fresh(job)
    assert row.error is not None
    assert (row.status, row.error["code"], row.attempt) == ("failed", code, 1)
    assert row.error_detail
    assert "/" not in row.error["message"]


def test_an_error_that_comes_every_time_ends_with_the_last_attempt(fake: FakeComfy) -> None:
    fake.fault("runtime_error", times=None)
    job = queue_job(max_attempts=3)

    row = run_until_done(job, make_worker(fake.url))

    assert row.error is not None
    assert (row.status, row.attempt, row.error["code"]) == ("failed", 3, "unknown")


@pytest.mark.parametrize("fault", ["truncate_view", "corrupt_view", "view_404"])
def test_a_picture_cut_off_in_the_download_is_fetched_again(fake: FakeComfy, fault: str) -> None:
    fake.fault(fault)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert runs(fake, job) == (1, 1)


@pytest.mark.parametrize("fault", ["black_picture", "empty_outputs"])
def test_a_success_without_a_picture_is_drawn_again(fake: FakeComfy, fault: str) -> None:
    fake.fault(fault)
    job = queue_job()

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt, row.outputs.count()) == ("succeeded", 2, 1)
    assert Blob.objects.count() == Asset.objects.count()


def test_a_photo_whose_bytes_are_gone_fails_in_words(fake: FakeComfy) -> None:
    job = queue_job()
    Blob.objects.all().delete()

    make_worker(fake.url).run_once()

    row = fresh(job)
    assert row.error is not None
    assert (row.status, row.error["code"]) == ("failed", "bad_photo")


def test_a_bug_in_a_step_fails_the_attempt_and_not_the_worker(
    fake: FakeComfy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.steps.read_input", lambda asset: 1 / 0)
    job = queue_job(max_attempts=1)

    assert make_worker(fake.url).run_once()

    assert fresh(job).status == JobStatus.FAILED
    assert "ZeroDivisionError" in fresh(job).error_detail


# --- cancel ---


def test_a_cancel_in_mid_run_stops_the_gpu(fake: FakeComfy) -> None:
    fake.seconds = 30
    job = queue_job(steps=150)
    worker = make_worker(fake.url)
    thread = start(worker.run_once)
    wait_until(lambda: runs(fake, job) == (1, 1))

    Job.objects.cancel(job.pk, by="owner")
    worker.renewer.renew_all()
    thread.join()

    assert fresh(job).status == JobStatus.CANCELED
    assert fake.stats()["prompts"][str(job.pk)]["interrupted"] == 1
    assert not fresh(job).outputs.exists()


def test_a_cancel_of_a_prompt_that_waits_on_the_gpu_touches_no_other(fake: FakeComfy) -> None:
    fake.seconds = 5
    running, waiting = queue_job(), queue_job()
    worker = make_worker(fake.url)
    threads = [start(worker.run_once) for _ in range(2)]
    wait_until(lambda: all(runs(fake, job)[0] for job in (running, waiting)))
    first, second = sorted((running, waiting), key=lambda job: -runs(fake, job)[1])

    Job.objects.cancel(second.pk, by="owner")
    worker.renewer.renew_all()
    for thread in threads:
        thread.join()

    assert fresh(second).status == JobStatus.CANCELED
    assert runs(fake, second)[1] == 0
    assert fresh(first).status == JobStatus.SUCCEEDED


def test_a_cancel_whose_worker_died_is_done_by_the_next(fake: FakeComfy) -> None:
    job = queue_job()
    stop_after_submit(make_worker(fake.url), fake, job)

    Job.objects.cancel(job.pk, by="owner")
    make_worker(fake.url).run_once()

    assert fresh(job).status == JobStatus.CANCELED
