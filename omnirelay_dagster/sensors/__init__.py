"""Sensors that work from a lease queue.

    build_work_sensor           launches runs while there is work
    build_backpressure_sensor   holds back whatever feeds the queue while it is too deep
    build_replication_sensor    turns the queue's log into asset materializations
    build_relay_sensor          delivers the queue's log to sinks
    build_run_status_sensors    hands back what dead runs hold

Each takes the key of a ``LeaseQueueResource`` and gives ordinary Dagster sensors, on by default.
"""

from omnirelay_dagster.sensors.backpressure import BackpressureChange, build_backpressure_sensor
from omnirelay_dagster.sensors.relay import build_relay_sensor
from omnirelay_dagster.sensors.replication import build_replication_sensor
from omnirelay_dagster.sensors.run_status import build_run_status_sensors
from omnirelay_dagster.sensors.work import build_work_sensor

__all__ = [
    "BackpressureChange",
    "build_backpressure_sensor",
    "build_relay_sensor",
    "build_replication_sensor",
    "build_run_status_sensors",
    "build_work_sensor",
]
