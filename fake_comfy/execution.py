"""Runs the prompts: one after another, nodes in order, equal nodes from the last run's cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from typing import Any, Final

from fake_comfy import errors, pictures
from fake_comfy.faults import Faults
from fake_comfy.files import Files
from fake_comfy.node_class import NodeClass, Result
from fake_comfy.nodes import CLASSES
from fake_comfy.queue import Item, Json, PromptQueue, Stats, milliseconds
from fake_comfy.sockets import Sockets
from fake_comfy.validation import is_link

logger = logging.getLogger(__name__)

NODES: Final = {cls.name: cls for cls in CLASSES}
# Between execution_success and the history entry: a client that looks in between finds nothing.
SETTLE_SECONDS: Final = 0.005
LATE_HISTORY_SECONDS: Final = 2.0
NO_STATE: Final = {"value": 0.0, "max": 1.0, "state": "running"}
HALF_WAY: Final = {
    "oom": errors.OUT_OF_MEMORY,
    "runtime_error": errors.RUNTIME_ERROR,
    "cuda_broken": errors.BROKEN_CONTEXT,
}


class Engine:
    """The worker thread of the real server, here a task."""

    def __init__(
        self,
        *,
        files: Files,
        faults: Faults,
        queue: PromptQueue,
        sockets: Sockets,
        stats: Stats,
        seconds: float,
    ) -> None:
        self.files, self.faults, self.queue = files, faults, queue
        self.sockets, self.stats = sockets, stats
        self.seconds = seconds
        self.late: set[asyncio.Task[None]] = set()
        self.reset()

    def reset(self) -> None:
        self.interrupted = False
        self.broken = False
        self.cache: dict[str, Result] = {}
        self.current: tuple[str, str] | None = None  # client id, node that it was last told of

    async def work(self) -> None:
        try:
            while True:
                await self._work_on(await self.queue.take())
        except errors.WorkerDied as exc:
            logger.warning("the worker died: %s", exc)
        except Exception:
            # A bug of ours. The real worker thread would be gone as well, but should not go quietly.
            logger.exception("the worker died")

    def interrupt(self) -> None:
        """Stop whatever runs, at its next step. Forgotten if a run starts first, as in the real server."""
        if self.queue.running is not None and self.faults.take("lose_interrupt"):
            return
        self.interrupted = True

    async def _work_on(self, item: Item) -> None:
        run = PromptRun(self, item)
        self.interrupted = False
        await run.execute()
        await asyncio.sleep(SETTLE_SECONDS)
        self._record(run)
        self.current = None
        if run.client_id:
            ended = {"node": None, "prompt_id": run.prompt_id}
            self.sockets.send("executing", ended, run.client_id)

    def _record(self, run: PromptRun) -> None:
        """Write the history entry, if no fault forbids."""
        late = self.faults.take("late_history")
        if late or self.faults.take("forget_history"):
            self.queue.end(None)
        else:
            self.queue.end(run.entry())
        if late:
            delay = LATE_HISTORY_SECONDS if late.seconds is None else late.seconds
            task = asyncio.create_task(self._remember_late(run, delay))
            self.late.add(task)
            task.add_done_callback(self.late.discard)

    async def _remember_late(self, run: PromptRun, delay: float) -> None:
        await asyncio.sleep(delay)
        self.queue.remember(run.prompt_id, run.entry())


class PromptRun:
    """One run of a prompt."""

    def __init__(self, engine: Engine, item: Item) -> None:
        self._engine = engine
        self.item = item
        _, self.prompt_id, self.graph, extra_data, self._wanted = item
        self.files, self.faults = engine.files, engine.faults
        self.client_id: str | None = extra_data.get("client_id")
        self._extra_pnginfo: Json | None = extra_data.get("extra_pnginfo")
        self.png_chunks = {"prompt": self.graph, **(self._extra_pnginfo or {})}
        self._previews = extra_data.get("preview_method") not in (None, "none", "default")
        self._results: dict[str, Result] = {}
        self._executed: list[str] = []
        self._states: dict[str, Json] = {}
        self._messages: list[tuple[str, Json]] = []
        self._outputs: Json = {}
        self._meta: Json = {}
        self._node = ""

    async def execute(self) -> None:
        """Run the graph to its end, whatever that is."""
        counters = self._engine.stats.of(self.prompt_id)
        self._tell("execution_start")
        try:
            await self._run_nodes()
        except errors.NodeFailed as exc:
            self._tell("execution_error", self._failure(exc))
        except errors.Interrupted:
            counters.interrupted += 1
            self._tell("execution_interrupted", self._where())
            return
        else:
            self._tell("execution_success")
        counters.finished += 1

    def entry(self) -> Json:
        """The history entry."""
        success = self._messages[-1][0] == "execution_success"
        return {
            "prompt": self.item,
            "outputs": self._outputs,
            "status": {
                "status_str": "success" if success else "error",
                "completed": success,
                "messages": self._messages,
            },
            "meta": self._meta,
        }

    async def sample(self, steps: int, sitting: pictures.Sitting) -> None:
        """Take the sampler's time, with a progress event each step."""
        self._engine.stats.of(self.prompt_id).executed += 1
        for step in range(steps):
            await asyncio.sleep(self._engine.seconds / steps)
            if step == steps // 2:
                self._suffer()
            self._stop_if_interrupted()
            await self._show_progress(step + 1, steps, sitting)

    async def _run_nodes(self) -> None:
        order = _in_order(self.graph, self._wanted)
        signatures = _signatures(self.graph, order, self.files)
        known = self._engine.cache
        cached = [n for n in self.graph if n in order and signatures[n] in known]
        self._engine.cache = {signatures[n]: known[signatures[n]] for n in cached}
        self._tell("execution_cached", {"nodes": cached})
        self._count_cached(cached)
        for node_id in order:
            if node_id in cached:
                self._replay(node_id, known[signatures[node_id]])
            else:
                result = await self._run_node(node_id)
                # Without files there is nothing worth keeping of a node that saves.
                if result.ui is not None or not self._class_of(node_id).is_output:
                    self._engine.cache[signatures[node_id]] = result

    def _count_cached(self, cached: list[str]) -> None:
        if any(self._class_of(node_id).name == "KSampler" for node_id in cached):
            self._engine.stats.of(self.prompt_id).cached += 1

    def _replay(self, node_id: str, result: Result) -> None:
        """Take a result from the cache. Its outputs reach the history only if a client listens (as in v0.26)."""
        self._results[node_id] = result
        if result.ui is not None and self.client_id:
            self._show_outputs(node_id, result.ui)
            self._set_state(node_id, value=1, max=1, state="finished")

    async def _run_node(self, node_id: str) -> Result:
        self._node = node_id
        self._stop_if_interrupted()
        self._set_state(node_id, **NO_STATE)
        self._tell_client("executing", {"node": node_id, "display_node": node_id})
        self._engine.current = (self.client_id, node_id) if self.client_id else None
        if self._engine.broken:
            raise errors.NodeFailed(*errors.BROKEN_CONTEXT)
        result = await self._work(node_id)
        if result.ui is not None:
            self._show_outputs(node_id, result.ui)
        self._finish_state(node_id)
        self._results[node_id] = result
        self._executed.append(node_id)
        return result

    async def _work(self, node_id: str) -> Result:
        try:
            return await self._class_of(node_id).work(self, **self._inputs(node_id))
        except errors.RunEnded:
            raise
        except Exception as exc:  # whatever a node raises ends its run, never the worker
            raise errors.NodeFailed(type(exc).__name__, str(exc)) from exc

    def _inputs(self, node_id: str) -> Json:
        given = _known_inputs(self.graph[node_id])
        return {name: self._value(value) for name, value in given.items()}

    def _value(self, value: Any) -> Any:
        return self._results[value[0]].values[value[1]] if is_link(value) else value

    def _class_of(self, node_id: str) -> NodeClass:
        return NODES[self.graph[node_id]["class_type"]]

    def _stop_if_interrupted(self) -> None:
        if self._engine.interrupted:
            raise errors.Interrupted

    def _suffer(self) -> None:
        """What may go wrong half-way through the sampler."""
        if self.faults.take("ws_drop"):
            self._engine.sockets.cut()
        if self.faults.take("foreign_interrupt"):
            raise errors.Interrupted
        if self.faults.take("zombie"):
            raise errors.WorkerDied("a node took it along")
        for fault, error in HALF_WAY.items():
            if self.faults.take(fault):
                self._engine.broken |= fault == "cuda_broken"
                raise errors.NodeFailed(*error)

    async def _show_progress(self, value: int, steps: int, sitting: pictures.Sitting) -> None:
        self._set_state(self._node, value=value, max=steps, state="running")
        if self._previews:
            image = await asyncio.to_thread(pictures.preview_jpeg, sitting, value / steps)
            about = _names(self._node, self.prompt_id)
            self._engine.sockets.send_preview(image, self.client_id, about)
        progress = {"value": value, "max": steps, "prompt_id": self.prompt_id, "node": self._node}
        self._engine.sockets.send("progress", progress, self.client_id)

    def _set_state(self, node_id: str, **state: Any) -> None:
        self._states[node_id] = {**state, **_names(node_id, self.prompt_id)}
        about = {"prompt_id": self.prompt_id, "nodes": self._states}
        self._engine.sockets.send("progress_state", about, self.client_id)

    def _finish_state(self, node_id: str) -> None:
        maximum = self._states[node_id]["max"]
        self._set_state(node_id, value=maximum, max=maximum, state="finished")

    def _show_outputs(self, node_id: str, ui: Json) -> None:
        self._outputs[node_id] = ui
        self._meta[node_id] = {
            "node_id": node_id,
            "display_node": node_id,
            "parent_node": None,
            "real_node_id": node_id,
        }
        shown = {"node": node_id, "display_node": node_id, "output": ui}
        self._tell_client("executed", shown)

    def _tell(self, event: str, about: Json | None = None) -> None:
        """Write a message of the run's, and send it. An interruption without a client is told to everybody."""
        message = {"prompt_id": self.prompt_id, **(about or {}), "timestamp": milliseconds()}
        self._messages.append((event, message))
        if self.client_id or event == "execution_interrupted":
            self._engine.sockets.send(event, message, self.client_id)

    def _tell_client(self, event: str, about: Json) -> None:
        if self.client_id:
            message = {**about, "prompt_id": self.prompt_id}
            self._engine.sockets.send(event, message, self.client_id)

    def _where(self) -> Json:
        node_type = self.graph[self._node]["class_type"]
        return {"node_id": self._node, "node_type": node_type, "executed": self._executed}

    def _failure(self, failed: errors.NodeFailed) -> Json:
        inputs = self._inputs(self._node)
        if self._class_of(self._node).hidden:
            inputs |= {"prompt": self.graph, "extra_pnginfo": self._extra_pnginfo}
        return {
            **self._where(),
            "exception_message": failed.message,
            "exception_type": failed.exception_type,
            "traceback": ['  File "/srv/ComfyUI/execution.py", line 542, in execute\n'],
            "current_inputs": {name: [_plain(value)] for name, value in inputs.items()},
            "current_outputs": list(self.graph),
        }


