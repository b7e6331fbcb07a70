"""Results of runs: statistics, reports, charts."""
