from __future__ import annotations

from argparse import ArgumentParser
from datetime import timedelta
from typing import Any, Final

from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from jobs.models import ApiToken

NAME_LENGTH: Final = 100  # of ApiToken.name
MAX_DAYS: Final = 36_500


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
        parser.add_argument(
            "--days", type=int, help="how long it is good for; if not given: for ever"
        )

    def handle(
        self,
        *,
        username: str,
        create_user: bool,
        name: str,
        days: int | None = None,
        **options: Any,
    ) -> None:
        if days is not None and not 1 <= days <= MAX_DAYS:
            raise CommandError(f"--days may be 1 to {MAX_DAYS}")
        if len(name) > NAME_LENGTH:
            raise CommandError(f"--name may have {NAME_LENGTH} characters at most")
        user = User.objects.filter(username=username).first()
        if user is None:
            if not create_user:
                raise CommandError(f"There is no user {username}; --create-user makes one.")
            user = new_user(username)
        expiry = None if days is None else timedelta(days=days)
        _, token = ApiToken.objects.create(user=user, name=name, expiry=expiry)
        self.stdout.write(token)


def new_user(username: str) -> User:
    user = User(username=username)
    user.set_unusable_password()
    try:
        user.full_clean()
    except ValidationError as exc:
        reasons = " ".join(exc.messages)
        raise CommandError(f"{username!r} cannot be the name of a user: {reasons}") from exc
    user.save()
    return user
