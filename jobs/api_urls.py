"""Paths of the API, below /api/v2/."""

from __future__ import annotations

from django.urls import path, re_path

from jobs import asset_views, views
from jobs.errors import not_found

urlpatterns = [
    path("portraits", views.PortraitsView.as_view(), name="portraits"),
    path("photos/check", views.PhotoCheckView.as_view(), name="photo-check"),
    path("jobs", views.JobsView.as_view(), name="jobs"),
    path("jobs/<uuid:pk>", views.JobView.as_view(), name="job"),
    path("jobs/<uuid:pk>/cancel", views.CancelJobView.as_view(), name="job-cancel"),
    path("jobs/<uuid:pk>/events", views.JobEventsView.as_view(), name="job-events"),
    path("jobs/<uuid:pk>/image", views.JobImageView.as_view(), name="job-image"),
    path("jobs/<uuid:pk>/workflow", views.JobWorkflowView.as_view(), name="job-workflow"),
    path("assets", asset_views.AssetsView.as_view(), name="assets"),
    path("assets/from-hash", asset_views.AssetFromHashView.as_view(), name="asset-from-hash"),
    path(
        "assets/by-hash/<str:hash>",
        asset_views.AssetByHashView.as_view(),
        name="asset-by-hash",
    ),
    path("assets/<uuid:pk>", asset_views.AssetView.as_view(), name="asset"),
    path("assets/<uuid:pk>/content", asset_views.AssetContentView.as_view(), name="asset-content"),
    re_path("", not_found),
]
