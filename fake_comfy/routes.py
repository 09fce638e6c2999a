"""The routes of ComfyUI. Malformed requests raise, and become its 500, as there."""

from __future__ import annotations

import asyncio
import io
import mimetypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from aiohttp import BodyPartReader, WSMsgType, web
from PIL import Image

from fake_comfy.files import OutsideFolder, split_annotation
from fake_comfy.jobs import BadQuery, find_job, is_canonical_uuid, list_jobs
from fake_comfy.machine import Machine
from fake_comfy.models import MODELS
from fake_comfy.node_class import Json
from fake_comfy.nodes import Catalog, catalog
from fake_comfy.queue import milliseconds
from fake_comfy.sockets import FEATURES, Socket
from fake_comfy.trouble import Handler, drop
from fake_comfy.validation import Verdict, refusal, validate

SECRETS: Final = ("api_key_comfy_org", "auth_token_comfy_org")
# A browser would run these.
DANGEROUS_TYPES: Final = ("text/html", "text/javascript", "application/xhtml+xml", "text/css")
INVALID_PROMPT_ID: Final = refusal(
    "invalid_prompt_id",
    "prompt_id must be a valid UUID",
    "prompt_id must be a UUID string in canonical lowercase hyphenated form; omit it to let the server "
    "generate one",
)
NO_PROMPT: Final = refusal("no_prompt", "No prompt provided", "No prompt provided")
GIGABYTE: Final = 2**30
SYSTEM_STATS: Final[Json] = {
    "system": {
        "os": "linux",
        "ram_total": 32 * GIGABYTE,
        "ram_free": 24 * GIGABYTE,
        "comfyui_version": "0.26.0",
        "required_frontend_version": "1.45.19",
        "installed_templates_version": None,
        "required_templates_version": "0.10.3",
        "comfy_package_versions": [],
        "python_version": "3.11.7",
        "pytorch_version": "2.13.0+cpu",
        "embedded_python": False,
        "deploy_environment": "local-git",
        "argv": ["main.py", "--cpu"],
    },
    "devices": [
        {
            "name": "cpu",
            "type": "cpu",
            "index": None,
            "vram_total": 32 * GIGABYTE,
            "vram_free": 24 * GIGABYTE,
            "torch_vram_total": 32 * GIGABYTE,
            "torch_vram_free": 24 * GIGABYTE,
        }
    ],
}


