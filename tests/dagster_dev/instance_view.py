"""What a running instance shows and does, asked for as its UI asks: in GraphQL."""

from __future__ import annotations

from typing import Any

from tests.dagster_dev.dev_server import DagsterDev

LOCATION = "tests.dagster_dev.first_location"
SECOND_LOCATION = "tests.dagster_dev.second_location"
OVER = ("SUCCESS", "FAILURE", "CANCELED")

_METADATA = """metadataEntries { label
  ... on IntMetadataEntry { intValue } ... on FloatMetadataEntry { floatValue } ... on TextMetadataEntry { text }
  ... on UrlMetadataEntry { url } ... on PathMetadataEntry { path }
  ... on TableMetadataEntry { table { records schema { columns { name } } } } }"""
_EVENTS = f"""query ($key: AssetKeyInput!) {{ assetOrError(assetKey: $key) {{ ... on Asset {{
  assetMaterializations(limit: 20) {{ runId {_METADATA} }}
  assetObservations(limit: 20) {{ runId {_METADATA} }} }} }} }}"""
_CHECKS = """query ($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetChecksOrError { ... on AssetChecks { checks { name
    executionForLatestMaterialization { status evaluation { success severity description } } } } } } } }"""
_TICKS = """query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor {
  sensorState { status ticks(limit: 100) { status cursor runIds skipReason error { message } } } } } }"""
_START = """mutation ($selector: SensorSelector!) { startSensor(sensorSelector: $selector) { __typename
  ... on Sensor { id sensorState { status } } ... on PythonError { message } } }"""
_STOP = """mutation ($id: String!) { stopSensor(id: $id) { __typename
  ... on StopSensorMutationResult { instigationState { status } } ... on PythonError { message } } }"""
_SENSOR = """query ($selector: SensorSelector!) { sensorOrError(sensorSelector: $selector) { ... on Sensor { id } } }"""
_RUN = """query ($id: ID!) { runOrError(runId: $id) { ... on Run { status } } }"""
_LOGS = """query ($id: ID!) { logsForRun(runId: $id, limit: 1000) { ... on EventConnection { events {
  __typename ... on MessageEvent { message } ... on ErrorEvent { error {
    message errorChain { error { message } } } } } } } }"""
_LAUNCH = """mutation ($params: ExecutionParams!) { launchRun(executionParams: $params) { __typename
  ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_BACKFILL = """mutation ($params: LaunchBackfillParams!) { launchPartitionBackfill(backfillParams: $params) { __typename
  ... on LaunchBackfillSuccess { backfillId } ... on PythonError { message } } }"""
_BACKFILL_STATUS = """query ($id: String!) { partitionBackfillOrError(backfillId: $id) { ... on PartitionBackfill {
  status } } }"""
_TERMINATE = """mutation ($id: String!) { terminateRun(runId: $id, terminatePolicy: SAFE_TERMINATE) { __typename } }"""


def materializations(dev: DagsterDev, *asset: str) -> list[dict[str, Any]]:
    """What each materialization of an asset carries, the newest first; its run is under ``run``."""
    return _events(dev, asset, "assetMaterializations")


def observations(dev: DagsterDev, *asset: str) -> list[dict[str, Any]]:
    return _events(dev, asset, "assetObservations")


def _events(dev: DagsterDev, asset: tuple[str, ...], kind: str) -> list[dict[str, Any]]:
    found = dev.ask(_EVENTS, key={"path": list(asset)})["assetOrError"]
    return [
        {"run": event["runId"], **{entry["label"]: _value(entry) for entry in event["metadataEntries"]}}
        for event in found.get(kind, [])
    ]


def _value(entry: dict[str, Any]) -> Any:
    values = [value for name, value in entry.items() if name != "label"]
    return values[0] if values else None


def checks(dev: DagsterDev, *asset: str) -> dict[str, dict[str, Any]]:
    """The latest evaluation of each check of an asset that was evaluated."""
    found = dev.ask(_CHECKS, key={"path": list(asset)})["assetNodeOrError"]["assetChecksOrError"]["checks"]
    latest = {check["name"]: check["executionForLatestMaterialization"] for check in found}
    return {name: execution["evaluation"] for name, execution in latest.items() if execution is not None}


def ticks(dev: DagsterDev, sensor: str, location: str = LOCATION) -> list[dict[str, Any]]:
    """The ticks of a sensor that are over, the newest first."""
    state = dev.ask(_TICKS, selector=_selector(sensor, location))["sensorOrError"]["sensorState"]
    return [tick for tick in state["ticks"] if tick["status"] != "STARTED"]


def start_sensor(dev: DagsterDev, sensor: str, location: str = LOCATION) -> None:
    answer = dev.ask(_START, selector=_selector(sensor, location))["startSensor"]
    assert answer.get("sensorState") == {"status": "RUNNING"}, answer


def stop_sensor(dev: DagsterDev, sensor: str, location: str = LOCATION) -> None:
    found = dev.ask(_SENSOR, selector=_selector(sensor, location))["sensorOrError"]
    answer = dev.ask(_STOP, id=found["id"])["stopSensor"]
    assert answer.get("instigationState") == {"status": "STOPPED"}, answer


def _selector(sensor: str, location: str) -> dict[str, str]:
    return {"repositoryLocationName": location, "repositoryName": "__repository__", "sensorName": sensor}


def launch(dev: DagsterDev, job: str) -> str:
    """Launch a run of a job of the first location; gives its id."""
    params = {
        "selector": {"repositoryLocationName": LOCATION, "repositoryName": "__repository__", "jobName": job},
        "runConfigData": {},
    }
    answer = dev.ask(_LAUNCH, params=params)["launchRun"]
    assert answer["__typename"] == "LaunchRunSuccess", answer
    return str(answer["run"]["runId"])


def backfill(dev: DagsterDev, asset: str, *partitions: str) -> str:
    """Backfill partitions of an asset, and wait until that is over; gives how it ended."""
    params = {"assetSelection": [{"path": [asset]}], "partitionNames": list(partitions)}
    answer = dev.ask(_BACKFILL, params=params)["launchPartitionBackfill"]
    assert answer["__typename"] == "LaunchBackfillSuccess", answer

    def state() -> str:
        return str(dev.ask(_BACKFILL_STATUS, id=answer["backfillId"])["partitionBackfillOrError"]["status"])

    dev.until(lambda: state() not in ("REQUESTED", "CANCELING"), every=0.5)
    return state()


def terminate(dev: DagsterDev, run: str) -> None:
    answer = dev.ask(_TERMINATE, id=run)["terminateRun"]
    assert answer["__typename"] == "TerminateRunSuccess", answer


def status(dev: DagsterDev, run: str) -> str:
    return str(dev.ask(_RUN, id=run)["runOrError"]["status"])


def wait_for_run(dev: DagsterDev, run: str) -> str:
    """How the run ended, once it has."""
    dev.until(lambda: status(dev, run) in OVER, every=0.5)
    return status(dev, run)


def recorded(dev: DagsterDev, run: str) -> set[str]:
    """The kinds of events that Dagster has recorded for a run."""
    return {event["__typename"] for event in _log(dev, run)}


def said(dev: DagsterDev, run: str) -> str:
    """Everything that a run's log says, errors and their causes included."""
    lines = []
    for event in _log(dev, run):
        error = event.get("error") or {}
        lines += [event.get("message", ""), error.get("message", "")]
        lines += [link["error"]["message"] for link in error.get("errorChain", ())]
    return "\n".join(lines)


def _log(dev: DagsterDev, run: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = dev.ask(_LOGS, id=run)["logsForRun"]["events"]
    return events
