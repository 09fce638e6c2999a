"""What can go wrong with a ComfyUI server, sorted by what it means for the one who asked.

* ComfyError
  + NotConnected    nothing was sent: refused, DNS, TLS, connect timeout      (backend)
  + AccessDenied    401, 403 or a redirect: the server's setup keeps us out   (backend)
  + BackendStuck    it answers, but its queue does not move                   (backend)
    + RunStuck      it runs this prompt, and shows no sign of life            (backend)
  + BrokenContext   its GPU context is broken: nothing runs until a restart   (backend)
  + NoAnswer        sent, then silence: it may or may not have been done      (temporary)
  + ServerTrouble   429 or 5xx: it may or may not have been done              (temporary)
  + BadAnswer       an answer that says nothing: HTML, half a JSON, wrong id  (temporary)
  + Interrupted     somebody else stopped the run                             (temporary)
  + OutputMissing   the run ended well, but its picture is not there          (temporary)
  + BadPicture      the picture is cut, cannot be decoded, or is one colour   (temporary)
  + RunFailed       the run failed for any other reason                       (temporary)
  + TooLarge        413: the server does not take so much                     (permanent)
  + OutputTooLarge  a finished file is larger than we take                    (permanent)
  + KeyLost         the job needs an API key that we do not have any more     (permanent)
  + GraphRefused    the same graph will be refused again                      (permanent)
  + NodeMissing     a node class is not installed on this server              (permanent)
  + ModelMissing    a model file is not there on this server                  (permanent)
  + OutOfMemory     the GPU's memory does not hold this picture               (permanent)
  + NoFace          no face was found in the photo                            (permanent)
  + BadPhoto        the photo cannot be read                                  (permanent)
  + InputMissing    the uploaded file is gone: upload it again                (lost)
  + PromptLost      the server no longer knows this prompt                    (lost)
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from comfy.text import clean_text

MESSAGE_LIMIT = 1_000  # characters
DETAIL_LIMIT = 20_000  # characters: a traceback may come with megabytes


class ErrorKind(StrEnum):
    """What to do about an error: try later, give up, send again, or rest the server."""

    TEMPORARY = "temporary"
    PERMANENT = "permanent"
    LOST = "lost"
    BACKEND = "backend"


class ComfyError(Exception):
    """`message` and `detail` are for the operator, `user_message` (no paths, no addresses) for the user."""

    kind: ClassVar[ErrorKind] = ErrorKind.TEMPORARY
    code: ClassVar[str] = "unknown"
    user_message: ClassVar[str] = "The picture could not be made this time. Please try again."

    def __init__(
        self,
        message: str,
        *,
        node_id: str | None = None,
        class_type: str | None = None,
        detail: str = "",
        retry_after: float | None = None,  # seconds, from 0 to an hour
    ) -> None:
        self.message = clean_text(message, MESSAGE_LIMIT).strip() or type(self).__name__
        self.node_id = node_id
        self.class_type = class_type
        self.detail = clean_text(detail, DETAIL_LIMIT)
        self.retry_after = retry_after
        super().__init__(self.message)


class NotConnected(ComfyError):
    """No connection was made, so nothing was sent."""

    kind = ErrorKind.BACKEND
    code = "backend_unreachable"
    user_message = "The image server cannot be reached. Your job waits and goes on when it is back."


class AccessDenied(ComfyError):
    """401, 403 or a redirect: an operator has to look at the server's setup."""

    kind = ErrorKind.BACKEND
    code = "backend_unreachable"
    user_message = "The image server does not let us in. Your job waits until an operator fixes it."


class BackendStuck(ComfyError):
    """The server answers, but shows no sign of work."""

    kind = ErrorKind.BACKEND
    code = "backend_stuck"
    user_message = "The image server hangs. Your job waits and goes on when it works again."


class RunStuck(BackendStuck):
    """The server runs the prompt and shows no sign of life: the prompt may be why."""

    user_message = "The image server hung while drawing this. Please try again with other settings."


