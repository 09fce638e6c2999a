"""Workflows from their submission to their outputs, on a ComfyUI."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from django.contrib.auth.models import User
from PIL import Image

from fake_comfy import FakeComfy
from jobs.models import Asset, Job
from jobs.steps import ending
from jobs.tests.go_between import GoBetween, Reply, json_reply
from jobs.tests.helpers import (
    diary,
    fresh,
    let_lease_expire,
    make_user,
    make_worker,
    photo_bytes,
    run_until_done,
    wait_until,
)
from jobs.tests.helpers_api import API, client_of
from jobs.tests.test_assets import uploaded
from jobs.tests.test_worker import runs
from jobs.wire import caller_prefixes, on_the_wire, shown_name
from jobs.workflows import submit_workflow

pytestmark = pytest.mark.django_db

Graph = dict[str, Any]


@pytest.fixture
def between(fake: FakeComfy) -> Iterator[GoBetween]:
    with GoBetween(fake.url) as proxy:
        yield proxy


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def picture(colour: int = 0x204060, count: int = 1) -> dict[str, Any]:
    return node("EmptyImage", width=64, height=32, batch_size=count, color=colour)


def save(source: str, prefix: Any = "ComfyUI") -> dict[str, Any]:
    return node("SaveImage", images=[source, 0], filename_prefix=prefix)


def preview(source: str) -> dict[str, Any]:
    return node("PreviewImage", images=[source, 0])


def sampled(*, seed: int, steps: int) -> Graph:
    """A picture that a sampler makes, as node 8."""
    return {
        "4": node("CheckpointLoaderSimple", ckpt_name="v1-5-pruned-emaonly.safetensors"),
        "6": node("CLIPTextEncode", clip=["4", 1], text="a lake"),
        "5": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "3": node(
            "KSampler",
            model=["4", 0],
            seed=seed,
            steps=steps,
            cfg=7.0,
            sampler_name="euler",
            scheduler="normal",
            positive=["6", 0],
            negative=["6", 0],
            latent_image=["5", 0],
            denoise=1.0,
        ),
        "8": node("VAEDecode", samples=["3", 0], vae=["4", 2]),
    }


def with_a_photo() -> Graph:
    """A picture that a sampler makes, and one that is the caller's own: node 12 is to name it."""
    photo = {"12": node("LoadImage", image="nobodys.png"), "13": save("12")}
    return sampled(seed=7, steps=20) | photo | {"9": save("8")}


def submit(graph: Graph, owner: User | None = None, **options: Any) -> Job:
    return submit_workflow(owner or make_user(), graph, **options)


def run(fake: FakeComfy, graph: Graph, owner: User | None = None) -> Job:
    """Let a worker do it all, and return the job, which succeeded."""
    job = run_until_done(submit(graph, owner), make_worker(fake.url))
    assert job.status == "succeeded", job.error_detail
    return job


def told(job: Job) -> list[tuple[str, str, str]]:
    """Return what the API tells of the outputs: node, name and type."""
    outputs = client_of(job.owner).get(f"{API}/jobs/{job.pk}").json()["outputs"]
    return [(output["node_id"], output["name"], output["type"]) for output in outputs]


def content(asset: Asset) -> bytes:
    with asset.file.open() as file:
        read: bytes = file.read()
        return read


def upload(content: bytes, owner: User | None = None, name: str = "image.png") -> Asset:
    return uploaded(content, owner, name=name)


def sent_graph(fake: FakeComfy, job: Job) -> Graph:
    history = requests.get(f"{fake.url}/history/{job.pk}", timeout=10).json()
    graph: Graph = history[str(job.pk)]["prompt"][2]
    return graph


# --- outputs ---


def test_all_outputs_of_all_output_nodes_are_taken(fake: FakeComfy) -> None:
    graph = {
        "1": picture(count=2),
        "2": node("EmptyAudio", duration=1.5, sample_rate=44100, channels=2),
        "3": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "4": node("PrimitiveString", value="two pictures, as asked"),
        "40": save("1", "shots/ComfyUI"),
        "9": preview("1"),
        "31": node("SaveAudio", audio=["2", 0], filename_prefix="audio/take"),
        "5": node("SaveLatent", samples=["3", 0], filename_prefix="latents/x"),
        "7": node("PreviewAny", source=["4", 0]),
    }

    job = run(fake, graph)

    by_node: dict[str, list[tuple[str, str]]] = {}
    for node_id, name, kind in told(job):
        by_node.setdefault(node_id, []).append((name, kind))
    previews = by_node.pop("9")
    assert by_node == {
        "40": [("ComfyUI_00001_.png", "image"), ("ComfyUI_00002_.png", "image")],
        "31": [("take_00001_.flac", "audio")],
        "5": [("x_00001_.latent", "latent")],
        "7": [(name, "text") for name, _ in by_node["7"]],
    }
    assert [kind for _, kind in previews] == ["image", "image"]
    assert content(job.outputs.get(node_id="7")) == b"two pictures, as asked"
    assert content(job.outputs.get(node_id="31")).startswith(b"fLaC")


