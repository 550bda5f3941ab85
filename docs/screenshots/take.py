"""Takes the pictures in docs/images of a real ``dagster dev``: the queue's page, its checks, and a fenced zombie.

Needs playwright and a Chromium: ``python docs/screenshots/take.py --chromium /usr/bin/chromium``. Where playwright
lives in another environment than Dagster, ``--python`` names the interpreter that has Dagster and this project.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
IMAGES = HERE.parent / "images"
QUEUE = "/assets/queues/landing"
WINDOW: Any = {"width": 1200, "height": 1000}
PATIENCE = 300.0
MOST_BYTES = 200_000
SETTINGS = "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
OBSERVATIONS = 15  # enough of them for a plot to have a shape


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that dagster dev is stopped all the same
    with (
        tempfile.TemporaryDirectory(prefix="screenshots-") as folder,
        _dagster(options.python, Path(folder)) as dagster,
    ):
        say("waiting for the zombie to be stopped, and for another run to take over from it")
        zombie = dagster.make_a_zombie()
        say(f"waiting until the queue was observed {OBSERVATIONS} times and holds leases")
        wait_for(dagster.has_something_to_show)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport=WINDOW)
            page.set_default_timeout(60_000)
            for name, picture in PICTURES.items():
                page.set_viewport_size(WINDOW)
                _save(picture(page, dagster.url, zombie), IMAGES / name)
            browser.close()
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    parser.add_argument("--chromium", default=found, help="the browser (default: $CHROMIUM, or chromium on the PATH)")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has Dagster (default: this one)")
    options = parser.parse_args()
    if not options.chromium:
        parser.error("--chromium: no Chromium on the PATH; install one, or say where it is")
    return options


# The instance


class Dagster:
    """A running ``dagster dev`` and the notes that its code location leaves in its folder."""

    def __init__(self, url: str, home: Path) -> None:
        self.url = url
        self._home = home

    def ask(self, query: str) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}/graphql", json.dumps({"query": query}).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)["data"]

    def is_up(self) -> bool:
        with suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            return "version" in self.ask("{ version }")
        return False

    def make_a_zombie(self) -> str:
        """Let the stopped process go on once its work was taken over and done. Gives the id of its run."""
        stopped = self._home / "stopped.pid"
        wait_for(lambda: stopped.exists() and stopped.read_text() != "")
        [zombie] = self._export_runs("STARTED")
        wait_for((self._home / "taken-over").exists)
        wait_for(lambda: bool(self._export_runs("SUCCESS")))
        os.kill(int(stopped.read_text()), signal.SIGCONT)
        wait_for(lambda: zombie in self._export_runs("FAILURE"))
        return zombie

    def _export_runs(self, status: str) -> list[str]:
        tag = '{key: "omnirelay/work_sensor", value: "exports_work_sensor"}'
        chosen = f"filter: {{statuses: [{status}], tags: [{tag}]}}"
        found = self.ask(f"{{ runsOrError({chosen}) {{ ... on Runs {{ results {{ runId }} }} }} }}")
        return [run["runId"] for run in found["runsOrError"]["results"]]

    def has_something_to_show(self) -> bool:
        """Whether the plots have a shape, the latest observation lists at least two holders, and a check has failed."""
        found = self.ask(
            '{ assetOrError(assetKey: {path: ["queues", "landing"]}) { ... on Asset { assetObservations(limit: 200) '
            "{ metadataEntries { label ... on IntMetadataEntry { intValue } "
            "... on TableMetadataEntry { table { records } } } } } } }"
        )
        seen = found["assetOrError"].get("assetObservations") or []
        if len(seen) < OBSERVATIONS:
            return False
        latest = {entry["label"]: entry for entry in seen[0]["metadataEntries"]}
        return len(latest["leases"]["table"]["records"]) >= 2 and latest["dead"]["intValue"] > 0


@contextmanager
def _dagster(python: str, home: Path) -> Iterator[Dagster]:
    (home / "dagster").mkdir()
    (home / "dagster" / "dagster.yaml").write_text(SETTINGS)
    location = {"relative_path": str(HERE / "code_location.py"), "location_name": "fabric"}
    (home / "workspace.yaml").write_text(json.dumps({"load_from": [{"python_file": location}]}))
    port = _free_port()
    places = {"SCREENSHOTS_HOME": str(home), "DAGSTER_HOME": str(home / "dagster"), "PYTHONPATH": str(ROOT)}
    with (home / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "dagster", "dev", "-w", str(home / "workspace.yaml"), "-p", str(port)],
            env={**os.environ, **places},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # started from a script in the background it would inherit that SIGINT is ignored, and never end
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    dagster = Dagster(f"http://127.0.0.1:{port}", home)
    try:
        say("waiting for dagster dev")
        wait_for(lambda: _alive(process, home) and dagster.is_up())
        yield dagster
    finally:
        _stop(process, home)


def _alive(process: subprocess.Popen[bytes], home: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"dagster dev has ended: {(home / 'dev.log').read_text()[-2000:]}")
    return True


def _stop(process: subprocess.Popen[bytes], home: Path) -> None:
    """End it in its own good time, and then whatever is left of its group, the stopped process too."""
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(60)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError, ValueError):
        os.kill(int((home / "stopped.pid").read_text()), signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The pictures


def queue_plots(page: Page, url: str, zombie: str) -> bytes:
    page.goto(f"{url}{QUEUE}?view=overview")
    page.get_by_text("Plots", exact=True).click()
    page.get_by_text("throughput_per_minute").wait_for()
    return _settled(page)


def queue_leases(page: Page, url: str, zombie: str) -> bytes:
    """The metadata alone, on a page that is wide enough for the table of leases."""
    page.set_viewport_size({"width": 1900, "height": 1400})
    held = page.get_by_text("bronze_orders").first
    for _ in range(60):
        page.goto(f"{url}{QUEUE}?view=overview")
        page.get_by_text("Table", exact=True).click()
        page.get_by_text("oldest_age_seconds").wait_for()
        page.wait_for_timeout(1_000)
        if held.count():
            break
    held.wait_for()
    left, right = _box(page, "Metadata"), _box(page, "Definition")
    bottom = _box(page, "omnirelay/resource")
    return _settled(
        page,
        clip={
            "x": left["x"] - 40,
            "y": left["y"] - 10,
            "width": right["x"] - 30 - left["x"],
            "height": min(bottom["y"], 1400) - left["y"],
        },
    )


def queue_checks(page: Page, url: str, zombie: str) -> bytes:
    page.goto(f"{url}{QUEUE}?view=checks")
    page.get_by_text("dead_letters_empty").first.click()
    page.get_by_text("Latest execution").wait_for()
    return _settled(page)


def fenced_zombie(page: Page, url: str, zombie: str) -> bytes:
    """The run's page down to the error, and not to the stack, which names files of the machine this is taken on."""
    page.set_viewport_size({"width": 1500, "height": 1000})
    page.goto(f"{url}/runs/{zombie}")
    page.get_by_text("STEP_FAILURE").first.wait_for()
    page.get_by_placeholder("Filter…", exact=True).fill("step:daily_export")
    page.keyboard.press("Enter")
    page.get_by_text("RUN_FAILURE").first.wait_for(state="detached")
    page.get_by_text("LeaseRefused").first.wait_for()
    bottom = page.evaluate(WHERE_THE_STACK_BEGINS)
    if not bottom:
        raise RuntimeError("the run's page does not look as it did: no stack below the error")
    return _settled(page, clip={"x": 0, "y": 0, "width": 1500, "height": bottom - 4})


