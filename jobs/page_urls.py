from __future__ import annotations

from django.contrib.auth.views import LoginView, LogoutView
from django.urls import path

from jobs import account, pages

urlpatterns = [
    path("login/", LoginView.as_view(redirect_authenticated_user=True), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("account/", account.account, name="account"),
    path("account/revoke/", account.revoke_token, name="revoke-token"),
    path("account/password/", account.change_password, name="change-password"),
    path("account/delete/", account.delete_all, name="delete-all"),
    path("", pages.job_list, name="job-list"),
    path("delete/", pages.delete_jobs, name="delete-jobs"),
    path("new/", pages.job_new, name="job-new"),
    # Where the form goes: a browser forgets the page of an address that it has posted to, and with it the
    # form's key, which the back button is to bring again.
    path("new/send/", pages.job_new, name="job-send"),
    path("new/like/<uuid:like>/", pages.job_new, name="job-new"),
    path("jobs/<uuid:pk>/", pages.job_detail, name="job-detail"),
    path("jobs/<uuid:pk>/fragment/", pages.job_fragment, name="job-fragment"),
    path("jobs/<uuid:pk>/pictures/<uuid:asset_id>/", pages.job_picture, name="job-picture"),
    path("jobs/<uuid:pk>/again/", pages.draw_again, name="draw-again"),
    path("jobs/<uuid:pk>/cancel/", pages.cancel_job, name="cancel-job"),
    path("jobs/<uuid:pk>/delete/", pages.delete_job, name="delete-job"),
]
