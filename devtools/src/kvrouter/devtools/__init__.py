"""Development tooling, apart from production code: systems on loopback, traces, replays."""