def test_a_picture_is_measured_and_its_graph_taken_out(fake: FakeComfy) -> None:
    job = run(fake, {"1": picture(), "2": save("1")})

    output = job.outputs.get()
    assert (output.content_type, output.width, output.height) == ("image/png", 64, 32)
    stored = Image.open(io.BytesIO(content(output)))
    assert stored.size == (64, 32)
    assert not stored.info


def test_nodes_of_one_prefix_count_together_and_others_apart(fake: FakeComfy) -> None:
    graph = {
        "1": picture(1),
        "2": picture(2),
        "3": save("1", "a"),
        "4": save("2", "a"),
        "5": save("2", "b"),
    }

    job = run(fake, graph)

    assert {(n, name) for n, name, _ in told(job)} in (
        {("3", "a_00001_.png"), ("4", "a_00002_.png"), ("5", "b_00001_.png")},
        {("3", "a_00002_.png"), ("4", "a_00001_.png"), ("5", "b_00001_.png")},
    )


def test_equal_nodes_have_an_output_each(fake: FakeComfy) -> None:
    job = run(fake, {"1": picture(), "2": save("1"), "3": save("1")})

    assert sorted(n for n, _, _ in told(job)) == ["2", "3"]


def test_another_jobs_pictures_in_the_cache_are_no_others_outputs(fake: FakeComfy) -> None:
    graph = {"1": picture(), "2": save("1")}
    first = run(fake, graph)

    second = run(fake, graph, make_user("bob"))

    assert content(first.outputs.get()) == content(second.outputs.get())
    assert fake.prompts[str(second.pk)]["submitted"] == 1
    assert sent_graph(fake, first) != sent_graph(fake, second)


def test_a_run_that_came_wholly_from_the_cache_has_its_outputs(fake: FakeComfy) -> None:
    graph = {"1": picture(), "2": preview("1")}
    run(fake, graph)

    again = run(fake, graph)

    assert len(told(again)) == 1
    assert again.attempt == 1


def test_a_cached_file_that_is_gone_is_made_anew(fake: FakeComfy, between: GoBetween) -> None:
    graph = {"1": picture(), "2": preview("1")}
    run(fake, graph)
    between.instead("GET /view", Reply(404), 3)
    job = submit(graph)

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt) == ("succeeded", 2)
    assert len(between.requests("POST /free")) == 1


def test_a_workflow_that_leaves_nothing_is_done(fake: FakeComfy, between: GoBetween) -> None:
    between.spoil("GET /history", without_outputs, None)
    job = submit({"1": picture(), "2": save("1")})

    row = run_until_done(job, make_worker(between.url))

    assert (row.status, row.attempt, told(row)) == ("succeeded", 1, [])


def test_outputs_that_a_cached_run_does_not_tell_are_made_anew(
    fake: FakeComfy, between: GoBetween
) -> None:
    graph = {"1": picture(), "2": preview("1")}
    run(fake, graph)
    job = submit(graph)
    worker = make_worker(between.url)
    between.spoil("GET /history", without_outputs, 2)

    row = run_until_done(job, worker)

    assert (row.status, row.attempt, len(told(row))) == ("succeeded", 2, 1)


def without_outputs(reply: Reply) -> Reply:
    history = reply.json
    for entry in history.values():
        entry["outputs"] = {}
    return json_reply(history)


def test_a_file_that_the_workflow_was_given_is_no_output(
    fake: FakeComfy, between: GoBetween
) -> None:
    def with_an_input(reply: Reply) -> Reply:
        history = reply.json
        for entry in history.values():
            entry["outputs"]["1"] = {"images": [{"filename": "somebodys.png", "type": "input"}]}
        return json_reply(history)

    between.spoil("GET /history", with_an_input, None)
    job = submit({"1": picture(), "2": save("1")})

    row = run_until_done(job, make_worker(between.url))

    assert told(row) == [("2", "ComfyUI_00001_.png", "image")]


