"""Writes the settings that were found as a file that the services load."""

from __future__ import annotations

from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.simulator.tuning.candidates import Candidate


def toml_of(candidate: Candidate, workers: int, why: str) -> str:
    """Returns the file: options of the Scheduler, and the number of workers of each role, which ``kvrouter up`` starts.

    Weight and temperature are written if the mode uses them: a Scheduler warns of options that have no effect.

    Args:
        candidate: The settings.
        workers: Workers of the fleet.
        why: The reason for them, one line.
    """
    options, remote = candidate.options, candidate.options.remote_prefill
    used = POLICIES[options.mode].options
    fleet = [f"workers = {workers}"]
    if candidate.prefill:
        fleet = [f"prefill = {candidate.prefill}", f"decode = {workers - candidate.prefill}"]
    lines = [
        f"# kvrouter tune: {why}",
        "",
        "[fleet]",
        *fleet,
        "",
        "[scheduler]",
        f'router_mode = "{options.mode}"',
    ]
    if "overlap_score_weight" in used:
        lines.append(f"overlap_score_weight = {float(options.overlap_score_weight)}")
    if "router_temperature" in used:
        lines.append(f"router_temperature = {float(options.temperature)}")
    if options.thresholds.decode_blocks is not None:
        lines.append(f"active_decode_blocks_threshold = {float(options.thresholds.decode_blocks)}")
    if options.thresholds.prefill_tokens is not None:
        lines.append(f"active_prefill_tokens_threshold = {options.thresholds.prefill_tokens}")
    if candidate.prefill:
        lines += [
            f"remote_prefill_min_tokens = {remote.min_tokens}",
            f"kv_bytes_per_token = {remote.transfer.bytes_per_token}",
            f"kv_transfer_gb_per_second = {float(remote.transfer.gigabytes_per_second)}",
            f"kv_transfer_latency_ms = {float(remote.transfer.latency_ms)}",
        ]
        if remote.prefill_us_per_token is not None:
            lines.append(f"prefill_us_per_token = {float(remote.prefill_us_per_token)}")
    return "\n".join(lines) + "\n"
