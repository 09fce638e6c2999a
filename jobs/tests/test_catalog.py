"""What workers learn of their backends, and what it is used for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.urls import reverse

from fake_comfy import FakeComfy
from jobs.catalog import loras_on_offer, offers_of
from jobs.models import Backend, Job, NodeClass
from jobs.tests.go_between import GoBetween, Reply, html_reply, json_reply
from jobs.tests.helpers import make_backend, make_user, make_worker, photo_bytes, run_until_done
from jobs.tests.helpers_api import client_of, error_of, photo_file, post_portrait
from jobs.tests.test_workflow_runs import node, picture, submit
from jobs.worker import Worker
from jobs.workflows import BadWorkflow

pytestmark = pytest.mark.django_db

LORAS = [
    "add_detail.safetensors",
    "ip-adapter-faceid-plusv2_sd15_lora.safetensors",
    "ip-adapter-faceid_sd15_lora.safetensors",
]


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as proxy:
        yield proxy


def meet(url: str) -> Worker:
    """A worker that has read what its backend has, if it was time to."""
    worker = make_worker(url)
    worker.housekeeper.read_catalogs()
    return worker


def look(worker: Worker) -> None:
    """Do what a housekeeper does every few seconds."""
    worker.housekeeper.probe_all()
    worker.housekeeper.read_catalogs()


def readings(between: GoBetween) -> int:
    return len(between.requests("GET /object_info"))


def without_lora_loader(reply: Reply) -> Reply:
    return json_reply({name: told for name, told in reply.json.items() if name != "LoraLoader"})


# --- the reading ---


def test_a_worker_reads_what_its_backends_have(fake: FakeComfy) -> None:
    meet(fake.url)

    saver = NodeClass.objects.get(name="SaveImage")
    assert saver.is_output
    assert saver.inputs["images"] == {"required": True}
    assert NodeClass.objects.get(name="LoadImage").inputs["image"]["takes_file"]
    assert loras_on_offer() == LORAS


def test_it_is_read_once_in_a_while_by_whichever_worker(between: GoBetween) -> None:
    meet(between.url)
    meet(between.url)
    assert readings(between) == 1

    Backend.objects.update(catalog_read_at=Now() - timedelta(minutes=6))
    meet(between.url)

    assert readings(between) == 2


def test_it_is_read_anew_when_the_version_changes(between: GoBetween) -> None:
    worker = meet(between.url)
    Backend.objects.update(version="0.25.0")

    look(worker)

    assert readings(between) == 2


def test_it_is_read_anew_when_the_backend_comes_up(fake: FakeComfy, between: GoBetween) -> None:
    worker = meet(between.url)
    between.instead("GET /system_stats", html_reply(502))
    look(worker)

    look(worker)

    assert readings(between) == 2


def test_rows_change_only_if_the_backend_did(between: GoBetween) -> None:
    worker = meet(between.url)
    before = set(NodeClass.objects.values_list("pk", flat=True))

    read_again(worker)
    assert set(NodeClass.objects.values_list("pk", flat=True)) == before

    between.spoil("GET /object_info", without_lora_loader)
    read_again(worker)
    assert not NodeClass.objects.filter(name="LoraLoader").exists()


def read_again(worker: Worker) -> None:
    Backend.objects.update(catalog_read_at=None)
    look(worker)


@pytest.mark.parametrize(
    "answer", [Reply(403), html_reply(502), Reply(200, b"{"), json_reply([]), b""]
)
def test_a_backend_that_does_not_tell_works_all_the_same(
    between: GoBetween, answer: Reply | bytes
) -> None:
    between.instead("GET /object_info", answer, None)

    meet(between.url)

    assert Backend.objects.get().status == "up"
    assert list(offers_of(["SaveImage"]).by_backend.values()) == [None]
    submit({"1": node("Rare")})  # for all that is known


def test_odd_answers_are_kept_as_far_as_they_make_sense(between: GoBetween) -> None:
    odd = {
        "Good": {"input": {"required": {"x": [["a\udc80", "b"]]}}},
        "Bad": 3,
        "\ud800": {},
        "NaN": {"input": {"required": {"x": ["FLOAT", {"max": float("nan")}]}}},
    }
    between.instead("GET /object_info", json_reply(odd), None)

    meet(between.url)

    assert NodeClass.objects.get(name="Good").inputs == {"x": {"required": True, "choices": ["b"]}}
    assert set(NodeClass.objects.values_list("name", flat=True)) == {"Good", "NaN"}


# --- what a portrait may ask for ---


def test_an_unknown_lora_is_refused_with_those_there_are(fake: FakeComfy) -> None:
    meet(fake.url)

    answer = post_portrait(client_of(), lora="no_such.safetensors")

    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (422, "invalid_request")
    assert error["details"] == {
        "lora": [f"There is no LoRA 'no_such.safetensors'. On offer: {', '.join(LORAS)}."]
    }
    assert not Job.objects.exists()
    assert not make_user().assets.exists()


def test_a_known_lora_is_taken(fake: FakeComfy) -> None:
    meet(fake.url)

    assert post_portrait(client_of(), lora=LORAS[0]).status_code == 201


def test_the_form_says_which_loras_there_are(fake: FakeComfy) -> None:
    meet(fake.url)
    browser = client_of()
    browser.force_login(make_user())

    page = browser.post(
        reverse("job-new"),
        {"photo": photo_file(photo_bytes()), "prompt": "a lake", "lora": "no_such"},
    )

    assert page.status_code == 422
    assert "There is no LoRA" in page.content.decode()
    assert LORAS[0] in page.content.decode()


@pytest.mark.parametrize(
    ("fault", "code", "word"),
    [
        ("missing_model", "model_missing", "ckpt_name"),
        ("missing_node", "node_missing", "IPAdapter"),
    ],
)
def test_what_every_portrait_needs_is_an_operators_matter(
    fake: FakeComfy, fault: str, code: str, word: str
) -> None:
    fake.fault(fault, times=None)
    meet(fake.url)

    answer = post_portrait(client_of())

    assert (answer.status_code, error_of(answer)["code"]) == (422, code)
    assert word in error_of(answer)["message"]
    assert "tell an operator" in error_of(answer)["message"]


def test_a_portrait_is_drawn_by_the_backend_that_has_its_lora(
    fake: FakeComfy, between: GoBetween
) -> None:
    between.spoil("GET /object_info", without_lora_loader)
    poor, rich = meet(between.url), meet(fake.url)
    look(poor)  # it knows of the other one

    job = Job.objects.get(pk=post_portrait(client_of(), lora=LORAS[0]).json()["id"])

    assert job.refused_by == [make_backend(between.url).pk]
    assert not poor.run_once()
    assert run_until_done(job, rich).status == "succeeded"


# --- and a workflow ---


def test_the_classes_of_a_real_answer_check_a_workflow(fake: FakeComfy) -> None:
    meet(fake.url)
    sampler = node("KSampler", sampler_name="no such")

    with pytest.raises(BadWorkflow) as refused:
        submit({"1": picture(), "2": node("SaveImage", images=["3", 0]), "3": sampler})

    reasons = {(e["field"], e["reason"]) for e in refused.value.node_errors["3"]}
    assert ("sampler_name", "value_not_in_list") in reasons
    assert ("model", "missing_input") in reasons
    assert {e["field"] for e in refused.value.node_errors["2"]} == {"filename_prefix"}


def test_what_the_backend_says_takes_files_takes_no_other_strings(fake: FakeComfy) -> None:
    meet(fake.url)

    with pytest.raises(BadWorkflow) as refused:
        submit(
            {"1": node("LoadAudio", audio="/etc/passwd"), "2": node("PreviewAny", source=["1", 0])}
        )

    assert refused.value.code == "missing_asset"
