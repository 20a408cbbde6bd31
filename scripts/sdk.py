"""Generates the clients of other languages from proto/, and compiles each with its quickstart.

    python scripts/sdk.py             all that this machine has the tools for
    python scripts/sdk.py go java     these

What is generated lies beside the sources in clients/<language> and is not committed: it is several
megabytes that say nothing proto/ does not, and differs with every compiler's version. `buf` comes
with .venv, the other tools from npm and from Debian (see docs/sdk.md). A language whose tools are
missing is left out with the reason; the exit status is 3 if nothing else went wrong, 1 if a tool
that is there failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import google.rpc  # type: ignore[import-untyped]
import grpc_tools  # type: ignore[import-untyped, unused-ignore]

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "clients"
PROTO = ROOT / "proto"
BUF = Path(sys.executable).parent / "buf"
# The reasons of errors: google.rpc's messages, which some libraries of a language bring along.
RPC_PROTOS = Path(next(iter(google.rpc.__path__))).parents[1]
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
# As golang-*-dev packages lay it out.
GO_PACKAGES = Path("/usr/share/gocode")
GO_MODULE = "kvshuttle.example/client"
JAVA_JARS = Path("/usr/share/java")
# What the quickstart needs to compile and to run.
JAVA_CLASSPATH = (
    "geronimo-annotation-1.3-spec",
    "grpc-api",
    "grpc-context",
    "grpc-core",
    "grpc-netty",
    "grpc-protobuf",
    "grpc-protobuf-lite",
    "grpc-stub",
    "protobuf",
    "guava",
    "jsr305",
    "opencensus-api",
    "netty-buffer",
    "netty-codec",
    "netty-codec-http",
    "netty-codec-http2",
    "netty-common",
    "netty-handler",
    "netty-resolver",
    "netty-tcnative",
    "netty-transport",
    "netty-transport-native-unix-common",
)
DEBIAN = {
    "go": "golang-go golang-google-grpc-dev golang-google-genproto-dev "
    "golang-github-golang-protobuf-1-5-dev protoc-gen-go protoc-gen-go-grpc",
    "java": "default-jdk-headless libgeronimo-annotation-1.3-spec-java libgrpc-java libnetty-java "
    "libnetty-tcnative-java libnetty-tcnative-jni "
    "libprotobuf-java protobuf-compiler protobuf-compiler-grpc-java-plugin",
}


class MissingError(Exception):
    """This machine lacks what the language needs."""


class BuildError(Exception):
    """A tool that is there failed; the text is all that it said."""


def need(language: str, *programs: str, paths: tuple[Path, ...] = ()) -> None:
    """Raises MissingError for the first that is not there."""
    remedy = f"apt-get install {DEBIAN[language]}" if language in DEBIAN else "install Node.js 20"
    for program in programs:
        if shutil.which(program) is None:
            raise MissingError(f"there is no {program}: {remedy}")
    for path in paths:
        if not path.exists():
            raise MissingError(f"there is no {path.name}: {remedy}")


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    """Raises BuildError when it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        check=False,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise BuildError(f"{command[0]} failed with {done.returncode}:\n{done.stdout}")


def generate(here: Path) -> None:
    """All but the agents' stream, which is the engines' own affair."""
    agents = PROTO / "kvshuttle" / "v1" / "agent_service.proto"
    run(*(BUF, "generate", PROTO, "--exclude-path", agents, "--template", "buf.gen.yaml"), cwd=here)