def test_an_output_that_comfyui_leaves_out_fails_the_job(fake: FakeComfy) -> None:
    fake.seconds = 30
    kept = sampled(seed=1, steps=20) | {"9": save("8")}
    wrong = {"1": picture() | {"inputs": {"width": 0}}, "2": save("1")}
    job = submit(kept | wrong)

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("failed", 1)
    assert row.error is not None
    assert (row.error["code"], row.error["node_id"]) == ("graph_refused", "1")
    wait_until(lambda: ended_by_us(fake.prompts[str(job.pk)]) == 1)
    assert fake.prompts[str(job.pk)]["submitted"] == 1


def ended_by_us(counts: dict[str, int]) -> int:
    return counts["deleted"] + counts["interrupted"]


def test_a_file_larger_than_may_be_is_no_reason_to_try_again(fake: FakeComfy) -> None:
    graph = {
        "1": node("EmptyLatentImage", width=1024, height=1024, batch_size=1),
        "2": node("SaveLatent", samples=["1", 0], filename_prefix="x"),
    }
    job = submit(graph)

    row = run_until_done(job, make_worker(fake.url, output_max_bytes=1_000))

    assert (row.status, row.attempt) == ("failed", 1)
    assert row.error is not None
    assert row.error["code"] == "output_too_large"
    assert not Asset.objects.exists()


def test_a_file_cut_on_the_way_is_fetched_again(fake: FakeComfy) -> None:
    fake.fault("truncate_view")
    graph = {
        "1": node("EmptyAudio", duration=1, sample_rate=8000, channels=1),
        "2": node("SaveAudio", audio=["1", 0], filename_prefix="x"),
    }

    job = run(fake, graph)

    assert job.attempt == 1
    assert content(job.outputs.get()).startswith(b"fLaC")


def test_its_progress_and_its_times_are_told(fake: FakeComfy) -> None:
    job = run(fake, {"1": picture(), "2": save("1")})

    answer = client_of().get(f"{API}/jobs/{job.pk}").json()

    progress = answer["progress"]
    assert (progress["value"], progress["nodes_done"], progress["nodes_total"]) == (1.0, 2, 2)
    assert answer["queue_position"] is None
    assert answer["metrics"]["queue_ms"] >= 0
    assert answer["metrics"]["execution_ms"] > 0


# --- whose run it is ---


def test_a_prompt_without_any_prefix_is_found_again(fake: FakeComfy) -> None:
    job = submit({"1": picture(3), "2": preview("1")})
    worker = make_worker(fake.url)
    fake.fault("drop_after_accept")

    row = run_until_done(job, worker)

    assert (row.status, row.attempt) == ("succeeded", 1)
    assert fake.prompts[str(job.pk)]["submitted"] == 1


def test_a_prompt_without_any_prefix_that_is_lost_is_sent_again(fake: FakeComfy) -> None:
    job = submit({"1": picture(4), "2": preview("1")})
    worker = make_worker(fake.url)
    fake.fault("forget_queue")

    row = run_until_done(job, worker)

    assert (row.status, row.resubmits) == ("succeeded", 1)
    assert fake.prompts[str(job.pk)]["submitted"] == 2


# --- files ---


def test_two_users_files_of_one_name_are_two_files(fake: FakeComfy) -> None:
    graph = {"1": node("LoadImage", image="image.png"), "2": save("1")}
    colours = {"ann": "teal", "bob": "maroon"}
    jobs = {}
    for name, colour in colours.items():
        upload(photo_bytes(colour), make_user(name))
        jobs[name] = submit(graph, make_user(name))
    worker = make_worker(fake.url)

    drawn = {}
    for name, job in jobs.items():
        row = run_until_done(job, worker)
        image = Image.open(io.BytesIO(content(row.outputs.get())))
        drawn[name] = image.getpixel((48, 48))

    assert drawn["ann"] != drawn["bob"]
    for job in jobs.values():
        assert sent_graph(fake, job)["1"]["inputs"]["image"] == f"genflow/{job.pk}-0.png"
        assert client_of(job.owner).get(f"{API}/jobs/{job.pk}/workflow").json()["workflow"] == graph


