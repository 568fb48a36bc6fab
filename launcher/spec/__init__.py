"""Job, Cluster, Recipe, Verdict: frozen, validated values. This room knows nothing of the others."""
