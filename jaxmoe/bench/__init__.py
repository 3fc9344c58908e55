"""Benchmarks: candidates beside a bound or a peer, interleaved, as ratios."""
