"""Job, Cluster, Recipe, Verdict: frozen, validated values. This package imports no other part of launcher."""
