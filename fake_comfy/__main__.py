"""python -m fake_comfy: the server until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fake_comfy.faults import FAULTS, Fault
from fake_comfy.server import LOOPBACK, Server


def main() -> None:
    options = _parse()
    with _data_folder(options.data) as root:
        asyncio.run(_serve(options, root))


async def _serve(options: argparse.Namespace, root: Path) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    server = Server(root, host=options.host, port=options.port, seconds=options.seconds)
    async with server:
        for fault in options.fault:
            await server.add_fault(fault)
        print(f"fake_comfy {server.url}", flush=True)  # noqa: T201 - what callers wait for
        print(f"control {server.control.url}", flush=True)  # noqa: T201
        await ended.wait()


def _parse() -> argparse.Namespace:
    width = max(map(len, FAULTS))
    table = "\n".join(
        f"  {name:{width}}  {meaning.does}\n  {'':{width}}  ({meaning.origin})"
        for name, meaning in FAULTS.items()
    )
    parser = argparse.ArgumentParser(
        prog="fake_comfy",
        description="A ComfyUI that fails on purpose.",
        epilog=f"faults (TIMES: how often, 1 if not given; null: until cleared):\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--host", default=LOOPBACK, help=f"address to listen on ({LOOPBACK})")
    parser.add_argument("--port", type=int, required=True, help="0: any free one")
    parser.add_argument("--seconds", type=float, default=2, help="what a sampler takes (2)")
    parser.add_argument("--fault", action="append", type=_fault, default=[], metavar="NAME[:TIMES]")
    parser.add_argument(
        "--data", type=Path, help="folder of input, output and temp (a passing one)"
    )
    return parser.parse_args()


def _fault(text: str) -> Fault:
    try:
        return Fault.parse(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc


@contextmanager
def _data_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    root = Path(tempfile.mkdtemp(prefix="fake_comfy-"))
    try:
        yield root
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