WHERE_THE_STACK_BEGINS = """() => {
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const at = texts.currentNode.data.indexOf("Stack Trace:");
        if (at < 0) continue;
        const range = document.createRange();
        range.setStart(texts.currentNode, at);
        range.setEnd(texts.currentNode, at + 5);
        return range.getBoundingClientRect().top;
    }
}"""


def _box(page: Page, text: str) -> Any:
    return page.get_by_text(text, exact=True).first.bounding_box()


PICTURES: dict[str, Callable[[Page, str, str], bytes]] = {
    "queue-plots.png": queue_plots,
    "queue-leases.png": queue_leases,
    "queue-checks.png": queue_checks,
    "fenced-zombie.png": fenced_zombie,
}


def _settled(page: Page, **clip: Any) -> bytes:
    """A picture once nothing moves any more: two in a row are the same."""
    before, now = b"", page.screenshot(**clip)
    for _ in range(5):
        if now == before:
            break
        page.wait_for_timeout(1_000)
        before, now = now, page.screenshot(**clip)
    return now


def _save(picture: bytes, path: Path) -> None:
    if len(picture) > MOST_BYTES:
        raise RuntimeError(f"{path.name} would have {len(picture):,} bytes: show less of the page")
    path.write_bytes(picture)
    say(f"docs/images/{path.name}: {len(picture) // 1024} KiB")


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came of it within {PATIENCE:.0f} s")
        time.sleep(0.5)


def say(what: str) -> None:
    print(what, flush=True)


if __name__ == "__main__":
    sys.exit(main())