class BrokenContext(ComfyError):
    """The GPU context is broken: every later run fails too, until the server is restarted."""

    kind = ErrorKind.BACKEND
    code = "backend_unreachable"
    user_message = "The image server needs a restart. Your job waits and goes on after it."


class NoAnswer(ComfyError):
    """The request was sent and no whole answer came: it may have been done or not."""

    user_message = "The image server gave no answer. Please try again later."


class ServerTrouble(ComfyError):
    """429 or 5xx. Even a 500 does not prove that nothing was done."""

    user_message = "The image server is in trouble. Please try again later."


class BadAnswer(ComfyError):
    """An answer that does not say what was asked: whatever was asked may have been done or not."""

    user_message = "The image server gave an answer that makes no sense. Please try again later."


class Interrupted(ComfyError):
    """The run was stopped, by whomever."""

    user_message = "The picture was stopped on the image server. Please try again."


class OutputMissing(ComfyError):
    """The run ended well, but there is no such picture on the server."""

    code = "bad_picture"
    user_message = "The finished picture could not be found. Please try again."


class BadPicture(ComfyError):
    """The picture is not whole, or shows nothing."""

    code = "bad_picture"
    user_message = "The finished picture was damaged or empty. Please try again with another seed."


class RunFailed(ComfyError):
    """The run failed in a way that we know nothing about."""


class TooLarge(ComfyError):
    """413, from the server or from a proxy before it."""

    kind = ErrorKind.PERMANENT
    code = "bad_photo"
    user_message = "The photo is too big for the image server. Please send a smaller one."


class OutputTooLarge(ComfyError):
    """The run ended well, but one of its files has more bytes or pixels than we take."""

    kind = ErrorKind.PERMANENT
    code = "output_too_large"
    user_message = (
        "A finished file is larger than this site takes. Make it smaller, or ask an operator."
    )


class KeyLost(ComfyError):
    """The graph must not be sent without its API key, which is in no memory of ours."""

    kind = ErrorKind.PERMANENT
    code = "api_key_lost"
    user_message = (
        "The API key that came with this job is kept in memory only, and is there no more."
        " Send the job again, with its key."
    )


class GraphRefused(ComfyError):
    """The server will not run this graph, now or later."""

    kind = ErrorKind.PERMANENT
    code = "graph_refused"
    user_message = "The image server does not accept these settings. Please change them."


class NodeMissing(ComfyError):
    """A node class (or the Python package behind it) is not installed on this server."""

    kind = ErrorKind.PERMANENT
    code = "node_missing"
    user_message = "The image server lacks a part that this job needs. Please tell an operator."


class ModelMissing(ComfyError):
    """A model file is not on this server; another one may have it."""

    kind = ErrorKind.PERMANENT
    code = "model_missing"
    user_message = (
        "The image server lacks a model that this job needs. Choose another or tell an operator."
    )


class OutOfMemory(ComfyError):
    """Permanent: the same picture would not fit the next time either."""

    kind = ErrorKind.PERMANENT
    code = "out_of_memory"
    user_message = (
        "The picture did not fit into the GPU's memory. Choose a smaller size or fewer at once."
    )


class NoFace(ComfyError):
    """InsightFace sees no face in the photo."""

    kind = ErrorKind.PERMANENT
    code = "no_face"
    user_message = "No face was found in the photo. Use one that shows a face from the front, with room around it."


class BadPhoto(ComfyError):
    """The server cannot read the uploaded photo."""

    kind = ErrorKind.PERMANENT
    code = "bad_photo"
    user_message = "The photo cannot be read. Please send another one, as JPEG or PNG."


class InputMissing(ComfyError):
    """The uploaded file is not (or no longer) on this server: it has to be sent again."""

    kind = ErrorKind.LOST
    code = "bad_photo"
    user_message = "The photo was lost on the image server. Please send it again."


class PromptLost(ComfyError):
    """Neither queue nor history knows the prompt, and no output file is there."""

    kind = ErrorKind.LOST
    code = "prompt_lost"
    user_message = "The image server lost the job several times. Please try again later."
