"""The HTTP API of assets: HTTP in, one call, HTTP out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.http import Http404
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404
from rest_framework.exceptions import NotAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from jobs.assets import Reference, mint, over_bytes, upload
from jobs.errors import CODES, ApiError
from jobs.idempotency import once_per_key
from jobs.limits import limits_of
from jobs.links import is_signed
from jobs.models import Asset, Once, hash_of, lock_assets
from jobs.parsers import StrictJSONParser
from jobs.pictures import picture_response
from jobs.serializers import FromHashSerializer, UploadSerializer, asset_json
from jobs.views import FormParser, form_of


def own_asset(request: Request, pk: UUID) -> Asset:
    assets = Asset.objects.available().select_related("owner")
    return get_object_or_404(assets, pk=pk, owner=owner_id(request))


def owner_id(request: Request) -> int:
    assert request.user.pk is not None  # by the permissions of the view
    return request.user.pk


def reference(
    request: Request, content_hash: str, asked: Mapping[str, Any], once: Once | None
) -> Reference:
    retention = timedelta(days=settings.GENFLOW_JOB_RETENTION_DAYS)
    return Reference(
        owner_id=owner_id(request),
        hash=content_hash,
        lifetime=timedelta(seconds=asked["expires_in"]) if "expires_in" in asked else retention,
        name=asked.get("file_path", ""),
        content_type=asked.get("content_type", ""),
        once=once,
    )


def asset_kept(request: Request, pk: UUID) -> Response:
    """Answer with an asset over bytes that there were already."""
    return Response(asset_json(own_asset(request, pk), request) | {"created_new": False})


class AssetsView(APIView):
    parser_classes = [FormParser]

    @once_per_key(asset_kept)
    def post(self, request: Request, once: Once | None) -> Response:
        asked = form_of(request, UploadSerializer)
        if asked["file"].size > settings.GENFLOW_ASSET_MAX_BYTES:
            most = f"The file is larger than {settings.GENFLOW_ASSET_MAX_BYTES:,} bytes."
            raise ApiError(413, CODES[413], most)
        content_hash = hash_of(asked["file"])
        if asked.get("expected_hash", content_hash) != content_hash:
            raise ApiError(
                409,
                "hash_mismatch",
                "The bytes that came have another hash than `expected_hash`. Send them again.",
                details={"hash": content_hash},
            )
        assert isinstance(request.user, User)
        asset, is_new = upload(
            asked["file"],
            reference(request, content_hash, asked, once),
            limits_of(request.user).storage_bytes,
        )
        answer = asset_json(asset, request) | {"created_new": is_new}
        return Response(answer, status=201 if is_new else 200)


class AssetFromHashView(APIView):
    parser_classes = [StrictJSONParser]

    @once_per_key(asset_kept)
    def post(self, request: Request, once: Once | None) -> Response:
        form = FromHashSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        asked = form.validated_data
        minted = mint(reference(request, asked["hash"], asked, once))
        if minted is None:
            raise ApiError(404, "blob_not_found", "You have no bytes of this hash. Upload them.")
        asset, is_new = minted
        answer = asset_json(asset, request) | {"created_new": False}
        return Response(answer, status=201 if is_new else 200)


class AssetByHashView(APIView):
    def head(self, request: Request, hash: str) -> Response:
        is_there = over_bytes(owner_id(request), hash).exists()
        return Response(status=200 if is_there else 404)


class AssetView(APIView):
    def get(self, request: Request, pk: UUID) -> Response:
        return Response(asset_json(own_asset(request, pk), request))

    @transaction.atomic
    def delete(self, request: Request, pk: UUID) -> Response:
        lock_assets(owner_id(request))
        asset = own_asset(request, pk)
        if asset.is_in_use:
            raise ApiError(
                409,
                "asset_in_use",
                "A job depends on this asset. Delete the job, or wait until it has ended.",
            )
        Asset.objects.filter(pk=asset.pk).delete_with_files()
        return Response(status=204)


class AssetContentView(APIView):
    permission_classes = []  # a link of ours will do

    def get(self, request: Request, pk: UUID) -> HttpResponseBase:
        asset = Asset.objects.available().select_related("owner").filter(pk=pk).first()
        if asset is not None and (asset.owner_id == request.user.pk or is_signed(request, asset)):
            return picture_response(request, asset)
        raise Http404 if request.user.is_authenticated else NotAuthenticated
