"""POST /api/v2/jobs: what is taken, and what is refused in which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from pytest_django import Settings

from comfy.catalog import parse_object_info
from comfy.workflow import MAX_NODES
from jobs.models import Asset, Backend, Job, NodeClass
from jobs.parsers import MAX_DEPTH
from jobs.tests.helpers import make_backend, make_staff, make_user, queue_job
from jobs.tests.helpers_api import API, Answer, check, client_of, error_of
from jobs.tests.test_assets import uploaded

pytestmark = pytest.mark.django_db

GRAPH: dict[str, Any] = {
    "1": {"class_type": "LoadImage", "inputs": {"image": "me.png"}},
    "9": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "ComfyUI"}},
}
PLAIN: dict[str, Any] = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64}},
    "9": GRAPH["9"],
}
# What LoraLoader and the like of a pretended server have.
TOLD: dict[str, Any] = {
    "EmptyImage": {"input": {"required": {"width": ["INT", {}], "height": ["INT", {}]}}},
    "SaveImage": {"input": {"required": {"images": ["IMAGE"]}}, "output_node": True},
    "Loader": {"input": {"required": {"name": [["a.pt", "b.pt"]]}}},
    "KeepFile": {"input": {"required": {"file": [["x"], {"file_upload": True}]}}},
}


def post(body: Any, user: User | None = None, **options: Any) -> Answer:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return client_of(user).post(
        f"{API}/jobs", content, **{"content_type": "application/json"} | options
    )


def send(graph: Any, user: User | None = None, **fields: Any) -> Answer:
    return post({"workflow": graph} | fields, user)


def changed(**nodes: Any) -> dict[str, Any]:
    return PLAIN | nodes


def upload(owner: User | None = None, name: str = "me.png", content: bytes = b"png") -> Asset:
    return uploaded(content, owner, name=name)


def reference(asset_id: Any, **info: Any) -> dict[str, Any]:
    return {"__type": "core/ASSET", "info": {"id": str(asset_id), **info}}


def known_backend(url: str = "http://a.test", told: Mapping[str, Any] = TOLD) -> Backend:
    """A backend that a worker has read the catalog of a moment ago."""
    backend = make_backend(url)
    backend.seen("0.26.0")
    rows = [
        NodeClass(backend=backend, name=name, inputs=info.as_json(), is_output=info.is_output)
        for name, info in parse_object_info(told).items()
    ]
    NodeClass.objects.replace(backend, rows, "read")
    return backend


def refusal_of(answer: Answer) -> tuple[str, dict[str, Any]]:
    """Return the code, and what is wrong with which node."""
    error = error_of(answer)
    assert answer.status_code == 422
    assert not Job.objects.exists()
    return error["code"], (error["details"] or {}).get("node_errors", {})


# --- what is taken ---


def test_a_workflow_becomes_a_job() -> None:
    answer = send(PLAIN, metadata={"shoot": "7"}, priority=-2)

    job = answer.json()
    assert answer.status_code == 201
    assert answer["Location"] == job["urls"]["self"] == f"{API}/jobs/{job['id']}"
    check("Job", job)
    assert (job["kind"], job["status"], job["queue_position"]) == ("workflow", "queued", 1)
    assert (job["metadata"], job["priority"]) == ({"shoot": "7"}, -2)
    assert job["metrics"] == {"queue_ms": None, "execution_ms": None}


def test_its_graph_is_told_as_it_was_sent() -> None:
    upload()
    graph = GRAPH | {
        "5": {"class_type": "X", "inputs": {"n": 2**63, "f": 1.5}, "_meta": {"title": "é"}}
    }

    job = send(graph).json()

    answer = client_of().get(f"{API}/jobs/{job['id']}/workflow")
    assert answer.json() == {"workflow": graph, "format": "api"}


def test_a_labelled_job_is_found_by_its_label() -> None:
    wanted = send(PLAIN, metadata={"client": "acme", "run": "7"}).json()
    send(PLAIN, metadata={"client": "other"})

    page = client_of().get(f"{API}/jobs", {"metadata[client]": "acme", "metadata[run]": "7"}).json()

    assert [job["id"] for job in page["jobs"]] == [wanted["id"]]


def test_a_graph_of_as_many_nodes_as_may_be_is_taken() -> None:
    many = {str(n): {"class_type": "X", "inputs": {}} for n in range(MAX_NODES)}

    assert send(many).status_code == 201


def test_a_workflow_that_comes_again_with_its_key_is_one_job() -> None:
    key, secret = {"Idempotency-Key": "one"}, {"api_key_comfy_org": "sk"}
    first = post({"workflow": PLAIN}, headers=key)

    again = post({"workflow": PLAIN, "extra_data": secret}, headers=key)
    other = post({"workflow": GRAPH}, headers=key)

    assert (again.status_code, again.json()) == (201, first.json())
    assert again["Idempotency-Replayed"] == "true"
    assert (other.status_code, refusal_in(other)) == (422, "idempotency_key_reuse")
    assert Job.objects.count() == 1


# --- what is no graph ---


@pytest.mark.parametrize("workflow", [None, [], "{}", 3, True, {}])
def test_what_is_no_graph_is_no_workflow(workflow: Any) -> None:
    assert refusal_of(send(workflow)) == ("invalid_workflow", {})


def test_a_body_without_a_workflow_is_told_what_one_is() -> None:
    answer = post({})

    assert refusal_of(answer) == ("invalid_workflow", {})
    assert "Save (API Format)" in error_of(answer)["message"]


def test_the_editors_own_format_is_told_apart() -> None:
    saved = {"last_node_id": 9, "nodes": [{"id": 9, "type": "SaveImage"}], "links": []}

    assert refusal_of(send(saved)) == ("workflow_format_ui", {})


def test_what_is_wrong_is_told_node_by_node() -> None:
    answer = send(
        changed(**{"2": {"inputs": {}}, "3": {"class_type": "X", "inputs": {"x": ["7", 0]}}})
    )

    code, errors = refusal_of(answer)
    assert code == "invalid_workflow"
    assert {node: [e["reason"] for e in found] for node, found in errors.items()} == {
        "2": ["missing_class_type"],
        "3": ["broken_link"],
    }
    assert errors["3"][0]["field"] == "x"
    assert "node 7 is not in the workflow" in errors["3"][0]["message"]


def test_a_node_with_an_empty_id_is_told_of_too() -> None:
    assert refusal_of(send({"": {"class_type": "X"}}))[1][""][0]["reason"] == "no_inputs"


def test_more_nodes_than_may_be_are_refused_in_words() -> None:
    answer = send({str(n): {"class_type": "X", "inputs": {}} for n in range(20_000)})

    assert refusal_of(answer) == ("invalid_workflow", {})
    assert "20,000" in error_of(answer)["message"]


def test_thousands_of_faults_make_a_short_answer() -> None:
    answer = send({str(n): {"inputs": {}} for n in range(5_000)})

    code, errors = refusal_of(answer)
    assert (code, len(errors)) == ("invalid_workflow", 100)
    assert "4,999 more" in error_of(answer)["message"]


# --- what is no JSON ---


def nested(levels: int) -> str:
    return '{"workflow": ' + "[" * levels + "]" * levels + "}"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("{", "cannot be read"),
        (b'{"workflow": "\xff"}', "utf-8"),
        ('{"workflow": NaN}', "NaN"),
        ('{"workflow": {"1": {"class_type": "X", "inputs": {"x": -Infinity}}}}', "Infinity"),
        ('{"workflow": {"1": {"class_type": "X", "inputs": {"x": 1e999}}}}', "too large"),
        (
            '{"workflow": {"1": {"class_type": "X", "inputs": {"x": %s}}}}' % ("9" * 5000),
            "too large",
        ),
        (r'{"workflow": {"1": {"class_type": "X\u0000", "inputs": {}}}}', "NUL"),
        (r'{"workflow": {"1": {"class_type": "X", "inputs": {"t": "hi \ud83d"}}}}', "surrogate"),
        (r'{"workflow": {"\udc80": {"class_type": "X", "inputs": {}}}}', "surrogate"),
        ('{"workflow": {"1": {"class_type": "X"}, "1": {"class_type": "Y"}}}', "twice"),
        (nested(MAX_DEPTH + 1), "deeper"),
        (nested(1_000_000), "deeper"),
    ],
)
def test_json_that_is_none_is_refused_in_words(body: str | bytes, word: str) -> None:
    answer = post(body)

    assert (answer.status_code, error_of(answer)["code"]) == (400, "bad_request")
    assert word in error_of(answer)["message"]


def test_an_empty_body_is_told_what_a_workflow_is() -> None:
    assert refusal_of(post("")) == ("invalid_workflow", {})


@pytest.mark.parametrize("body", [[], "text", 3, None, True])
def test_json_that_is_no_object_is_refused(body: Any) -> None:
    answer = post(json.dumps(body))

    assert answer.status_code == (422 if body is None else 400)
    check("ErrorEnvelope", answer.json())


def test_a_body_beyond_the_limit_is_refused(settings: Settings) -> None:
    settings.GENFLOW_WORKFLOW_MAX_BYTES = 1_000

    answer = send(PLAIN, metadata={"a": "x" * 1_000})

    assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/form-data; boundary=x", ""])
def test_another_content_type_is_refused(content_type: str) -> None:
    answer = post(b"--x--", content_type=content_type)

    assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")


# --- the other fields ---


@pytest.mark.parametrize("name", ["webhook_url", "inputs", "prompt"])
def test_fields_that_are_reserved_or_unknown_are_named(name: str) -> None:
    answer = post({"workflow": PLAIN, name: "https://example.com"})

    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
    assert list(error_of(answer)["details"]) == [name]
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("labels", "word"),
    [
        (["a"], "object"),
        ("a", "object"),
        ({"a": 1}, "'a'"),
        ({"a": None}, "'a'"),
        ({"": "a"}, "''"),
        ({"k" * 65: "a"}, "kkk"),
        ({"long": "v" * 501}, "'long'"),
        ({str(n): "" for n in range(17)}, "17 pairs"),
    ],
)
def test_labels_that_cannot_be_kept_are_named(labels: Any, word: str) -> None:
    answer = send(PLAIN, metadata=labels)

    assert (answer.status_code, error_of(answer)["code"]) == (422, "metadata_invalid")
    assert word in error_of(answer)["message"]
    assert not Job.objects.exists()


@pytest.mark.parametrize("priority", [-1.5, False, [-1], None])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    assert error_of(send(PLAIN, priority=priority))["details"].keys() == {"priority"}


def test_only_staff_may_pass_everybody() -> None:
    assert error_of(send(PLAIN, priority=1))["details"].keys() == {"priority"}
    assert send(PLAIN, make_staff(), priority=1).status_code == 201


@pytest.mark.parametrize(
    "extra_data",
    [
        [],
        "key",
        {"other": "x"},
        {"api_key_comfy_org": ""},
        {"api_key_comfy_org": 3},
        {"api_key_comfy_org": "é"},
        {"api_key_comfy_org": "a\nb"},
        {"api_key_comfy_org": "x" * 4_001},
        {"api_key_comfy_org": "sk-secret", "auth_token_comfy_org": "sk-secret"},
    ],
)
def test_extra_data_is_one_key_or_nothing(extra_data: Any) -> None:
    answer = send(PLAIN, extra_data=extra_data)

    assert (answer.status_code, error_of(answer)["code"]) == (422, "invalid_request")
    assert list(error_of(answer)["details"]) == ["extra_data"]
    assert "sk-secret" not in answer.content.decode()


def test_a_key_is_not_taken_where_it_cannot_be_handed_on(settings: Settings) -> None:
    settings.GENFLOW_NOTIFY = False

    answer = send(PLAIN, extra_data={"api_key_comfy_org": "sk"})

    assert "GENFLOW_NOTIFY" in error_of(answer)["details"]["extra_data"][0]
    assert send(PLAIN, extra_data={}).status_code == 201


@pytest.mark.django_db(transaction=True)
def test_a_key_is_in_no_table() -> None:
    job = send(PLAIN, extra_data={"api_key_comfy_org": "sk-secret"}).json()

    assert job["params"]["extra_data"] == ["api_key_comfy_org"]
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
        )
        for (table,) in cursor.fetchall():
            found = f'SELECT count(*) FROM "{table}" AS t WHERE t::text LIKE %s'  # noqa: S608
            cursor.execute(found, ["%sk-secret%"])
            assert cursor.fetchone() == (0,), table


def test_a_full_queue_is_told_with_when_to_come_again(settings: Settings) -> None:
    settings.GENFLOW_QUEUE_LIMIT = 1
    send(PLAIN)

    answer = send(PLAIN, make_user("bob"))

    assert (answer.status_code, error_of(answer)["code"]) == (429, "queue_full")
    assert int(answer["Retry-After"]) >= 1


def test_nobody_can_send_one_without_a_token() -> None:
    answer = client_of().post(
        f"{API}/jobs", "{}", "application/json", headers={"Authorization": ""}
    )

    assert answer.status_code == 401


# --- files ---


def test_a_file_is_found_by_its_id_anywhere_in_an_input() -> None:
    asset, other = upload(), upload(name="other.png")
    graph = changed(
        **{
            "1": {"class_type": "LoadImage", "inputs": {"image": reference(str(asset.pk).upper())}},
            "2": {
                "class_type": "X",
                "inputs": {"many": {"__value__": [reference(other.pk, hash="x")]}},
            },
        }
    )

    job = Job.objects.get(pk=send(graph).json()["id"])

    assert set(job.inputs.all()) == {asset, other}
    assert job.graph == graph


def test_a_file_is_found_by_its_path_and_the_newest_wins() -> None:
    upload()
    newest = upload(content=b"new")
    upload(make_user("bob"))

    job = Job.objects.get(pk=send(GRAPH).json()["id"])

    assert list(job.inputs.all()) == [newest]
    assert job.params["files"] == {"1": {"image": str(newest.pk)}}


def test_an_output_of_an_earlier_job_can_be_the_input_of_another() -> None:
    output = upload()
    Asset.objects.update(job=queue_job())
    graph = GRAPH | {"1": {"class_type": "LoadImage", "inputs": {"image": reference(output.pk)}}}

    assert send(graph).status_code == 201
    assert refusal_in(send(GRAPH)) == "missing_asset"  # outputs have no path


def refusal_in(answer: Answer) -> str:
    code: str = error_of(answer)["code"]
    return code


@pytest.mark.parametrize(
    "image",
    [
        "you.png",
        "",
        "/etc/passwd",
        "../me.png",
        "genflow/019a-0.png",
        "me.png [output]",
        "me.png [temp]",
        ["2", 0],
        3,
        None,
        {"__type": "core/ASSET"},
        {"__type": "core/ASSET", "info": "me.png"},
        {"__type": "core/ASSET", "info": {"file_path": "me.png"}},
        {"__type": "core/ASSET", "info": {"id": 3}},
        {"__type": "core/ASSET", "info": {"id": "me.png"}},
        {"__type": "core/ASSET", "info": {"id": "00000000-0000-0000-0000-000000000000"}},
        {"__value__": "me.png"},
    ],
)
def test_what_names_no_file_of_the_owners_is_refused(image: Any) -> None:
    upload()
    graph = GRAPH | {
        "1": {"class_type": "LoadImage", "inputs": {"image": image}},
        "2": {"class_type": "PrimitiveString", "inputs": {"value": "/etc/passwd"}},
    }

    code, errors = refusal_of(send(graph))

    assert code == "missing_asset"
    assert [(e["field"], e["reason"]) for e in errors["1"]] == [("image", "missing_asset")]


def test_somebody_elses_file_is_answered_like_none() -> None:
    asset = upload(make_user("bob"))
    by_id, by_path = (
        error_of(send(GRAPH | {"1": {"class_type": "LoadImage", "inputs": {"image": image}}}))
        for image in (reference(asset.pk), "me.png")
    )
    unknown = reference("00000000-0000-0000-0000-000000000000")

    nothing = error_of(
        send(GRAPH | {"1": {"class_type": "LoadImage", "inputs": {"image": unknown}}})
    )

    assert by_id == by_path == nothing


def test_a_file_of_a_deleted_job_is_no_file() -> None:
    output = upload()
    Asset.objects.update(job=queue_job())
    Job.objects.update(deleted_at="2026-01-01T00:00Z")

    answer = send(changed(**{"1": {"class_type": "X", "inputs": {"a": reference(output.pk)}}}))

    assert refusal_in(answer) == "missing_asset"


def test_an_input_that_the_server_says_takes_files_is_none_for_other_strings() -> None:
    known_backend()
    graph = changed(**{"1": {"class_type": "KeepFile", "inputs": {"file": "/etc/passwd"}}})
    graph["9"] = {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}}

    code, errors = refusal_of(send(graph))

    assert (code, list(errors)) == ("missing_asset", ["1"])


def test_a_file_is_kept_as_long_as_a_job_needs_it() -> None:
    earlier = queue_job()
    output = upload()
    Asset.objects.filter(pk=output.pk).update(job=earlier)
    job = send(changed(**{"1": {"class_type": "X", "inputs": {"a": reference(output.pk)}}})).json()

    Job.objects.filter(pk=earlier.pk).purge()

    assert list(Job.objects.get(pk=job["id"]).inputs.all()) == [output]
    Job.objects.all().purge()
    assert not Asset.objects.filter(pk=output.pk).exists()


# --- what the servers have ---


def with_loader(name: str) -> dict[str, Any]:
    """A graph whose output needs a file of the server's."""
    return {
        "1": {"class_type": "Loader", "inputs": {"name": name}},
        "9": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}},
    }


