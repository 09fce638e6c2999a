"""The form that asks for a portrait, with the same limits as the API."""

from __future__ import annotations

import uuid
from typing import Any, Final

from django import forms
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile

from comfy import graph
from comfy.graph import FaceRequest
from jobs.photos import BadPhoto, Photo, read_photo
from jobs.serializers import LORA_NAME

PHOTO_TYPES: Final = ".jpg,.jpeg,.png,.webp,.gif,.bmp,.tif,.tiff"


class NumberField(forms.Field):
    """A number of a range; left empty it is None, which means the default."""

    def __init__(self, allowed: graph.Range, initial: float | None, **kwargs: Any) -> None:
        self.allowed = allowed
        super().__init__(required=False, initial=initial, **kwargs)

    def widget_attrs(self, widget: forms.Widget) -> dict[str, Any]:
        if not isinstance(widget, forms.NumberInput):
            return {}
        low, high, step = self.allowed.low, self.allowed.high, self.allowed.step
        return {"min": low, "max": high, "step": step or "any"}

    def to_python(self, value: Any) -> float | None:
        if value in self.empty_values:
            return None
        try:
            number = int(value) if self.allowed.step else float(value)
            self.allowed.check("number", number)
        except (ValueError, OverflowError) as exc:
            raise ValidationError(self._sentence()) from exc
        return number

    def _sentence(self) -> str:
        low, high, step = self.allowed.low, self.allowed.high, self.allowed.step
        kind = "whole number" if step else "number"
        return f"Give a {kind} from {low} to {high}" + (
            f", in steps of {step}." if step and step > 1 else "."
        )


def number(
    allowed: graph.Range, initial: float | None, label: str, help_text: str, **kwargs: Any
) -> NumberField:
    widget = kwargs.pop("widget", forms.NumberInput)
    return NumberField(allowed, initial, label=label, help_text=help_text, widget=widget)


def text_area(rows: int, **attrs: str) -> forms.Textarea:
    return forms.Textarea(attrs={"rows": rows, **attrs})


class PortraitForm(forms.Form):
    """`cleaned_data["photo"]` is a Photo; the rest, save `key`, are the params of `submit_portrait`."""

    # Tells a second look at the form from a second press of its button.
    key = forms.UUIDField(required=False, widget=forms.HiddenInput)
    photo = forms.FileField(
        label="Your photo",
        help_text="A clear photo of one face. JPEG, PNG, WebP, GIF, BMP or TIFF.",
        allow_empty_file=True,  # read_photo has a sentence for that
        widget=forms.FileInput(attrs={"accept": PHOTO_TYPES}),
        error_messages={"required": "Choose a photo.", "invalid": "Choose a photo."},
    )
    prompt = forms.CharField(
        label="What should the portrait show?",
        help_text="The scene, the light, the clothes, the style. The face comes from your photo.",
        max_length=graph.PROMPT_MAX_LENGTH,
        widget=text_area(4, placeholder="A watercolour portrait in a sunlit garden, soft light"),
        error_messages={"required": "Say what the portrait should show."},
    )
    width = number(graph.SIZE, FaceRequest.width, "Width", "Pixels, 64 to 2048 in steps of 8.")
    height = number(graph.SIZE, FaceRequest.height, "Height", "Pixels, 64 to 2048 in steps of 8.")
    likeness = number(
        graph.LIKENESS,
        FaceRequest.likeness,
        "Likeness",
        "How closely the features follow your photo, 0 to 5.",
    )
    face_weight = number(
        graph.FACE_WEIGHT,
        FaceRequest.face_weight,
        "Face weight",
        "How much the photo counts at all, 0 to 3; 0 ignores it.",
    )
    steps = number(
        graph.STEPS, FaceRequest.steps, "Steps", "1 to 150. More take longer and add detail."
    )
    cfg = number(
        graph.CFG,
        FaceRequest.cfg,
        "Prompt strength",
        "How strictly the prompt is followed (CFG), 0 to 30.",
    )
    count = number(graph.COUNT, FaceRequest.count, "Pictures", "How many to draw, 1 to 8.")
    seed = number(
        graph.SEED,
        None,
        "Seed",
        "The same seed and settings draw the same picture. Empty: a random one.",
        # A browser's number input rounds what is above 2^53.
        widget=forms.TextInput(attrs={"inputmode": "numeric"}),
    )
    negative_prompt = forms.CharField(
        label="What to avoid",
        help_text="Things the picture should not show.",
        max_length=graph.PROMPT_MAX_LENGTH,
        required=False,
        initial=graph.DEFAULT_NEGATIVE_PROMPT,
        widget=text_area(2),
    )
    lora = forms.CharField(
        label="LoRA",
        help_text="The file name of a style that the server has, if you want one.",
        max_length=LORA_NAME,
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    lora_strength = number(
        graph.LORA_STRENGTH, FaceRequest.lora_strength, "LoRA strength", "-2 to 2."
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["key"].initial = uuid.uuid4

    def clean_photo(self) -> Photo:
        file: UploadedFile[Any] = self.cleaned_data["photo"]
        try:
            return read_photo(
                file,
                max_bytes=settings.GENFLOW_PHOTO_MAX_BYTES,
                max_pixels=settings.GENFLOW_PHOTO_MAX_PIXELS,
            )
        except BadPhoto as exc:
            raise ValidationError(exc.message, code=exc.code) from exc

    def clean_lora(self) -> str | None:
        return self.cleaned_data["lora"] or None

    def params(self) -> dict[str, Any]:
        """Return what was asked, as `submit_portrait` takes it."""
        return {k: v for k, v in self.cleaned_data.items() if k not in ("key", "photo")}

    def more_settings(self) -> list[forms.BoundField]:
        """Those that need no thought for a first portrait."""
        return [field for field in self.visible_fields() if field.name not in ("photo", "prompt")]

    def has_errors_in_more_settings(self) -> bool:
        return any(field.errors for field in self.more_settings())
