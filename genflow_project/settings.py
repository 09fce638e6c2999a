"""All settings of genflow, read once from the environment.

Every variable is listed in `.env.example` with its unit and meaning; a test compares the two.
"""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import environ
from django.core.exceptions import ImproperlyConfigured
from psycopg import IsolationLevel

BASE_DIR = Path(__file__).resolve().parent.parent


class Env(environ.Env):  # type: ignore[misc]  # it ships no types
    """Reads strictly (environ takes 1e6 for 16, and any word for False) and says which variable is wrong."""

    FALSE = ("false", "off", "no", "n", "0", "")

    @classmethod
    def parse_value(cls, value: str, cast: Any) -> Any:
        if cast is float:
            return float(value)
        if cast is list:
            return words(value)
        if cast is bool and value.lower() not in (*cls.BOOLEAN_TRUE_STRINGS, *cls.FALSE):
            raise ValueError(f"{value!r} is neither 1 nor 0")
        return super().parse_value(value, cast)

    def get_value(self, var: str, *args: Any, **options: Any) -> Any:
        try:
            return super().get_value(var, *args, **options)
        except ValueError as exc:
            raise ImproperlyConfigured(f"{var} makes no sense: {exc}.") from exc


def words(value: str) -> list[str]:
    return [word.strip() for word in value.split(",") if word.strip()]


env = Env()
try:
    Env.read_env(BASE_DIR / ".env")
except UnicodeDecodeError as exc:
    raise ImproperlyConfigured(f"{BASE_DIR / '.env'} is no text in UTF-8.") from exc

DEBUG: bool = env.bool("DEBUG", default=False)


def required_in_production(name: str, what: str, local: str) -> str:
    """Return the variable, its local default in DEBUG, or refuse to start and say what to set."""
    # Not by `env`, which takes a value that begins with $ for the name of another variable.
    if value := os.environ.get(name, ""):
        return value
    if DEBUG:
        return local
    raise ImproperlyConfigured(
        f"{name} is not set. Set it to {what}, or set DEBUG=1 on a developer's machine."
    )


SECRET_KEY = required_in_production(
    "SECRET_KEY", "a long random string that stays the same", "only-for-a-developers-machine"
)
ALLOWED_HOSTS = words(
    required_in_production(
        "ALLOWED_HOSTS",
        "the host names of this site, separated by commas",
        "localhost,127.0.0.1,[::1]",
    )
)

# Behind a proxy that ends TLS: the origins that forms may be posted from (https://example.com), and whether
# the proxy's X-Forwarded-Proto is to be believed.
CSRF_TRUSTED_ORIGINS: list[str] = env.list("CSRF_TRUSTED_ORIGINS", default=[])
BEHIND_TLS_PROXY: bool = env.bool("BEHIND_TLS_PROXY", default=False)
if BEHIND_TLS_PROXY:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
# Whether browsers keep the login to https. Over plain http they then send it to this machine alone.
SECURE_COOKIES: bool = env.bool("SECURE_COOKIES", default=BEHIND_TLS_PROXY or not DEBUG)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_COOKIES
CSRF_COOKIE_HTTPONLY = True  # our scripts take it from the form
SECURE_HSTS_SECONDS = 0 if DEBUG else 365 * 24 * 60 * 60
SILENCED_SYSTEM_CHECKS = [
    "security.W005",  # other hosts of the domain are not ours to decide about
    "security.W008",  # the proxy redirects to https: health checks and workers may stay on http
    "security.W021",  # see W005
]

# Where a page may load from, run scripts from and send to: from and to us, and nothing that is written into
# the page itself. `blob:` and `data:` are the preview of a chosen photo and of one being drawn.
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "blob:", "data:"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "base-uri": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
}


