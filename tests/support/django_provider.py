"""A second provider of OpenID Connect, in a process of its own: Django OAuth Toolkit, in which people log in by a form with a password and agree.

It shares no code with the first one (`oidc_provider`): oauthlib has the protocol, jwcrypto signs, and it looks at PKCE by itself.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

PASSWORD: Final = "correct horse battery staple"
"""Of everybody."""
_LOGIN: Final = "<form method=post>{% csrf_token %}{{ form }}<button>Log in here</button></form>"
_BASE: Final = "<!doctype html><html lang=en>{% block content %}{% endblock %}</html>"


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """A client of the provider that runs."""

    issuer: str
    client_id: str
    secret: str


@contextmanager
def django_provider(return_to: str, people: Mapping[str, Sequence[str]]) -> Iterator[Registered]:
    """Run the provider inside the block.

    Parameters
    ----------
    return_to
        Address of its only client that people are sent back to.
    people
        Their names, which are the first part of their addresses of e-mail, and their groups.
    """
    with tempfile.TemporaryDirectory() as directory:
        words = [directory, return_to, json.dumps(people)]
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.django_provider", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, process.wait()
                yield msgspec.json.decode(line, type=Registered)
            finally:
                process.kill()


def _configure(directory: Path) -> None:
    import django
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa
    from django.conf import settings

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    written = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pages = {"registration/login.html": _LOGIN, "oauth2_provider/base.html": _BASE}
    loaders = [
        ("django.template.loaders.locmem.Loader", pages),
        "django.template.loaders.app_directories.Loader",
    ]
    settings.configure(
        SECRET_KEY=secrets.token_urlsafe(32),
        ALLOWED_HOSTS=["localhost"],
        ROOT_URLCONF=__name__,
        LOGIN_URL="/login",
        USE_TZ=True,
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # others are slow on purpose
        MIGRATION_MODULES=dict.fromkeys(
            ("auth", "contenttypes", "sessions", "oauth2_provider")
        ),  # none is run
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": str(directory / "db")}},
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "oauth2_provider",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.middleware.csrf.CsrfViewMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
        ],
        TEMPLATES=[
            {"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {"loaders": loaders}}
        ],
        OAUTH2_PROVIDER={
            "OIDC_ENABLED": True,
            "OIDC_RSA_PRIVATE_KEY": written.decode(),
            "SCOPES": {"openid": "log in", "email": "your address"},
            "OAUTH2_VALIDATOR_CLASS": f"{__name__}.validator",
        },
    )
    django.setup()


def validator(*words: Any, **named: Any) -> Any:
    """Return what decides, and puts address and groups into ID tokens."""
    from oauth2_provider.oauth2_validators import OAuth2Validator

    class Claims(OAuth2Validator):  # type: ignore[misc]
        oidc_claim_scope = None

        def get_additional_claims(self, request: Any) -> dict[str, object]:
            groups = [group.name for group in request.user.groups.all()]
            return {"email": request.user.email, "groups": groups}

    return Claims(*words, **named)


def _fill(return_to: str, people: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """Make the tables, the people and the client; return id and secret of the client."""
    from django.contrib.auth.models import Group, User
    from django.core.management import call_command
    from oauth2_provider.models import Application

    call_command("migrate", run_syncdb=True, verbosity=0)
    for name, groups in people.items():
        person = User.objects.create_user(name, f"{name}@bank.example", PASSWORD)
        person.groups.set([Group.objects.get_or_create(name=group)[0] for group in groups])
    secret = secrets.token_urlsafe(32)
    client = Application.objects.create(
        name="quantdrift",
        client_type="confidential",
        authorization_grant_type="authorization-code",
        redirect_uris=return_to,
        algorithm="RS256",
        client_secret=secret,
    )
    return str(client.client_id), secret


def __getattr__(name: str) -> Any:  # Django asks the module for the addresses that it serves
    if name != "urlpatterns":
        raise AttributeError(name)
    from django.contrib.auth.views import LoginView
    from django.urls import include, path

    return [path("login", LoginView.as_view()), path("o/", include("oauth2_provider.urls"))]


def _serve(directory: str, return_to: str, people: str) -> None:
    import werkzeug.serving
    from django.core.wsgi import get_wsgi_application

    _configure(Path(directory))
    client_id, secret = _fill(return_to, json.loads(people))
    server = werkzeug.serving.make_server("localhost", 0, get_wsgi_application(), threaded=True)
    issuer = f"http://localhost:{server.server_port}/o"
    registered = Registered(issuer=issuer, client_id=client_id, secret=secret)
    sys.stdout.buffer.write(msgspec.json.encode(registered) + b"\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
