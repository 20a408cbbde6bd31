"""Writes docs/reference: the API from the protos' descriptors, the settings from their objects.

Run as `python -m scripts.reference`. `--check` only says which files are not current.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import grpc_tools
from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from kvshuttle.controlplane.settings import ENV_PREFIX, Settings, TenantSettings
from kvshuttle.dataplane import config as agent
from kvshuttle.gateway import settings as gateway

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/reference"
WRITTEN = "<!-- Written by `make reference`; change what it is made from. -->\n"

# -- the API -----------------------------------------------------------------------------------


def descriptors() -> list[pb.FileDescriptorProto]:
    """Our files with their comments."""
    names = sorted(path.relative_to(ROOT / "proto") for path in (ROOT / "proto").rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        well_known = Path(grpc_tools.__file__).parent / "_proto"
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={ROOT / 'proto'}",
                f"--proto_path={well_known}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                *map(str, names),
            ]
        )
        if status:
            raise SystemExit(f"protoc ended with status {status}")
        return list(pb.FileDescriptorSet.FromString(out.read_bytes()).file)


class File:
    """One file's descriptors and the comments on them."""

    def __init__(self, file: pb.FileDescriptorProto) -> None:
        self.file = file
        self._texts = {
            tuple(one.path): " ".join(one.leading_comments.split())
            for one in file.source_code_info.location
        }

    def text(self, *path: int) -> str:
        """The comment on what is at this path."""
        return self._texts.get(path, "")

    def messages(self) -> Iterator[tuple[tuple[int, ...], pb.DescriptorProto]]:
        """In the order of the file, but for the entries of maps."""
        for number, message in enumerate(self.file.message_type):
            yield (4, number), message


def _type(field: pb.FieldDescriptorProto, message: pb.DescriptorProto) -> str:
    kinds = pb.FieldDescriptorProto
    name = field.type_name.rpartition(".")[2]
    repeated = field.label == kinds.LABEL_REPEATED
    if field.type == kinds.TYPE_MESSAGE:
        for nested in message.nested_type:
            if nested.name == name and nested.options.map_entry:
                key, value = nested.field
                return f"map of {_type(key, nested)} to {_type(value, nested)}"
    if field.type in (kinds.TYPE_MESSAGE, kinds.TYPE_ENUM):
        ours = field.type_name.startswith(".kvshuttle.v1.")
        word = f"[{name}](#{name.lower()})" if ours else f"`{field.type_name.lstrip('.')}`"
    else:
        word = f"`{kinds.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    if repeated:
        return f"list of {word}"
    return f"{word}, may be absent" if field.proto3_optional else word


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _service(file: File) -> Iterator[str]:
    for number, service in enumerate(file.file.service):
        yield f"### {service.name}\n{file.text(6, number)}\n"
        yield "| call | request | answer | |\n|---|---|---|---|"
        for index, method in enumerate(service.method):
            sides = []
            for name, streams in (
                (method.input_type, method.client_streaming),
                (method.output_type, method.server_streaming),
            ):
                word = name.rpartition(".")[2]
                sides.append(f"{'stream of ' if streams else ''}[{word}](#{word.lower()})")
            text = _cell(file.text(6, number, 2, index))
            yield f"| `{method.name}` | {sides[0]} | {sides[1]} | {text} |"
        yield ""


def _message(file: File, path: tuple[int, ...], message: pb.DescriptorProto) -> Iterator[str]:
    yield f"### {message.name}\n{file.text(*path)}\n"
    if not message.field:
        yield "No fields.\n"
        return
    yield "| field | no. | type | |\n|---|---|---|---|"
    for index, field in enumerate(message.field):
        text = _cell(file.text(*path, 2, index))
        if field.HasField("oneof_index") and not field.proto3_optional:
            text = f"one of `{message.oneof_decl[field.oneof_index].name}`. {text}"
        yield f"| `{field.name}` | {field.number} | {_type(field, message)} | {text} |"
    yield ""


def _enum(file: File, number: int, enum: pb.EnumDescriptorProto) -> Iterator[str]:
    yield f"### {enum.name}\n{file.text(5, number)}\n"
    yield "| value | no. | |\n|---|---|---|"
    for index, value in enumerate(enum.value):
        text = _cell(file.text(5, number, 2, index))
        yield f"| `{value.name}` | {value.number} | {text} |"
    yield ""