def database() -> dict[str, Any]:
    """Return the database of DATABASE_URL or, in DEBUG, the embedded one that all commands here share."""
    if required_in_production("DATABASE_URL", "postgres://user:password@host/name", "embedded") != (
        "embedded"
    ):
        try:
            config: dict[str, Any] = env.db_url("DATABASE_URL")
        except ValueError:  # its words could be of the password
            raise ImproperlyConfigured(
                "DATABASE_URL makes no sense: write postgres://user:password@host:5432/name, "
                "with each special character of the password as %xx."
            ) from None
        if config.get("ENGINE") != "django.db.backends.postgresql":
            raise ImproperlyConfigured("DATABASE_URL must begin with postgres://")
    else:
        from genflow_project import embedded_postgres

        try:
            config = embedded_postgres.database(BASE_DIR / "var")
        except embedded_postgres.EmbeddedPostgresError as exc:
            raise ImproperlyConfigured(str(exc)) from exc
    # No connection may hang: not while connecting, on a dead network, or in a statement.
    config.setdefault("OPTIONS", {}).update(
        connect_timeout=5,
        keepalives_idle=10,
        keepalives_interval=5,
        keepalives_count=3,
        tcp_user_timeout=15_000,
        application_name="genflow",
        # A count after a lock must see what the lock waited for, whatever the server's default. The option below
        # says it for statements outside of transactions; a pooler may drop it.
        isolation_level=IsolationLevel.READ_COMMITTED,
        options="-c statement_timeout=30000 -c idle_in_transaction_session_timeout=10000"
        r" -c default_transaction_isolation=read\ committed",
    )
    # A pooler in transaction mode cannot keep a server-side cursor.
    return config | {"DISABLE_SERVER_SIDE_CURSORS": True}


DATABASES = {"default": database()}

INSTALLED_APPS = [
    "jobs",
    "genflow_project.apps.ConsoleConfig",
    "django.contrib.auth",
    "django.contrib.humanize",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "knox",
    "genflow_client",
    "axes",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "genflow_project.guards.private_by_default",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
]
ROOT_URLCONF = "genflow_project.urls"
ASGI_APPLICATION = "genflow_project.asgi.application"
WSGI_APPLICATION = "genflow_project.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "job-list"
LOGOUT_REDIRECT_URL = "login"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

# After so many wrong passwords for one name from one address, that address waits; its owner, elsewhere, does not.
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = timedelta(minutes=15)
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_RESET_COOL_OFF_ON_FAILURE_DURING_LOCKOUT = False
AXES_RESET_ON_SUCCESS = True
AXES_CLIENT_IP_CALLABLE = "genflow_project.guards.client_address"
AXES_USERNAME_CALLABLE = "genflow_project.guards.login_name"
AXES_LOCKOUT_TEMPLATE = "registration/locked_out.html"
AXES_DISABLE_ACCESS_LOG = True
AXES_VERBOSE = False
# What it writes of a form into its table is without these.
AXES_SENSITIVE_PARAMETERS = [
    "username",
    "ip_address",
    "csrfmiddlewaretoken",
    "old_password",
    "new_password1",
    "new_password2",
]

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"
STATICFILES_DIRS = [BASE_DIR / "static"]
# Without a collectstatic step on a developer's machine.
WHITENOISE_USE_FINDERS = WHITENOISE_AUTOREFRESH = DEBUG
STATIC_STORAGE = (
    "django.contrib.staticfiles.storage.StaticFilesStorage"
    if DEBUG
    else "whitenoise.storage.CompressedManifestStaticFilesStorage"
)


def file_storage() -> dict[str, Any]:
    """Return where photos and pictures are kept: in the bucket of GENFLOW_STORAGE_URL, or in Postgres."""
    url: str = env.str("GENFLOW_STORAGE_URL", default="")
    if not url:
        return {"BACKEND": "jobs.storage.PostgresStorage"}
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if parts.scheme != "s3" or not parts.netloc or options.keys() - {"endpoint_url", "region_name"}:
        raise ImproperlyConfigured(
            "GENFLOW_STORAGE_URL makes no sense: write s3://BUCKET, and if need be"
            " s3://BUCKET/FOLDER?endpoint_url=https://HOST&region_name=REGION."
        )
    if find_spec("storages") is None or find_spec("boto3") is None:
        raise ImproperlyConfigured(
            "GENFLOW_STORAGE_URL needs two packages more: pip install -r requirements-s3.txt"
        )
    bucket = {"bucket_name": parts.netloc, "location": parts.path.strip("/")}
    return {"BACKEND": "jobs.object_storage.ObjectStorage", "OPTIONS": bucket | options}