def test_what_the_server_has_is_taken() -> None:
    known_backend()

    assert send(with_loader("a.pt")).status_code == 201


def test_a_class_that_no_server_has_is_refused() -> None:
    known_backend()

    code, errors = refusal_of(send(changed(**{"5": {"class_type": "Rare", "inputs": {}}})))

    assert code == "invalid_workflow"
    assert [(e["field"], e["reason"]) for e in errors["5"]] == [(None, "unknown_class")]


def test_a_value_that_no_server_has_is_refused_with_those_there_are() -> None:
    known_backend()

    answer = send(with_loader("c.pt"))

    code, errors = refusal_of(answer)
    assert code == "invalid_workflow"
    assert (errors["1"][0]["field"], errors["1"][0]["reason"]) == ("name", "value_not_in_list")
    for word in ("1", "Loader", "c.pt", "name", "a.pt, b.pt"):
        assert word in error_of(answer)["message"]


def test_a_graph_that_gives_nothing_is_refused() -> None:
    known_backend()

    answer = send({"1": {"class_type": "Loader", "inputs": {"name": "a.pt"}}})

    assert refusal_of(answer)[0] == "invalid_workflow"
    assert "SaveImage" in error_of(answer)["message"]


def test_a_job_goes_to_a_server_that_has_what_it_needs() -> None:
    poor = known_backend("http://poor.test")
    known_backend(
        "http://rich.test", TOLD | {"Loader": {"input": {"required": {"name": [["c.pt"]]}}}}
    )

    job = Job.objects.get(pk=send(with_loader("c.pt")).json()["id"])

    assert job.refused_by == [poor.pk]


def test_what_only_two_servers_together_have_is_refused() -> None:
    known_backend("http://a.test", {k: v for k, v in TOLD.items() if k != "Loader"})
    known_backend("http://b.test", {k: v for k, v in TOLD.items() if k != "SaveImage"})

    assert refusal_of(send(with_loader("a.pt")))[0] == "invalid_workflow"


@pytest.mark.parametrize("last_seen_at", ["2026-01-01T00:00Z", None])
def test_what_servers_had_that_are_silent_is_left_to_the_run(last_seen_at: str | None) -> None:
    known_backend()
    Backend.objects.update(last_seen_at=last_seen_at)

    assert send(changed(**{"5": {"class_type": "Rare", "inputs": {}}})).status_code == 201


def test_a_server_that_is_not_known_yet_may_have_everything() -> None:
    poor = known_backend()
    make_backend("http://new.test").seen("0.26.0")

    job = send(changed(**{"5": {"class_type": "Rare", "inputs": {}}})).json()

    assert Job.objects.get(pk=job["id"]).refused_by == [poor.pk]