def test_files_of_any_kind_are_staged(fake: FakeComfy) -> None:
    sound = upload(b"fLaC" + bytes(34), name="take 1.FLAC")
    mask = upload(photo_bytes(), name="mask")
    reference = {"__type": "core/ASSET", "info": {"id": str(mask.pk)}}
    graph = {
        "1": node("LoadAudio", audio="take 1.FLAC"),
        "2": node("SaveAudio", audio=["1", 0], filename_prefix="x"),
        "3": node("LoadImageMask", image=reference, channel="red"),
        "4": node("PreviewAny", source=["3", 0]),
    }

    job = run(fake, graph)

    inputs = {n: each["inputs"] for n, each in sent_graph(fake, job).items()}
    assert inputs["1"]["audio"] == f"genflow/{job.pk}-0.flac"
    assert inputs["3"]["image"] == f"genflow/{job.pk}-1.png"
    assert set(job.inputs.all()) == {sound, mask}


@pytest.mark.parametrize(
    ("name", "content_type", "sent"),
    [
        ("take 1.FLAC", "audio/x-flac", "flac"),
        ("photo", "image/png", "png"),
        ("photo.", "image/png", "png"),
        ("a.tar.gz", "application/gzip", "gz"),
        ("x.png [output]", "image/png", "png"),
        ('x."\r\n', "text/plain; charset=utf-8", "bin"),
        ("x." + "y" * 200, "image/svg+xml", "bin"),
        ("", "image/jpeg", "jpeg"),
    ],
)
def test_nothing_of_a_files_name_is_sent_but_a_plain_ending(
    name: str, content_type: str, sent: str
) -> None:
    assert ending(Asset(name=name, content_type=content_type)) == sent


def test_a_file_whose_bytes_are_gone_fails_the_job(fake: FakeComfy) -> None:
    asset = upload(photo_bytes())
    job = submit({"1": node("LoadImage", image="image.png"), "2": save("1")})
    asset.file.delete(save=False)

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.attempt) == ("failed", 1)


# --- the wire ---


def job_of(graph: Graph, **values: Any) -> Job:
    return Job(kind=Job.Kind.WORKFLOW, graph=graph, **values)


def test_every_prefix_on_the_wire_is_ours() -> None:
    linked = node("SaveImage", images=["1", 0], filename_prefix=["5", 0])
    job = job_of({"1": picture(), "2": save("1", "x/../a"), "3": save("1", "b"), "4": linked})

    wire = on_the_wire(job, {})

    assert {n: each["inputs"].get("filename_prefix") for n, each in wire.items()} == {
        "1": None,
        "2": f"genflow/{job.pk}",
        "3": f"genflow/{job.pk}-1",
        "4": f"genflow/{job.pk}-2",
    }
    assert caller_prefixes(job.graph) == [json.dumps(p) for p in ("x/../a", "b", ["5", 0])]


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("{id}_00001_.png", "a_00001_.png"),
        ("{id}-r2_00001_.png", "a_00001_.png"),
        ("{id}-r2-1_00003.mp4", "c_00003.mp4"),
        ("{id}-2_00001_.png", "ComfyUI_00001_.png"),
        ("{id}-r5_00001_.png", "{id}-r5_00001_.png"),  # no drawing of this job
        ("ComfyUI_temp_abcde_00001_.png", "ComfyUI_temp_abcde_00001_.png"),
        ("genflow/{id}_00001_.png", "a_00001_.png"),
        ("odd\\folder/x.png", "x.png"),
    ],
)
def test_a_name_is_shown_as_the_graph_asked_for_it(filename: str, shown: str) -> None:
    graph = {"2": save("1", "a"), "3": save("1", "b/c"), "4": save("1", ["5", 0])}
    job = job_of(graph, drawing=2)

    name = shown_name(job, filename.format(id=job.pk))

    assert name == shown.format(id=job.pk)


# --- a worker that dies ---


def test_a_workflow_of_a_dead_worker_is_gone_on_with(fake: FakeComfy) -> None:
    job = submit({"1": picture(5), "2": save("1"), "3": preview("1")})
    held = Job.objects.claim(
        "w1", [make_worker(fake.url).backends[0].pk], make_worker(fake.url).options.terms
    )
    assert held is not None
    let_lease_expire(held)

    row = run_until_done(job, make_worker(fake.url))

    assert (row.status, row.lost_workers) == ("succeeded", 1)
    assert runs(fake, job)[0] == 1
    assert diary(fresh(job)).count("claimed") == 2
