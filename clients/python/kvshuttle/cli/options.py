"""How the control plane is reached and how answers are printed: the same options everywhere.

They may stand before the command or after it. The flags are the fields of the client's
`ClientOptions` and `TlsOptions`; where no variable of its own is set, the gateway's is read, so
that on a gateway's machine nothing has to be said twice.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from kvshuttle.cli.output import Printer
from kvshuttle.client import NO_RETRIES, ClientOptions, Timeouts, TlsOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_TARGET = "127.0.0.1:7400"
DEFAULT_TIMEOUT_S = 5.0
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Seconds(click.FloatRange):
    """A time; click takes `nan` to be within any range, and `inf` where there is no highest."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """BadParameter."""
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is no number of seconds: give one as 2.5.", param, ctx)
        return seconds


@dataclasses.dataclass(slots=True)
class Options:
    """The common options' values; `None` where nothing was said."""

    target: str = DEFAULT_TARGET
    tenant: str | None = None
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    token: str | None = dataclasses.field(default=None, repr=False)
    token_file: Path | None = None
    timeout: float = DEFAULT_TIMEOUT_S
    output: str = "table"
    color: bool | None = None
    given: set[str] = dataclasses.field(default_factory=set)

    def printer(self) -> Printer:
        """Where this command's answer goes."""
        return Printer(as_json=self.output == "json", color=self.color)

    def tls_options(self) -> TlsOptions | None:
        """The TLS options, if TLS was asked for by any of them. UsageError for half a key pair."""
        if not (self.tls or self.ca_file or self.cert_file or self.key_file):
            return None
        try:
            return TlsOptions(
                ca_file=self.ca_file,
                cert_file=self.cert_file,
                key_file=self.key_file,
                server_name=self.server_name,
            )
        except ValueError:
            raise click.UsageError(
                "give both --cert-file and --key-file, or neither of them"
            ) from None

    def client_options(self, tenant: str | None = None) -> ClientOptions:
        """What the client needs; `tenant` instead of the one that was named."""
        return ClientOptions(
            tls=self.tls_options(),
            token=self.bearer(),
            tenant=tenant if tenant is not None else self.tenant,
            timeouts=Timeouts(
                begin_turn_s=self.timeout,
                end_turn_s=self.timeout,
                read_s=self.timeout,
                write_s=self.timeout,
            ),
            # An operator wants to know at once what does not answer.
            retries=NO_RETRIES,
        )

    def bearer(self) -> str | None:
        """The token, if there is one. UsageError when its file has none."""
        if self.token_file is None:
            return self.token or None
        try:
            token = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise click.UsageError(f"--token-file: {self.token_file}: {error}") from None
        if not token or not token.isprintable():
            raise click.UsageError(f"--token-file: {self.token_file} does not hold one token")
        return token


def _remember(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """What is said after the command goes over what is said before it."""
    options = ctx.ensure_object(Options)
    name = param.name or ""
    source = ctx.get_parameter_source(name)
    if source is ParameterSource.COMMANDLINE or name not in options.given:
        options.given.add(name)
        if value is not None:
            setattr(options, name, value)


def _env(name: str, gateway: str = "") -> list[str]:
    return [f"KVSHUTTLE_{name}", *([f"KVSHUTTLE_GW_CONTROL_PLANE{gateway}"] if gateway else [])]


def _option(*names: str, **settings: Any) -> click.Option:
    settings.setdefault("show_envvar", False)
    return click.Option(list(names), expose_value=False, callback=_remember, **settings)


def common_options() -> list[click.Parameter]:
    """New parameter objects, for one command."""
    return [
        _option(
            "--target",
            metavar="HOST:PORT",
            envvar=["KVSHUTTLE_TARGET", "KVSHUTTLE_GW_CONTROL_PLANE"],
            help=f"The control plane's API.  [{DEFAULT_TARGET}]",
        ),
        _option(
            "--tenant",
            metavar="NAME",
            envvar=_env("TENANT"),
            help="Whose sessions and leases; an operator that names none sees all.",
        ),
        _option(
            "--tls",
            is_flag=True,
            default=None,
            envvar=_env("TLS"),
            help="Use TLS with the system's authorities; the next three options turn it on too.",
        ),
        _option(
            "--ca-file",
            type=_FILE,
            envvar=_env("CA_FILE", "_CA_FILE"),
            help="PEM of the authority of the control plane's certificate.",
        ),
        _option(
            "--cert-file",
            type=_FILE,
            envvar=_env("CERT_FILE", "_CERT_FILE"),
            help="PEM of a certificate kvshuttle://operator/NAME, for mTLS.",
        ),
        _option(
            "--key-file",
            type=_FILE,
            envvar=_env("KEY_FILE", "_KEY_FILE"),
            help="PEM of that certificate's key.",
        ),
        _option(
            "--server-name",
            metavar="NAME",
            envvar=_env("SERVER_NAME", "_SERVER_NAME"),
            help="Name to expect in the control plane's certificate.",
        ),
        _option(
            "--token-file",
            type=_FILE,
            envvar=_env("TOKEN_FILE"),
            help="File with a bearer token, instead of a certificate.",
        ),
        _option(
            "--token",
            metavar="TOKEN",
            envvar=_env("TOKEN", "_TOKEN"),
            help="The token itself; others on this machine can see it here, so rather set "
            "KVSHUTTLE_TOKEN.",
        ),
        _option(
            "--timeout",
            type=Seconds(min=0, min_open=True, max=3_600),
            metavar="SECONDS",
            envvar=_env("TIMEOUT"),
            help=f"How long one call may take.  [{DEFAULT_TIMEOUT_S:g}]",
        ),
        _option(
            "-o",
            "--output",
            type=click.Choice(["table", "json"]),
            envvar=_env("OUTPUT"),
            help="For people, or for programs.  [table]",
        ),
        _option(
            "--color/--no-color",
            default=None,
            help="Colours or none, whatever stdout is (NO_COLOR is heeded too).",
        ),
    ]


class _Sections(click.Command):
    """Help in two parts: what is the command's own, and what every command takes."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        names = {param.name for param in common_options()}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                (common if param.name in names else own).append(record)
        for title, records in (("Options", own), ("Options of every command", common)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)


class Command(_Sections):
    """A command that takes the common options."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["params"] = [*(settings.get("params") or ()), *common_options()]
        super().__init__(*args, **settings)


class Group(click.Group, _Sections):
    """The program: its commands are Commands, shown in their sections."""

    command_class = Command
    sections: Sequence[tuple[str, Sequence[str]]] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings["params"] = [*(settings.get("params") or ()), *common_options()]
        super().__init__(*args, **settings)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _Sections.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By section, in the order of `sections`."""
        limit = formatter.width - 6 - max(map(len, self.commands), default=0)
        for title, names in self.sections:
            with formatter.section(title):
                formatter.write_dl(
                    [(name, self.commands[name].get_short_help_str(limit)) for name in names]
                )