def api() -> str:
    """docs/reference/api.md."""
    lines = [
        "# The API, `kvshuttle.v1`",
        WRITTEN,
        "gRPC; Python stubs are in `clients/python/kvshuttle/v1`, the source of all of this in "
        "`proto/kvshuttle/v1`. Calls need a deadline. Errors carry `google.rpc.ErrorInfo` "
        "with a reason and, where it helps, `RetryInfo`. Who may call what: "
        "[operating.md](../operating.md#who-may-call).\n",
    ]
    files = [File(one) for one in descriptors()]
    for title, which in (
        ("Services", [x for f in files for x in _service(f)]),
        ("Messages", [x for f in files for p, m in f.messages() for x in _message(f, p, m)]),
        (
            "Enums",
            [x for f in files for n, e in enumerate(f.file.enum_type) for x in _enum(f, n, e)],
        ),
    ):
        lines += [f"## {title}\n", *which]
    return "\n".join(lines).rstrip() + "\n"


# -- settings ----------------------------------------------------------------------------------


def _annotation(kind: Any) -> str:
    """A type in words."""
    if kind is type(None):
        return ""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is None:
        names = {
            str: "text", int: "number", float: "number", bool: "true or false", Path: "file",
            SecretStr: "secret text",
        }  # fmt: skip
        return names.get(kind, getattr(kind, "__name__", str(kind)))
    if str(origin) == "typing.Literal":
        return ", ".join(f"`{one}`" for one in inner)
    if hasattr(kind, "__metadata__"):
        return _annotation(inner[0])
    if origin is list:
        return f"list of {_annotation(inner[0])}"
    if origin is dict:
        return f"mapping of {_annotation(inner[0])} to {_annotation(inner[1])}"
    return " or ".join(filter(None, map(_annotation, inner)))


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None or value in ("", [], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _bounds(info: Any) -> str:
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [
        f"{word} {getattr(one, name):g}"
        for one in info.metadata
        for name, word in words.items()
        if getattr(one, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def _fields(model: type[BaseModel], prefix: str = "", flags: bool = True) -> Iterator[str]:
    head = ["key of the file", *(["flag", "variable"] if flags else []), "what", "default", ""]
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for name, info in model.model_fields.items():
        default = info.default_factory() if info.default_factory else info.default  # type: ignore[call-arg]
        cells = [f"`{name}`"]
        if flags:
            hidden = "CliSuppress" in str(info.annotation) or "in the file only" in (
                info.description or ""
            )
            cells += ["" if hidden else f"`--{name.replace('_', '-')}`"]
            cells += [f"`{prefix}{name.upper()}`"]
        cells += [_annotation(info.annotation) + _bounds(info), _default(default)]
        cells.append(_cell(info.description or ""))
        yield f"| {' | '.join(cells)} |"
    yield ""


def _agent() -> Iterator[str]:
    """A dataclass has its words below each field, where Python itself does not look."""
    tree = ast.parse(inspect.getsource(agent.AgentConfig))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    yield "| key | default | |\n|---|---|---|"
    for field, text in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(text, ast.Expr):
            continue
        assert isinstance(field.target, ast.Name)
        assert isinstance(text.value, ast.Constant)
        value = "required"
        if field.value is not None:
            made = isinstance(field.value, ast.Call)
            value = "`{}`" if made else _default(ast.literal_eval(field.value))
        said = " ".join(str(text.value.value).replace("``", "`").split())
        yield f"| `{field.target.id}` | {value} | {_cell(said)} |"
    yield ""


def configuration() -> str:
    """docs/reference/configuration.md."""
    tenant = [
        f"| `{name}` | {_annotation(info.annotation)} |"
        for name, info in TenantSettings.model_fields.items()
    ]
    lines = [
        "# Settings",
        WRITTEN,
        "## Control plane: `kvshuttle-controlplane`",
        "Flags go before the environment, that before the file of `--config` (YAML or TOML). Why "
        "a default is as it is stands in `controlplane/kvshuttle/controlplane/model/limits.py`.\n",
        *_fields(Settings, ENV_PREFIX),
        "`tenants` maps a tenant's name to limits that differ from everybody's:\n",
        "| key | what |\n|---|---|",
        *tenant,
        "",
        "## Gateway: `kvshuttle-gateway`",
        "Flags go before the environment, that before the file of `--config` (YAML or JSON).\n",
        *_fields(gateway.GatewaySettings, gateway.ENV_PREFIX),
        "## Agent: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`",
        "An unknown key is refused. [agent.md](../agent.md) says more, and what else vLLM must be "
        "started with.\n",
        *_agent(),
        "## Command line: `kvshuttle`",
        "[cli.md](../cli.md) has its options and their variables.",
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """0 when the files are, or now are, as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for name, text in (("api.md", api()), ("configuration.md", configuration())):
        path = FOLDER / name
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"not current, run make reference: {', '.join(stale)}\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
