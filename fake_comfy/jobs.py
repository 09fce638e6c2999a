"""The newer view of queue and history: /api/jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from fake_comfy.queue import Item, Json, PromptQueue

STATUSES: Final = ("pending", "in_progress", "completed", "failed", "cancelled")
ENDINGS: Final = {
    "execution_success": "completed",
    "execution_error": "failed",
    "execution_interrupted": "cancelled",
}


class BadQuery(ValueError):
    pass


def is_canonical_uuid(text: Any) -> bool:
    try:
        return isinstance(text, str) and str(UUID(text)) == text
    except ValueError:
        return False


def find_job(queue: PromptQueue, job_id: str) -> Json | None:
    """One job with all that is known. The history is looked at first, as in the real server."""
    if entry := queue.history.get(job_id):
        _, _, graph, extra_data, _ = entry["prompt"]
        return _ended(entry) | {
            "outputs": entry["outputs"],
            "execution_status": entry["status"],
            "workflow": {"prompt": graph, "extra_data": extra_data},
        }
    return next((job for job in _unfinished(queue) if job["id"] == job_id), None)


def list_jobs(queue: PromptQueue, query: Mapping[str, str]) -> Json:
    """A page of jobs, the newest first unless asked otherwise. Raises BadQuery."""
    wanted = _statuses(query.get("status"))
    every = [*_unfinished(queue), *map(_ended, queue.history.values())]
    jobs = [job for job in every if job["status"] in wanted]
    jobs.sort(key=_sort_key(query), reverse=query.get("sort_order", "desc") == "desc")
    offset, limit = _number(query, "offset") or 0, _number(query, "limit")
    end = len(jobs) if limit is None else offset + limit
    return {
        "jobs": jobs[offset:end],
        "pagination": {
            "offset": offset,
            "limit": limit,
            "total": len(jobs),
            "has_more": end < len(jobs),
        },
    }


def _statuses(text: str | None) -> list[str]:
    wanted = text.split(",") if text else list(STATUSES)
    if unknown := [status for status in wanted if status not in STATUSES]:
        valid = ", ".join(STATUSES)
        raise BadQuery(f"Invalid status value(s): {', '.join(unknown)}. Valid values: {valid}")
    return wanted


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise BadQuery(f"{name} must be a non-negative integer")
    return int(text)


def _sort_key(query: Mapping[str, str]) -> Any:
    if query.get("sort_by") == "execution_duration":
        return lambda job: job.get("execution_end_time", 0) - job.get("execution_start_time", 0)
    return lambda job: (job["create_time"], job["priority"])


def _unfinished(queue: PromptQueue) -> list[Json]:
    running = [] if queue.running is None else [_head(queue.running, "in_progress")]
    waiting = [_head(item, "pending") for item in queue.pending]
    return [job | {"outputs_count": 0} for job in running + waiting]


def _ended(entry: Json) -> Json:
    messages = entry["status"]["messages"]
    (_, start), (event, end) = messages[0], messages[-1]
    files = [
        {**file, "nodeId": node_id, "mediaType": kind}
        for node_id, output in entry["outputs"].items()
        for kind, found in output.items()
        for file in found
    ]
    return {
        **_head(entry["prompt"], ENDINGS[event]),
        "execution_start_time": start["timestamp"],
        "execution_end_time": end["timestamp"],
        **({"execution_error": end} if event == "execution_error" else {}),
        "outputs_count": len(files),
        **({"preview_output": files[0]} if files else {}),
    }


def _head(item: Item, status: str) -> Json:
    number, prompt_id, _, extra_data, _ = item
    return {
        "id": prompt_id,
        "status": status,
        "priority": number,
        "create_time": extra_data["create_time"],
    }