STORAGES = {
    "default": file_storage(),
    "staticfiles": {"BACKEND": STATIC_STORAGE},
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "jobs.auth.BearerAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": [
        "rest_framework.parsers.MultiPartParser",
        "rest_framework.parsers.JSONParser",
    ],
    "DEFAULT_THROTTLE_CLASSES": ["jobs.throttling.OwnerThrottle"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "jobs.negotiation.AlwaysJSON",
    "EXCEPTION_HANDLER": "jobs.errors.exception_handler",
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "genflow",
    "DESCRIPTION": "Portraits and workflows on ComfyUI, by jobs that survive anything.",
    "VERSION": "2.0.0",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/v2",
    "PREPROCESSING_HOOKS": ["jobs.openapi.described_endpoints"],
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "jobs.openapi.tell_errors",
    ],
    "COMPONENT_SPLIT_REQUEST": True,
    "ENUM_NAME_OVERRIDES": {
        "JobStatus": "jobs.status.JobStatus",
        "JobKind": "jobs.models.Job.Kind",
    },
    "SERVE_AUTHENTICATION": [],
    "AUTHENTICATION_WHITELIST": ["jobs.auth.BearerAuthentication"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "defaultModelsExpandDepth": 0},
}
KNOX_TOKEN_MODEL = "jobs.ApiToken"  # noqa: S105 (no secret)
# Our token model takes the place of knox's, whose migrations would make a table that nothing uses.
MIGRATION_MODULES = {"knox": None}
REST_KNOX = {"TOKEN_TTL": None, "AUTH_HEADER_PREFIX": "Bearer", "TOKEN_PREFIX": "gf_"}

# --- genflow ---------------------------------------------------------------------------------------------

# The ComfyUI servers that `runworkers` drives.
COMFY_URLS: list[str] = env.list("COMFY_URL", default=["http://127.0.0.1:8188"])

# Seconds a worker may stay silent before its job goes to another. It renews at a third of this.
GENFLOW_LEASE_SECONDS: float = env.float("GENFLOW_LEASE_SECONDS", default=15)
# Seconds between two looks at the queue, and at a prompt under way.
GENFLOW_POLL_SECONDS: float = env.float("GENFLOW_POLL_SECONDS", default=1)
# Jobs that one worker process drives at once.
GENFLOW_CONCURRENCY: int = env.int("GENFLOW_CONCURRENCY", default=2)
# Prompts of ours on one ComfyUI, over all workers. Two: the GPU has the next one ready and never idles.
GENFLOW_PROMPTS_PER_BACKEND: int = env.int("GENFLOW_PROMPTS_PER_BACKEND", default=2)
# What ComfyUI makes previews of a run with: auto, latent2rgb, taesd, default (as it was started) or none.
GENFLOW_PREVIEW_METHOD: str = env.str("GENFLOW_PREVIEW_METHOD", default="auto")
# Whether NOTIFY wakes idle workers, and waiting clients' web server. Both poll as well.
GENFLOW_NOTIFY: bool = env.bool("GENFLOW_NOTIFY", default=True)

GENFLOW_MAX_ATTEMPTS: int = env.int("GENFLOW_MAX_ATTEMPTS", default=5)
GENFLOW_RETRY_BASE_SECONDS: float = env.float("GENFLOW_RETRY_BASE_SECONDS", default=2)
GENFLOW_RETRY_MAX_SECONDS: float = env.float("GENFLOW_RETRY_MAX_SECONDS", default=300)
GENFLOW_MAX_RESUBMITS: int = env.int("GENFLOW_MAX_RESUBMITS", default=3)
GENFLOW_MAX_LOST_WORKERS: int = env.int("GENFLOW_MAX_LOST_WORKERS", default=3)
# Seconds without a sign of life from a run or a queue before a backend counts as stuck.
GENFLOW_STALL_SECONDS: float = env.float("GENFLOW_STALL_SECONDS", default=300)
# Seconds an unreachable ComfyUI can keep a cancel waiting.
GENFLOW_CANCEL_SECONDS: float = env.float("GENFLOW_CANCEL_SECONDS", default=60)
# Seconds a worker takes at most to stop politely.
GENFLOW_SHUTDOWN_SECONDS: float = env.float("GENFLOW_SHUTDOWN_SECONDS", default=20)