def _in_order(graph: Json, wanted: list[str]) -> list[str]:
    """The nodes that the wanted outputs need, each after what it needs itself."""
    order: dict[str, None] = {}

    def visit(node_id: str) -> None:
        if node_id not in order:
            for value in _known_inputs(graph[node_id]).values():
                if is_link(value):
                    visit(value[0])
            order[node_id] = None

    for node_id in wanted:
        visit(node_id)
    return list(order)


def _known_inputs(node: Json) -> Json:
    """The inputs that the class of a node has: what else a graph gives, nobody has checked."""
    cls = NODES[node["class_type"]]
    given = node["inputs"]
    return {name: given[name] for name in cls.required | cls.optional if name in given}


def _signatures(graph: Json, order: list[str], files: Files) -> dict[str, str]:
    """A hash of each node, of its inputs and of all that it depends on: equal ones give equal results."""
    found: dict[str, str] = {}
    for node_id in order:
        node = graph[node_id]
        inputs = {
            name: [found[value[0]], value[1]] if is_link(value) else value
            for name, value in _known_inputs(node).items()
        }
        text = json.dumps([node["class_type"], inputs, _file_hash(node, files)])
        found[node_id] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _file_hash(node: Json, files: Files) -> str | None:
    file_input = NODES[node["class_type"]].file_input
    if file_input is None:
        return None
    path = files.locate_input(str(node["inputs"][file_input]))
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else None


def _names(node_id: str, prompt_id: str) -> Json:
    return {
        "node_id": node_id,
        "prompt_id": prompt_id,
        "display_node_id": node_id,
        "parent_node_id": None,
        "real_node_id": node_id,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else str(value)
