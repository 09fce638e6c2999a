from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError

from jobs.models import ApiToken


class Command(BaseCommand):
    help = "Print a new API token of a user. It is stored hashed: there is no second look at it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username")
        parser.add_argument(
            "--create-user",
            action="store_true",
            help="make the user, without a password, if there is none of this name",
        )
        parser.add_argument("--name", default="", help="what the token is for")

    def handle(self, *, username: str, create_user: bool, name: str, **options: Any) -> None:
        user = User.objects.filter(username=username).first()
        if user is None:
            if not create_user:
                raise CommandError(f"There is no user {username}; --create-user makes one.")
            user = User.objects.create_user(username)
        _, token = ApiToken.objects.create(user=user, name=name)
        self.stdout.write(token)