GENFLOW_QUEUE_LIMIT: int = env.int("GENFLOW_QUEUE_LIMIT", default=1000)
GENFLOW_QUEUE_LIMIT_PER_OWNER: int = env.int("GENFLOW_QUEUE_LIMIT_PER_OWNER", default=100)
# What one owner may take, unless the admin gives them limits of their own. Requests: those that change something,
# on one web process; a minute's worth may come at once. Reads are counted apart, and ten times as many.
GENFLOW_REQUESTS_PER_MINUTE: int = env.int("GENFLOW_REQUESTS_PER_MINUTE", default=600)
GENFLOW_STREAMS_PER_OWNER: int = env.int("GENFLOW_STREAMS_PER_OWNER", default=20)
GENFLOW_STORAGE_PER_OWNER_BYTES: int = env.int(
    "GENFLOW_STORAGE_PER_OWNER_BYTES", default=10 * 1024**3
)
GENFLOW_PHOTO_MAX_BYTES: int = env.int("GENFLOW_PHOTO_MAX_BYTES", default=20 * 1024 * 1024)
GENFLOW_PHOTO_MAX_PIXELS: int = env.int("GENFLOW_PHOTO_MAX_PIXELS", default=64_000_000)
GENFLOW_PHOTO_MAX_SIDE: int = env.int("GENFLOW_PHOTO_MAX_SIDE", default=2048)
GENFLOW_FACE_CHECK: str = env.str("GENFLOW_FACE_CHECK", default="warn").lower()
if GENFLOW_FACE_CHECK not in ("refuse", "warn", "off"):
    raise ImproperlyConfigured(
        f"GENFLOW_FACE_CHECK is {GENFLOW_FACE_CHECK}; set it to refuse, warn or off."
    )
# Bytes of an uploaded asset.
GENFLOW_ASSET_MAX_BYTES: int = env.int("GENFLOW_ASSET_MAX_BYTES", default=100 * 1024 * 1024)
# Of the JSON that asks for a workflow, and of each file that a run leaves.
GENFLOW_WORKFLOW_MAX_BYTES: int = env.int("GENFLOW_WORKFLOW_MAX_BYTES", default=4 * 1024 * 1024)
GENFLOW_OUTPUT_MAX_BYTES: int = env.int("GENFLOW_OUTPUT_MAX_BYTES", default=200 * 1024 * 1024)
GENFLOW_JOB_RETENTION_DAYS: float = env.float("GENFLOW_JOB_RETENTION_DAYS", default=30)
# Requests that a web process works on at once, each on a thread and a database connection of its own.
GENFLOW_WEB_CONNECTIONS: int = env.int("GENFLOW_WEB_CONNECTIONS", default=20)
# Seconds after which a silent event stream says that it is still there.
GENFLOW_HEARTBEAT_SECONDS: float = env.float("GENFLOW_HEARTBEAT_SECONDS", default=15)
# How long the link to a picture works.
SIGNED_URL_LIFETIME = timedelta(minutes=15)

# What the FaceID graph draws with; the names are those that the ComfyUI servers list.
GENFLOW_CHECKPOINT: str = env.str(
    "GENFLOW_CHECKPOINT", default="realisticVisionV51_v51VAE.safetensors"
)
GENFLOW_FACE_PROVIDER: str = env.str("GENFLOW_FACE_PROVIDER", default="CPU")
GENFLOW_SAMPLER: str = env.str("GENFLOW_SAMPLER", default="ddpm")
GENFLOW_SCHEDULER: str = env.str("GENFLOW_SCHEDULER", default="karras")

# The multipart parser keeps what is larger in a temporary file; the limits above are checked by the form.
DATA_UPLOAD_MAX_MEMORY_SIZE = 2 * 1024 * 1024
FILE_UPLOAD_HANDLERS = [
    "django.core.files.uploadhandler.MemoryFileUploadHandler",
    "jobs.photos.NamelessUploadHandler",
]

LOG_LEVEL: str = env.str("LOG_LEVEL", default="INFO").upper()
if LOG_LEVEL not in logging.getLevelNamesMapping():
    raise ImproperlyConfigured(
        f"LOG_LEVEL is {LOG_LEVEL}; set it to DEBUG, INFO, WARNING or ERROR."
    )
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "format": "%(asctime)s %(levelname)s %(name)s %(message)s",
        },
        "terminal": {"()": "jobs.logs.TerminalFormatter"},
    },
    "filters": {"without_query": {"()": "jobs.logs.WithoutQuery"}},
    "handlers": {
        "stderr": {
            "class": "logging.StreamHandler",
            "formatter": "terminal" if sys.stderr.isatty() else "json",
            "filters": ["without_query"],
        }
    },
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        "django": {"handlers": []},  # in DEBUG it has one of its own: each line came twice
        "axes": {"level": "WARNING"},
        # In DEBUG it tells what a photo's EXIF says: where it was taken.
        "PIL": {"level": "INFO"},
    },
}
