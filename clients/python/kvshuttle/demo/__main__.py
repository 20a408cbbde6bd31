"""Sets up a kvshuttle of real engines, has a conversation with it, and shows what came back.

Exits with 0 only if every turn's output equals a plain vLLM engine's and from turn 2 on KV was
really returned. The last line is one JSON object: medians over the turns from 2 on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import grpc
import httpx

from kvshuttle.demo import display, measure, script
from kvshuttle.demo.cluster import MODEL_NAME, DemoCluster
from kvshuttle.localstack import ProcessError, Stack

if TYPE_CHECKING:
    from collections.abc import Sequence

FAILED, NOT_STARTED, INTERRUPTED = 1, 2, 130


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=Path(".models/smollm2"),
        help="folder of a chat model that vLLM serves (default: %(default)s)",
    )
    parser.add_argument(
        "--turns", type=int, default=5, help=f"2 to {script.MAX_TURNS} (default: %(default)s)"
    )
    parser.add_argument(
        "--keep-running",
        action="store_true",
        help="afterwards leave everything up, print the URLs and how to chat, wait for Ctrl-C",
    )
    parser.add_argument(
        "--plant-wrong-kv",
        action="store_true",
        help="spoil one block of every return: the demo must notice and fail",
    )
    options = parser.parse_args(argv)
    if not 2 <= options.turns <= script.MAX_TURNS:
        parser.error(f"--turns {options.turns}: take 2 to {script.MAX_TURNS}")
    if not (options.model / "config.json").is_file():
        parser.error(f"--model {options.model}: there is no config.json; `make model` makes one")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo. Returns its exit code."""
    options = _options(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    console = display.make_console()
    directory = Path(tempfile.mkdtemp(prefix="kvshuttle-demo-"))
    results: list[measure.TurnResult] = []
    trouble: list[str] = []
    code = 0
    display.title(console)
    try:
        progress = display.StartProgress(console)
        with Stack(progress.update) as stack:
            cluster = DemoCluster(
                stack, options.model, directory, plant_wrong_kv=options.plant_wrong_kv
            )
            progress.show(cluster)
            with progress:
                cluster.start(progress.registering)
            try:
                with display.TurnTable(console, options.turns) as table:
                    for result in measure.Conversation(cluster).run(options.turns):
                        results.append(result)
                        table.add(result)
            except (httpx.HTTPError, grpc.RpcError) as error:
                trouble.append(f"turn {len(results) + 1}: {error}")
            trouble += measure.problems(results, options.turns)
            display.verdict(console, measure.summary(results), trouble)
            code = FAILED if trouble else 0
            if options.keep_running:
                display.keep_running(console, cluster, MODEL_NAME)
                for process in stack.ended():
                    display.part_ended(console, process)
                code = FAILED
    except ProcessError as error:
        said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        console.print(f"\n{said}", style="red", markup=False)
        code = NOT_STARTED
    except KeyboardInterrupt:
        # Behind the ^C that a terminal shows.
        console.print()
        code = code if options.keep_running and results else INTERRUPTED
    if code in (FAILED, NOT_STARTED):
        console.print(f"The logs are in {directory}", style="dim")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    sys.stdout.flush()
    print(json.dumps(measure.summary(results)), flush=True)  # noqa: T201
    return code


def _interrupt(number: int, frame: object) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
