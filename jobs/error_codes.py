"""The codes in the API's error bodies, for its description and `docs/api.md`."""

from __future__ import annotations

from typing import Final

# {code: (HTTP status, what it means and what to do)}
REQUEST_ERRORS: Final = {
    "bad_request": (
        400,
        "The request cannot be read: not JSON, not a form, a charset that is none.",
    ),
    "invalid_idempotency_key": (400, "Use 1 to 255 printable ASCII characters, best a UUID."),
    "unauthorized": (401, "No token, or one that is wrong, revoked or expired."),
    "forbidden": (403, "A session without its CSRF token. Send the token, or use a bearer token."),
    "not_found": (404, "You have nothing of this id."),
    "output_unavailable": (404, "The job has no picture, or none yet."),
    "blob_not_found": (404, "You have no bytes of this hash. Upload them."),
    "method_not_allowed": (405, "See the header `Allow`."),
    "asset_in_use": (409, "A job depends on the asset. Delete the job, or wait for its end."),
    "hash_mismatch": (409, "The bytes that came have another hash than you said. Send them again."),
    "idempotency_in_flight": (
        409,
        "The first request with this key is under way. Send it again soon.",
    ),
    "request_too_large": (413, "Send less."),
    "photo_too_large": (413, "Send a smaller photo; the message names the limit."),
    "photo_format": (415, "Send a photo of a kind that the message names."),
    "unsupported_media_type": (415, "Send the content type that the operation names."),
    "bad_photo": (422, "The photo is damaged, empty, too small, or no photo. Send another."),
    "idempotency_key_reuse": (422, "The key came with another request before. Use a new one."),
    "invalid_request": (422, "`details` names each field and what is wrong with it."),
    "invalid_cursor": (422, "Use a `next_cursor` as a list gave it."),
    "invalid_metadata_filter": (422, "No job can have such metadata."),
    "metadata_invalid": (
        422,
        "Send at most 16 pairs of strings, in the lengths that the message names.",
    ),
    "invalid_workflow": (422, "`details.node_errors` says what is wrong with which node."),
    "workflow_format_ui": (422, "This is the editor's own format. Send the API format."),
    "missing_asset": (422, "A file that the workflow names is not yours or is gone. Upload it."),
    "model_missing": (422, "No image server has a model that portraits need. Tell the operator."),
    "node_missing": (422, "No image server has a node that portraits need. Tell the operator."),
    "storage_full": (422, "You have stored as much as you may. Delete jobs or assets."),
    "queue_full": (429, "The queue is full. Send it again after `Retry-After` seconds."),
    "owner_queue_full": (429, "You have as many jobs waiting as you may. Wait for `Retry-After`."),
    "rate_limited": (429, "You send requests too fast. Wait for `Retry-After`."),
    "too_many_streams": (429, "Close an event stream, or poll the job."),
    "server_error": (500, "A mistake of ours. Tell the operator when it was."),
    "not_implemented": (501, "This server cannot stream (it is no ASGI server). Poll the job."),
    "database_unavailable": (
        503,
        "The database is away. Send it again after `Retry-After` seconds.",
    ),
    "storage_unavailable": (
        503,
        "The file storage is away. Send it again after `Retry-After` seconds.",
    ),
    "server_busy": (503, "All threads are busy. Send it again after `Retry-After` seconds."),
    "photos_busy": (503, "Many photos are arriving. Send it again after `Retry-After` seconds."),
}
# In `error` of a job that failed, and in `retry` of one that is tried again.
JOB_ERRORS: Final = {
    "out_of_memory": "The picture did not fit into the GPU's memory. Ask for a smaller one, or fewer at once.",
    "no_face": "No face was found in the photo. Leave room around it.",
    "bad_photo": "ComfyUI cannot read the photo, or it was lost. Send it again.",
    "model_missing": "No ComfyUI has a model that the job needs. Choose another.",
    "node_missing": "No ComfyUI has a node that the job needs. Tell the operator.",
    "graph_refused": "ComfyUI does not accept these settings or this graph.",
    "api_key_lost": "The key in `extra_data` was lost with its worker. Send the job again with it.",
    "bad_picture": "The picture came out damaged, empty or not at all. Try another seed.",
    "output_too_large": "A file that the run left is larger than is taken. Make it smaller.",
    "prompt_lost": "ComfyUI lost the job again and again. Send it again later.",
    "worker_lost": "The workers died drawing it, too many times. Send it again.",
    "backend_stuck": "ComfyUI hung each time it drew this. Change the settings.",
    "backend_unreachable": "The image server needs a restart. Send it again later.",
    "unknown": "Anything else; the operator can read what.",
}
