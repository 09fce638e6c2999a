"""The forms of the pages. The one that asks for a portrait has the same limits as the API."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from django import forms
from django.contrib.auth import authenticate
from django.contrib.auth.forms import PasswordChangeForm
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.files.uploadedfile import UploadedFile
from django.db.models import QuerySet
from django.http import HttpRequest

from comfy import graph
from comfy.graph import FaceRequest
from jobs.catalog import loras_on_offer
from jobs.developing import BadPhoto, Photo
from jobs.models import Job
from jobs.photos import photo_rules, read_photo
from jobs.portraits import PARAMS
from jobs.serializers import LORA_NAME

PHOTO_TYPES: Final = ".jpg,.jpeg,.png,.webp,.heic,.heif,.avif,.gif,.bmp,.tif,.tiff"
# Each is about what SD 1.5 was trained on.
SIZES: Final = {"512x512": "Square", "512x768": "Portrait", "768x512": "Landscape"}
OWN_SIZE: Final = "own"
# What needs no thought for a first portrait.
FOLDED_AWAY: Final = set(PARAMS) - {"prompt", "width", "height"}
EXAMPLES: Final = (
    (
        "By the sea",
        "Portrait by the sea at dusk, wind in the hair, soft rim light, 85mm, film grain",
    ),
    (
        "In the studio",
        "Studio portrait, grey seamless backdrop, one large softbox, calm expression, sharp eyes",
    ),
    (
        "Oil on canvas",
        "Oil painting in the manner of the Dutch masters, dark ground, window light from the left",
    ),
    (
        "Astronaut",
        "Astronaut in a white suit, helmet under the arm, golden hour, shallow depth of field",
    ),
    ("Watercolour", "Loose watercolour portrait in a sunlit garden, pale greens, paper texture"),
)


class NumberField(forms.Field):
    """A number of a range; left empty it is None, which means the default."""

    def __init__(self, allowed: graph.Range, initial: float | None, **kwargs: Any) -> None:
        self.allowed = allowed
        super().__init__(required=False, initial=initial, **kwargs)

    def widget_attrs(self, widget: forms.Widget) -> dict[str, Any]:
        if not isinstance(widget, forms.NumberInput):
            return {}
        low, high, step = self.allowed.low, self.allowed.high, self.allowed.step
        return {"min": low, "max": high, "step": widget.attrs.get("step", step or "any")}

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


def slider(allowed: graph.Range, initial: float, label: str, help_text: str) -> NumberField:
    widget = forms.NumberInput(attrs={"type": "range", "step": 0.05})
    return number(allowed, initial, label, help_text, widget=widget)


def text_area(rows: int, **attrs: str) -> forms.Textarea:
    return forms.Textarea(attrs={"rows": rows, **attrs})


class PortraitForm(forms.Form):
    """What a portrait is to be, of a new photo or that of an earlier portrait.

    `cleaned_data` has either `photo` (a Photo) or `like` (a Job); `params` is what `submit_portrait` takes.
    """

    # Tells a second look at the form from a second press of its button.
    key = forms.UUIDField(required=False, widget=forms.HiddenInput)
    like = forms.ModelChoiceField(
        queryset=Job.objects.none(),
        required=False,
        widget=forms.HiddenInput,
        error_messages={"invalid_choice": "The earlier portrait was deleted, and its photo too."},
    )
    photo = forms.FileField(
        label="Your photo",
        help_text="A clear photo of one face. JPEG, PNG, WebP, HEIC, AVIF, GIF, BMP or TIFF.",
        required=False,  # if there is an earlier one
        allow_empty_file=True,  # read_photo has a sentence for that
        widget=forms.FileInput(attrs={"accept": PHOTO_TYPES}),
        error_messages={"invalid": "Choose a photo."},
    )
    prompt = forms.CharField(
        label="What should the portrait show?",
        help_text="The scene, the light, the clothes, the style. The face comes from your photo.",
        max_length=graph.PROMPT_MAX_LENGTH,
        widget=text_area(4, placeholder="A watercolour portrait in a sunlit garden, soft light"),
        error_messages={"required": "Say what the portrait should show."},
    )
    size = forms.ChoiceField(
        label="Format",
        choices=[*SIZES.items(), (OWN_SIZE, "Own size")],
        required=False,
        initial=f"{FaceRequest.width}x{FaceRequest.height}",
        widget=forms.RadioSelect,
    )
    width = number(graph.SIZE, FaceRequest.width, "Width", "Pixels, 64 to 2048 in steps of 8.")
    height = number(graph.SIZE, FaceRequest.height, "Height", "Pixels, 64 to 2048 in steps of 8.")
    count = number(graph.COUNT, FaceRequest.count, "Pictures", "How many to draw, 1 to 8.")
    likeness = slider(
        graph.LIKENESS,
        FaceRequest.likeness,
        "Likeness",
        "How closely the features follow your photo, 0 to 5.",
    )
    face_weight = slider(
        graph.FACE_WEIGHT,
        FaceRequest.face_weight,
        "Face weight",
        "How much the photo counts at all, 0 to 3; 0 ignores it.",
    )
    lora = forms.CharField(
        label="Style (LoRA)",
        help_text="The file name of a style that the server has, if you want one.",
        max_length=LORA_NAME,
        required=False,
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    lora_strength = slider(
        graph.LORA_STRENGTH,
        FaceRequest.lora_strength,
        "Style strength",
        "How much of that style, -2 to 2.",
    )
    seed = number(
        graph.SEED,
        None,
        "Seed",
        "The same seed and settings draw the same picture. Empty: a random one.",
        # A browser's number input rounds what is above 2^53.
        widget=forms.TextInput(attrs={"inputmode": "numeric", "autocomplete": "off"}),
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
    negative_prompt = forms.CharField(
        label="What to avoid",
        help_text="Things the picture should not show.",
        max_length=graph.PROMPT_MAX_LENGTH,
        required=False,
        initial=graph.DEFAULT_NEGATIVE_PROMPT,
        widget=text_area(2),
    )

    def __init__(
        self, data: Any = None, files: Any = None, *, own: QuerySet[Job], **kwargs: Any
    ) -> None:
        """own: the jobs that the one who fills in the form may start from."""
        if data is not None and data.get("size") in SIZES:  # whatever is in the fields behind it
            data = data.copy()
            data["width"], data["height"] = data["size"].split("x")
        super().__init__(data, files, **kwargs)
        self.fields["key"].initial = uuid.uuid4
        if loras := loras_on_offer():
            named = [(name, name.rpartition(".")[0] or name) for name in loras]
            self.fields["lora"].widget = forms.Select(choices=[("", "None"), *named])
            self.fields["lora"].help_text = "A style that the server has."
        like: Any = self.fields["like"]
        like.queryset = own.filter(kind=Job.Kind.PORTRAIT).exclude(inputs=None)

    def clean_photo(self) -> Photo | None:
        file: UploadedFile[Any] | None = self.cleaned_data["photo"]
        if file is None:
            if self.cleaned_data.get("like") is None:
                raise ValidationError("Choose a photo.")
            return None
        try:
            return read_photo(file, photo_rules())
        except BadPhoto as exc:
            raise ValidationError(exc.message, code=exc.code) from exc

    def clean_lora(self) -> str | None:
        return self.cleaned_data["lora"] or None

    def params(self) -> dict[str, Any]:
        """Return what was asked, as `submit_portrait` takes it."""
        return {name: self.cleaned_data[name] for name in PARAMS}

    def earlier(self) -> Job | None:
        """Return the portrait whose photo is taken if no other is chosen."""
        return self.cleaned_data.get("like") if self.is_bound else self.initial.get("like")

    def has_errors_in_options(self) -> bool:
        return bool(self.errors.keys() & FOLDED_AWAY)


def form_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form's values for what an earlier portrait was asked for, but for the seed: a new one is to differ."""
    size = f"{params.get('width')}x{params.get('height')}"
    values = {name: params.get(name) for name in PARAMS if name != "seed"}
    return values | {"size": size if size in SIZES else OWN_SIZE}


class PasswordAgain(forms.Form):
    """Asked before what cannot be undone. Wrong ones count as those at the login do."""

    password = forms.CharField(
        label="Your password",
        strip=False,
        widget=forms.PasswordInput(attrs={"autocomplete": "current-password"}),
    )

    def __init__(self, data: Any = None, *, request: HttpRequest) -> None:
        super().__init__(data)
        self.request = request

    def clean_password(self) -> str:
        return checked_password(self.request, self.cleaned_data["password"])


class NewPassword(PasswordChangeForm):
    """Django's, with an old password that counts as one at the login does."""

    def __init__(self, *args: Any, request: HttpRequest, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request = request

    def clean_old_password(self) -> str:
        return checked_password(self.request, self.cleaned_data["old_password"])


def checked_password(request: HttpRequest, password: str) -> str:
    """Return the password if it is that of whoever is logged in, or raise ValidationError."""
    assert isinstance(request.user, User)
    if authenticate(request, username=request.user.get_username(), password=password) is None:
        raise ValidationError("That is not your password.")
    return password