class Routes:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def add_to(self, app: web.Application) -> None:
        """Add every route, also below /api; the jobs only there."""
        routes = self._table()
        for method, path, handler in routes:
            if not path.startswith("/jobs"):
                app.router.add_route(method, path, handler)
        for method, path, handler in routes:
            app.router.add_route(method, f"/api{path}", handler)

    def _table(self) -> list[tuple[str, str, Handler]]:
        get = [
            ("/prompt", self.get_prompt),
            ("/queue", self.get_queue),
            ("/history", self.get_history),
            ("/history/{prompt_id}", self.get_history_entry),
            ("/view", self.get_view),
            ("/system_stats", self.get_system_stats),
            ("/features", self.get_features),
            ("/object_info", self.get_object_info),
            ("/object_info/{name}", self.get_node_class),
            ("/models", self.get_model_folders),
            ("/models/{folder}", self.get_models),
            ("/embeddings", self.get_embeddings),
            ("/jobs", self.get_jobs),
            ("/jobs/{job_id}", self.get_job),
            ("/ws", self.get_websocket),
        ]
        post = [
            ("/prompt", self.post_prompt),
            ("/queue", self.post_queue),
            ("/interrupt", self.post_interrupt),
            ("/history", self.post_history),
            ("/upload/image", self.post_upload),
            ("/free", self.post_free),
            ("/jobs/cancel", self.post_cancel_jobs),
            ("/jobs/{job_id}/cancel", self.post_cancel_job),
        ]
        gets: list[tuple[str, str, Handler]] = [
            (method, path, handler) for path, handler in get for method in ("GET", "HEAD")
        ]
        return gets + [("POST", path, handler) for path, handler in post]

    # Prompts

    async def post_prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        number = float(body["number"]) if "number" in body else self._next_number(body)
        if "prompt" not in body:
            return _refuse(NO_PROMPT)
        prompt_id = body.get("prompt_id")
        if prompt_id is None or self._machine.faults.take("wrong_id"):
            prompt_id = str(uuid4())
        elif not is_canonical_uuid(prompt_id):
            return _refuse(INVALID_PROMPT_ID)
        verdict = self._validate(body)
        if verdict.error:
            return _refuse(verdict.error, verdict.node_errors)
        item = (number, prompt_id, body["prompt"], _extra_data(body), verdict.outputs)
        self._machine.queue.put(item)
        self._machine.after_submit()
        return web.json_response(
            {"prompt_id": prompt_id, "number": number, "node_errors": verdict.node_errors}
        )

    async def get_prompt(self, request: web.Request) -> web.Response:
        return web.json_response(self._machine.status["status"])

    async def get_queue(self, request: web.Request) -> web.Response:
        queue = self._machine.queue
        running = [] if queue.running is None else [queue.running]
        return web.json_response({"queue_running": running, "queue_pending": queue.pending})

    async def post_queue(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("clear"):
            self._machine.queue.clear()
        for prompt_id in body.get("delete", []):
            self._machine.queue.delete(prompt_id)
        return web.Response()

    async def post_interrupt(self, request: web.Request) -> web.Response:
        try:
            body = await request.json()
        except ValueError:
            body = {}
        prompt_id = body.get("prompt_id")
        if not prompt_id or self._machine.queue.is_running(prompt_id):
            self._machine.engine.interrupt()
        return web.Response()

    async def get_history(self, request: web.Request) -> web.Response:
        entries = list(self._machine.queue.history.items())
        if "max_items" in request.query:
            count = int(request.query["max_items"])
            start = int(request.query.get("offset", -1))
            if start < 0:  # the newest ones
                start = max(len(entries) - count, 0)
            entries = entries[start : start + count]
        return web.json_response(dict(entries))

    async def get_history_entry(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["prompt_id"]
        entry = self._machine.queue.history.get(prompt_id)
        return web.json_response({prompt_id: entry} if entry else {})

    async def post_history(self, request: web.Request) -> web.Response:
        body = await request.json()
        queue = self._machine.queue
        queue.forget(list(queue.history) if body.get("clear") else body.get("delete", []))
        return web.Response()

    async def post_free(self, request: web.Request) -> web.Response:
        await request.json()
        self._machine.engine.cache.clear()
        return web.Response()

    # Jobs

    async def get_jobs(self, request: web.Request) -> web.Response:
        try:
            return web.json_response(list_jobs(self._machine.queue, request.query))
        except BadQuery as exc:
            return web.json_response({"error": str(exc)}, status=400)

    async def get_job(self, request: web.Request) -> web.Response:
        job = find_job(self._machine.queue, request.match_info["job_id"])
        if job is None:
            return web.json_response({"error": "Job not found"}, status=404)
        return web.json_response(job)

    async def post_cancel_job(self, request: web.Request) -> web.Response:
        return web.json_response({"cancelled": self._cancel(request.match_info["job_id"])})

    async def post_cancel_jobs(self, request: web.Request) -> web.Response:
        job_ids = (await request.json())["job_ids"]
        if invalid := [job_id for job_id in job_ids if not is_canonical_uuid(job_id)]:
            error = {"error": "job_ids contains invalid id(s)", "invalid_ids": invalid}
            return web.json_response(error, status=400)
        cancelled = [self._cancel(job_id) for job_id in job_ids]
        return web.json_response({"cancelled": any(cancelled)})

    # Files

    async def post_upload(self, request: web.Request) -> web.Response:
        form = await _read_form(request)
        if "image" not in form:
            return web.Response(status=400)
        filename, content = form["image"]
        if not filename:
            raise TypeError("a text field where the file should be")
        fields = {name: value.decode() for name, (_, value) in form.items() if name != "image"}
        kind, subfolder = fields.get("type") or "input", fields.get("subfolder", "")
        overwrite = fields.get("overwrite") in ("true", "1")
        try:
            name = self._machine.files.store_upload(
                content, filename, subfolder, kind, overwrite=overwrite
            )
        except OutsideFolder:
            return web.Response(status=400)
        return web.json_response({"name": name, "subfolder": subfolder, "type": kind})

    async def get_view(self, request: web.Request) -> web.StreamResponse:
        if "filename" not in request.query:
            return web.Response(status=404)
        name, annotated = split_annotation(request.query["filename"])
        if not name or name.startswith("/") or ".." in name:
            return web.Response(status=400)
        kind = annotated or request.query.get("type", "output")
        try:
            path = self._machine.files.locate_view(name, kind, request.query.get("subfolder", ""))
        except KeyError:
            return web.Response(status=400)
        except OutsideFolder:
            return web.Response(status=403)
        if path is None or (request.method == "GET" and self._machine.faults.take("view_404")):
            return web.Response(status=404)
        return await self._show_file(request, path)

    # What is installed

    async def get_system_stats(self, request: web.Request) -> web.Response:
        return web.json_response(SYSTEM_STATS)

    async def get_features(self, request: web.Request) -> web.Response:
        return web.json_response(FEATURES)

    async def get_object_info(self, request: web.Request) -> web.Response:
        return web.json_response({name: self._definition(name) for name in self._catalog()})

    async def get_node_class(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        known = name in self._catalog()
        return web.json_response({name: self._definition(name)} if known else {})

    async def get_model_folders(self, request: web.Request) -> web.Response:
        return web.json_response(list(MODELS))

    async def get_models(self, request: web.Request) -> web.Response:
        names = MODELS.get(request.match_info["folder"])
        return web.Response(status=404) if names is None else web.json_response(names)

    async def get_embeddings(self, request: web.Request) -> web.Response:
        return web.json_response(MODELS["embeddings"])

    async def get_websocket(self, request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        client_id = request.query.get("clientId") or uuid4().hex
        socket = Socket(response, request)
        sockets = self._machine.sockets
        await socket.send_event("status", {**self._machine.status, "sid": client_id})
        current = self._machine.engine.current
        if current is not None and current[0] == client_id:
            await socket.send_event("executing", {"node": current[1]})
        socket.silent = self._machine.faults.take("ws_silent") is not None
        sockets.add(client_id, socket)
        try:
            await self._listen(socket)
        finally:
            sockets.remove(client_id, socket)
        return response

    async def _listen(self, socket: Socket) -> None:
        """Take the client's flags from its first message, and answer with ours; all else is ignored."""
        first = True
        async for message in socket.socket:
            if first and message.type is WSMsgType.TEXT:
                flags = _feature_flags(message)
                if flags is not None:
                    socket.wants_metadata = bool(flags.get("supports_preview_metadata"))
                    await socket.send_event("feature_flags", FEATURES)
            first = False

    def _next_number(self, body: Any) -> float:
        front = "front" in body and bool(body["front"])
        return self._machine.queue.next_number(front=front)

    def _validate(self, body: Json) -> Verdict:
        faults = self._machine.faults
        nodes = catalog(
            without_ip_adapter=faults.take("missing_node") is not None,
            without_checkpoints=faults.take("missing_model") is not None,
        )
        only = body.get("partial_execution_targets")
        return validate(body["prompt"], nodes, self._machine.files, only)

    def _catalog(self) -> Catalog:
        """What /object_info shows: without what POST /prompt is going to miss."""
        faults = self._machine.faults
        return catalog(
            without_ip_adapter=faults.active("missing_node"),
            without_checkpoints=faults.active("missing_model"),
        )

    def _definition(self, name: str) -> Json:
        return self._catalog()[name].definition(self._machine.files.input_names())

    def _cancel(self, job_id: str) -> bool:
        if self._machine.queue.is_running(job_id):
            self._machine.engine.interrupt()
            return True
        return self._machine.queue.delete(job_id)

    async def _show_file(self, request: web.Request, path: Path) -> web.StreamResponse:
        headers = {"Content-Disposition": f'filename="{path.name}"'}
        preview, channel = request.query.get("preview"), request.query.get("channel")
        if preview is not None:
            body, content_type = await asyncio.to_thread(_preview, path, preview)
            return web.Response(body=body, content_type=content_type, headers=headers)
        if channel in ("rgb", "a"):
            body = await asyncio.to_thread(_channel, path, channel)
            return web.Response(body=body, content_type="image/png", headers=headers)
        headers["Content-Type"] = _content_type(path.name)
        if request.method == "GET":
            faults = self._machine.faults
            if faults.take("truncate_view"):
                return await _send_half(request, path, headers)
            if faults.take("corrupt_view"):
                return web.Response(body=_with_zeros(path.read_bytes()), headers=headers)
        return web.FileResponse(path, headers=headers)


def _refuse(error: Json, node_errors: Json | None = None) -> web.Response:
    return web.json_response({"error": error, "node_errors": node_errors or {}}, status=400)


def _extra_data(body: Json) -> Json:
    extra_data = {k: v for k, v in body.get("extra_data", {}).items() if k not in SECRETS}
    if "client_id" in body:
        extra_data["client_id"] = body["client_id"]
    return extra_data | {"create_time": milliseconds()}


async def _read_form(request: web.Request) -> dict[str, tuple[str | None, bytes]]:
    """The fields of a multipart form, each with its file name; of anything else: {}.

    Not `request.post()`: it leaves temporary files open when a client goes away in the middle.
    """
    limit = FEATURES["max_upload_size"]
    if (size := request.content_length or 0) > limit:
        text = f"Maximum request body size {limit} exceeded."
        raise web.HTTPRequestEntityTooLarge(limit, size, text=text)
    form: dict[str, tuple[str | None, bytes]] = {}
    if request.content_type == "multipart/form-data":
        async for part in await request.multipart():
            if isinstance(part, BodyPartReader) and part.name is not None:
                form[part.name] = part.filename, bytes(await part.read())
    return form


def _feature_flags(message: Any) -> Json | None:
    try:
        told = message.json()
        return dict(told["data"]) if told["type"] == "feature_flags" else None
    except (ValueError, KeyError, TypeError):
        return None


def _content_type(name: str) -> str:
    guess = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return "application/octet-stream" if guess in DANGEROUS_TYPES else guess


def _preview(path: Path, wish: str) -> tuple[bytes, str]:
    """The picture small on the wire: "webp;90", "jpeg;50"; webp for anything else."""
    kind, _, quality = wish.partition(";")
    kind = kind if kind in ("webp", "jpeg") else "webp"
    buffer = io.BytesIO()
    with Image.open(path) as image:
        number = int(quality) if quality.isdigit() else 90
        image.convert("RGB").save(buffer, kind.upper(), quality=number)
    return buffer.getvalue(), f"image/{kind}"


def _channel(path: Path, channel: str) -> bytes:
    make: dict[str, Callable[[Image.Image], Image.Image]] = {
        "rgb": lambda image: image.convert("RGB"),
        "a": lambda image: Image.merge("RGBA", [image.convert("RGBA").getchannel("A")] * 4),
    }
    buffer = io.BytesIO()
    with Image.open(path) as image:
        make[channel](image).save(buffer, "PNG")
    return buffer.getvalue()


async def _send_half(
    request: web.Request, path: Path, headers: dict[str, str]
) -> web.StreamResponse:
    """Promise the whole file, send half of it, close."""
    content = await asyncio.to_thread(path.read_bytes)
    answer = web.StreamResponse(headers=headers | {"Content-Length": str(len(content))})
    await answer.prepare(request)
    await answer.write(content[: len(content) // 2])
    drop(request)
    return answer


def _with_zeros(content: bytes) -> bytes:
    spoiled = min(2048, len(content) // 2)
    return content[:-spoiled] + bytes(spoiled)
