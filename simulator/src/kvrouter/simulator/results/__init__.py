"""What came of runs: statistics, reports, charts."""
