"""The verbs: parse, call one function, print. Heavy imports stand inside the functions."""