def fresh(path: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def typescript() -> list[str]:
    """npm's compiler and plugin, pinned by package-lock.json."""
    need("typescript", "node", "npm")
    here = CLIENTS / "typescript"
    lock, done = here / "package-lock.json", here / "node_modules" / ".package-lock.json"
    if not done.exists() or done.stat().st_mtime < lock.stat().st_mtime:
        run("npm", "ci", "--no-audit", "--no-fund", cwd=here)
    fresh(here / "gen")
    fresh(here / "dist")
    generate(here)
    run(
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{RPC_PROTOS}"),
        "--plugin=protoc-gen-es=node_modules/.bin/protoc-gen-es",
        *("--es_out=gen", "--es_opt=target=ts,import_extension=js"),
        "google/rpc/error_details.proto",
        cwd=here,
    )
    run("npm", "run", "build", cwd=here)
    return ["node", str(here / "dist" / "src" / "quickstart.js")]


def go() -> list[str]:
    """Debian's compiler, plugins and libraries: no module proxy is asked."""
    grpc = GO_PACKAGES / "src" / "google.golang.org" / "grpc"
    # Of 1.5; with 1.3, which Debian has too, what is generated compiles and does not run.
    protobuf = GO_PACKAGES / "src" / "github.com" / "golang" / "protobuf" / "proto" / "registry.go"
    need("go", "go", "protoc-gen-go", "protoc-gen-go-grpc", paths=(grpc, protobuf))
    here = CLIENTS / "go"
    fresh(here / "v1")
    generate(here)
    build = fresh(here / "build")
    link = build / "path" / "src" / GO_MODULE
    link.parent.mkdir(parents=True)
    link.symlink_to(here)
    program = build / "quickstart"
    environment = {"GO111MODULE": "off", "GOPATH": f"{build / 'path'}:{GO_PACKAGES}"}
    package = f"{GO_MODULE}/quickstart"
    run("go", "vet", package, cwd=here, **environment)
    run("go", "build", "-o", program, package, cwd=here, **environment)
    return [str(program)]


def java() -> list[str]:
    """Debian's compiler, plugin and libraries: no repository is asked."""
    jars = tuple(JAVA_JARS / f"{name}.jar" for name in JAVA_CLASSPATH)
    need("java", "javac", "java", "protoc", "grpc_java_plugin", paths=jars)
    # For TLS. Netty looks for it under another name than Debian's.
    native = next(Path("/usr/lib").glob("*/jni/libnetty-tcnative.so"), Path("libnetty-tcnative.so"))
    need("java", paths=(native,))
    here = CLIENTS / "java"
    gen, classes = fresh(here / "gen"), fresh(here / "build")
    generate(here)
    # Debian's gRPC comes without these; elsewhere they are proto-google-common-protos.
    run(
        *("protoc", f"-I{RPC_PROTOS}", f"-I{WELL_KNOWN}", f"--java_out={gen}"),
        *("google/rpc/status.proto", "google/rpc/error_details.proto"),
        cwd=here,
    )
    classpath = ":".join(map(str, jars))
    sources = [
        str(path)
        for folder in (gen, here / "src", here / "debian")
        for path in folder.rglob("*.java")
    ]
    (classes / "sources").write_text("\n".join(sources))
    run("javac", "-nowarn", "-cp", classpath, "-d", classes, "@build/sources", cwd=here)
    (classes / "native").mkdir()
    shutil.copy(native, classes / "native" / "libnetty_tcnative.so")
    return [
        *("java", f"-Djava.library.path={classes / 'native'}", "-cp", f"{classes}:{classpath}"),
        "kvshuttle.quickstart.Quickstart",
    ]


@dataclass(frozen=True)
class Language:
    """`build` generates and compiles; its result runs the quickstart."""

    name: str
    build: Callable[[], list[str]]


LANGUAGES = [Language(one.__name__, one) for one in (typescript, go, java)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [language.name for language in LANGUAGES]
    parser.add_argument("language", nargs="*", help=f"of {', '.join(names)}; all by default")
    wanted = parser.parse_args().language or names
    if unknown := set(wanted) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    status = 0
    for language in LANGUAGES:
        if language.name not in wanted:
            continue
        start = time.monotonic()
        try:
            language.build()
        except MissingError as missing:
            print(f"  {language.name:<12} left out: {missing}")
            status = status or 3
        except BuildError as failed:
            print(f"  {language.name:<12} FAILED: {failed}")
            status = 1
        else:
            took = time.monotonic() - start
            where = (CLIENTS / language.name).relative_to(ROOT)
            print(f"  {language.name:<12} generated and compiled in {took:.0f} s: {where}")
    return status


if __name__ == "__main__":
    sys.exit(main())
