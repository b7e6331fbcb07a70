"""Development tooling, separate from production code: systems on loopback ports, traces, replays."""
