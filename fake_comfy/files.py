"""The three folders of a ComfyUI: input (uploads), output (pictures), temp (previews; wiped at every start)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Final

# Where messages say that the folders are, as a real server tells its paths.
SHOWN_ROOT: Final = "/srv/ComfyUI"
FOLDERS: Final = ("input", "output", "temp")


class OutsideFolder(Exception):
    """A name that leads out of its folder."""


class Files:
    """The folders below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.make_folders()

    def make_folders(self) -> None:
        for name in FOLDERS:
            (self.root / name).mkdir(parents=True, exist_ok=True)

    def wipe(self, *folders: str) -> None:
        for name in folders:
            shutil.rmtree(self.folder(name))
        self.make_folders()

    def folder(self, kind: str) -> Path:
        """The folder of a `type`. Raises KeyError for an unknown one."""
        if kind not in FOLDERS:
            raise KeyError(kind)
        return self.root / kind

    def store_upload(
        self, content: bytes, name: str, subfolder: str, kind: str, *, overwrite: bool
    ) -> str:
        """Write an upload; return the name it got: other bytes under a name that is taken become "name (1).png".

        Raises OutsideFolder, KeyError for an unknown kind, and OSError for a name that cannot be written.
        """
        top = self.folder(kind)
        folder = Path(os.path.normpath(top / subfolder))
        path = Path(os.path.normpath(folder / name.lstrip("/")))
        if not path.is_relative_to(top):
            raise OutsideFolder(path)
        folder.mkdir(parents=True, exist_ok=True)
        if not overwrite:
            path = _free_path(path, content)
        path.write_bytes(content)
        return path.name

    def locate_input(self, annotated: str) -> Path | None:
        """The file that a LoadImage value means ("sub/name.png", "name.png [temp]"), or None if it is not there."""
        name, kind = split_annotation(annotated)
        top = self.folder(kind or "input")
        path = Path(os.path.normpath(top / name))
        absolute = Path(name).is_absolute()
        return path if path.is_file() and (absolute or path.is_relative_to(top)) else None

    def locate_view(self, name: str, kind: str, subfolder: str) -> Path | None:
        """The file that GET /view means, or None. Raises OutsideFolder, and KeyError for an unknown kind."""
        top = self.folder(kind)
        folder = Path(os.path.normpath(top / subfolder))
        if not folder.is_relative_to(top):
            raise OutsideFolder(folder)
        path = folder / Path(name).name
        return path if path.is_file() else None

    def input_names(self) -> list[str]:
        """What everybody can see: the files of the input folder, without its subfolders."""
        return sorted(path.name for path in self.folder("input").iterdir() if path.is_file())

    def next_output(self, prefix: str, kind: str) -> tuple[Path, str, str, int]:
        """Where a prefix saves: folder, subfolder, file name without counter, next counter (max + 1 of the folder).

        Raises OutsideFolder with the real server's message.
        """
        top = self.folder(kind)
        normal = os.path.normpath(prefix)
        subfolder, stem = os.path.split(normal)
        folder = Path(os.path.normpath(top / subfolder))
        if not folder.is_relative_to(top):
            raise OutsideFolder(_outside_message(kind, folder, top))
        folder.mkdir(parents=True, exist_ok=True)
        counter = re.compile(re.escape(stem) + r"_(\d+)", re.IGNORECASE)
        found = (counter.match(path.name) for path in folder.iterdir())
        return folder, subfolder, stem, max((int(m[1]) for m in found if m), default=0) + 1


def split_annotation(name: str) -> tuple[str, str | None]:
    """ "a.png [temp]" -> ("a.png", "temp"); a name without a folder's -> (name, None)."""
    for kind in FOLDERS:
        if name.endswith(f" [{kind}]"):
            return name[: -len(kind) - 3], kind
    return name, None


def shown_path(annotated: str) -> str:
    """The path of an input file as the server's messages tell it."""
    name, kind = split_annotation(annotated)
    return os.path.normpath(f"{SHOWN_ROOT}/{kind or 'input'}/{name}")


def _free_path(path: Path, content: bytes) -> Path:
    """`path`, if it is free or holds these very bytes; else the first "name (n)" that is or does."""
    candidate, number = path, 0
    while candidate.exists() and candidate.read_bytes() != content:
        number += 1
        candidate = path.with_name(f"{path.stem} ({number}){path.suffix}")
    return candidate


def _outside_message(kind: str, folder: Path, top: Path) -> str:
    shown = os.path.normpath(f"{SHOWN_ROOT}/{kind}/{os.path.relpath(folder, top)}")
    return (
        "**** ERROR: Saving image outside the output folder is not allowed.\n"
        f" full_output_folder: {shown}\n         output_dir: {SHOWN_ROOT}/{kind}\n"
        f"         commonpath: {os.path.commonpath([shown, f'{SHOWN_ROOT}/{kind}'])}"
    )
