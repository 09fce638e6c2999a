from __future__ import annotations

from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path, re_path
from drf_spectacular.views import SpectacularJSONAPIView, SpectacularSwaggerSplitView

from jobs import errors, health

urlpatterns: list[URLPattern | URLResolver] = [
    path("admin/", admin.site.urls),
    path("api/v2/", include("jobs.api_urls")),
    path("api/schema", SpectacularJSONAPIView.as_view(), name="schema"),
    path("api/docs", SpectacularSwaggerSplitView.as_view(), name="api-docs"),
    re_path("^api/", errors.not_found),
    path("", include("jobs.page_urls")),
    path("healthz", health.live),
    path("readyz", health.ready),
]
handler400 = "jobs.errors.bad_request"
handler500 = "jobs.errors.server_error"
